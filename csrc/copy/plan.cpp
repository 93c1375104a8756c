#include "copy/plan.h"

#include <algorithm>
#include <limits>
#include <stdexcept>
#include <string>

#include "copy/kernels.h"
#include "settings.h"
#include "threads/parts.h"

namespace shmsync {

namespace {

// What a thread takes at a time: small enough that the threads finish together, large enough that taking it costs
// nothing.
constexpr std::size_t kLeastShare = std::size_t{64} << 10, kMostShare = std::size_t{1} << 20;
constexpr std::size_t kShares = 64;
// Rows are cut at multiples of this, so that no cache line belongs to two threads and no number is cut.
constexpr std::size_t kCut = 4096;
// A run of fewer bytes is over before a sleeping helper would have been of use.
constexpr std::size_t kAlone = std::size_t{768} << 10;

[[noreturn]] void refuse(const std::string& expected, const std::string& got, std::size_t row) {
  throw std::invalid_argument("Expected " + expected + ", got " + got + " - at row " + std::to_string(row));
}

void check_range(const char* what, std::uintptr_t address, std::size_t nbytes, std::size_t row) {
  if (address == 0) refuse(std::string("the address of a ") + what, "0", row);
  if (nbytes > std::numeric_limits<std::uintptr_t>::max() - address) {
    refuse(std::string("a ") + what + " within the address space",
           std::to_string(nbytes) + " bytes at " + std::to_string(address), row);
  }
}

}  // namespace

// One run of a plan, which the threads share.
class PlanRun final : public Parts {
 public:
  PlanRun(const Plan& plan, const Kernels& kernels, const std::uintptr_t* sources, std::size_t threads)
      : Parts(plan.shares_.size() - 1, threads),
        plan_(plan),
        sources_(sources),
        kernels_(plan.streaming_ ? kernels.streaming : kernels.cached),
        fence_(kernels.fence) {}

 private:
  void part(std::size_t share) noexcept override {
    const std::size_t end = plan_.shares_[share + 1];
    for (std::size_t i = plan_.shares_[share]; i < end; ++i) {
      if (i + 1 < end) fetch_ahead(plan_.pieces_[i + 1]);
      copy(plan_.pieces_[i]);
    }
  }
  void finish() noexcept override { fence_(); }

  // The hardware cannot know where the next row lies: ask for the beginning of each lane of it (see lines.h). Worth 10 %
  // for rows of 10 KB and 2 % for 50 KB.
  void fetch_ahead(const Plan::Piece& piece) const noexcept {
    const char* source = reinterpret_cast<const char*>(sources_[piece.row] + piece.offset);
    for (std::size_t lane = 0; lane < 4; ++lane) {
      for (std::size_t line = 0; line < 4; ++line) __builtin_prefetch(source + piece.nbytes / 4 * lane + 64 * line);
    }
  }

  void copy(const Plan::Piece& piece) const noexcept {
    const Row& row = plan_.rows_[piece.row];
    const std::uintptr_t destination = row.destination + destination_nbytes(row.kind, piece.offset);
    const std::uintptr_t source = sources_[piece.row] + piece.offset;
    kernels_[static_cast<std::size_t>(row.kind)](reinterpret_cast<void*>(destination),
                                                 reinterpret_cast<const void*>(source), piece.nbytes);
  }

  const Plan& plan_;
  const std::uintptr_t* sources_;
  const Kernel* kernels_;
  void (*fence_)();
};

Plan::Plan(std::vector<Row> rows) : rows_(std::move(rows)) {
  check_rows();
  check_overlaps();
  for (const Row& row : rows_) {
    source_nbytes_ += row.nbytes;
    destination_nbytes_ += shmsync::destination_nbytes(row.kind, row.nbytes);
  }
  streaming_ = destination_nbytes_ >= stream_min_bytes();
  cut();
}

void Plan::check_rows() const {
  for (std::size_t i = 0; i < rows_.size(); ++i) {
    const Row& row = rows_[i];
    if (row.nbytes == 0) continue;
    const std::size_t item = traits(row.kind).source_item;
    if (row.nbytes % item != 0) {
      refuse("a multiple of " + std::to_string(item) + " bytes for " + traits(row.kind).name,
             std::to_string(row.nbytes), i);
    }
    if (row.nbytes > std::numeric_limits<std::size_t>::max() / 2) refuse("fewer bytes", std::to_string(row.nbytes), i);
    check_range("destination", row.destination, shmsync::destination_nbytes(row.kind, row.nbytes), i);
  }
}

void Plan::check_overlaps() const {
  std::vector<std::size_t> order;
  for (std::size_t i = 0; i < rows_.size(); ++i) {
    if (rows_[i].nbytes != 0) order.push_back(i);
  }
  const auto start = [this](std::size_t i) { return rows_[i].destination; };
  std::sort(order.begin(), order.end(), [&](std::size_t a, std::size_t b) { return start(a) < start(b); });
  for (std::size_t k = 1; k < order.size(); ++k) {
    const Row& before = rows_[order[k - 1]];
    if (start(order[k]) - before.destination < shmsync::destination_nbytes(before.kind, before.nbytes)) {
      refuse("destinations that don't overlap", "one that overlaps that of row " + std::to_string(order[k - 1]),
             order[k]);
    }
  }
}

// By bytes over the concatenation of all rows, whatever their sizes.
void Plan::cut() {
  const std::size_t share = std::clamp(source_nbytes_ / kShares, kLeastShare, kMostShare);
  std::size_t in_share = 0;
  shares_.push_back(0);
  for (std::size_t row = 0; row < rows_.size(); ++row) {
    for (std::size_t offset = 0; offset < rows_[row].nbytes;) {
      const std::size_t left = rows_[row].nbytes - offset;
      const std::size_t room = std::max((share - in_share) / kCut * kCut, kCut);
      const std::size_t nbytes = std::min(left, room);
      pieces_.push_back({row, offset, nbytes});
      offset += nbytes;
      in_share += nbytes;
      if (in_share + kCut > share) {
        shares_.push_back(pieces_.size());
        in_share = 0;
      }
    }
  }
  if (in_share != 0) shares_.push_back(pieces_.size());
}

void Plan::check_sources(const std::uintptr_t* sources) const {
  for (std::size_t i = 0; i < rows_.size(); ++i) {
    if (rows_[i].nbytes != 0) check_range("source", sources[i], rows_[i].nbytes, i);
  }
}

void Plan::run(const std::uintptr_t* sources) const {
  check_sources(sources);
  const std::size_t together = source_nbytes_ < kAlone ? 1 : std::min(threads(), shares_.size() - 1);
  PlanRun run(*this, kernels(), sources, together);
  run_together(run, together - 1);
}

}  // namespace shmsync
