// A copy of many separate arrays that is prepared once and made many times.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "copy/kind.h"

namespace shmsync {

// One array: nbytes bytes of a source become destination_nbytes(kind, nbytes) bytes at `destination`.
struct Row {
  std::uintptr_t destination;
  std::size_t nbytes;
  Kind kind;
};

// Contract: a plan is not changed by a run, so any number of threads may run it at once. The caller vouches for the
// addresses, keeps their memory alive, and lets nobody write the sources or read the destinations while it runs.
class Plan {
 public:
  // Throws std::invalid_argument that names the row, if a destination is 0 or reaches beyond the address space, nbytes
  // is not a whole number of the kind's items, or two destinations overlap. A row of 0 bytes may have any address.
  explicit Plan(std::vector<Row> rows);

  // Copies from the sources, one address for each row. All bytes have been written when it returns, for whoever sees a
  // later release store or unlock. Throws likewise, before a byte is written, if a source is 0 or reaches too far.
  void run(const std::uintptr_t* sources) const;
  void check_sources(const std::uintptr_t* sources) const;

  std::size_t size() const { return rows_.size(); }
  // Bytes that a run reads, and writes.
  std::size_t source_nbytes() const { return source_nbytes_; }
  std::size_t destination_nbytes() const { return destination_nbytes_; }
  bool streaming() const { return streaming_; }

 private:
  friend class PlanRun;

  // A part of one row.
  struct Piece {
    std::size_t row, offset, nbytes;
  };

  void check_rows() const;
  void check_overlaps() const;
  void cut();

  std::vector<Row> rows_;
  std::vector<Piece> pieces_;
  std::vector<std::size_t> shares_;  // share i is pieces_[shares_[i]] up to pieces_[shares_[i + 1]]
  std::size_t source_nbytes_ = 0, destination_nbytes_ = 0;
  bool streaming_ = false;
};

}  // namespace shmsync
