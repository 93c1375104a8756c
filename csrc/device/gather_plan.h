// Which arrays of a device are brought together there, planned once, and the launches of the gather kernel that do so.
#pragma once

#include <cstddef>
#include <string>
#include <vector>

#include "copy/kind.h"
#include "device/calls.h"
#include "device/gather.h"

namespace shmsync::cuda {

// One array: nbytes bytes of a source become destination_nbytes(kind, nbytes) bytes at `offset` from a base.
struct GatherPart {
  Address offset;
  std::size_t nbytes;
  Kind kind;
};

// Contract: for one thread at a time; a table is written by one plan alone. The caller vouches for the addresses, and
// keeps the plan until the stream has passed the upload.
class GatherPlan {
 public:
  // Throws std::invalid_argument that names the part, if nbytes is no whole number of the kind's items or an offset
  // reaches too far.
  explicit GatherPlan(const std::vector<GatherPart>& parts);

  std::size_t size() const { return parts_; }
  // Of the table in device memory; 0: there is nothing to be copied.
  std::size_t table_nbytes() const { return rows_.size() * sizeof(GatherRow); }

  // Queues the copy of the table to device memory, with one source for each part; whether it did: not if these are the
  // sources that the memory has already. Waits for what was queued before, but only if it queues something. Throws as
  // the constructor, if a source is 0.
  bool upload(int index, Address table, const Address* sources, Address stream);

  // Queues the kernel, with what was uploaded to `table`.
  void launch(int index, Address kernel, Address table, Address base, Address stream) const;

 private:
  std::size_t parts_;
  std::vector<GatherRow> rows_;     // those with bytes
  std::vector<std::size_t> which_;  // row i is part which_[i]
  std::uint64_t blocks_ = 0;
  Address uploaded_ = 0;  // to where
};

// For GatherPlan::launch.
Address gather_kernel(int index, const std::string& image);

}  // namespace shmsync::cuda
