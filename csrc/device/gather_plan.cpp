#include "device/gather_plan.h"

#include <limits>
#include <stdexcept>

namespace shmsync::cuda {

namespace {

// Of a launch.
constexpr std::uint64_t kMostBlocks = std::numeric_limits<std::int32_t>::max();

[[noreturn]] void refuse(const std::string& expected, const std::string& got, std::size_t part) {
  throw std::invalid_argument("Expected " + expected + ", got " + got + " - at row " + std::to_string(part));
}

void check(const GatherPart& part, std::size_t number) {
  const std::size_t item = traits(part.kind).source_item;
  if (part.nbytes % item != 0) {
    refuse("a multiple of " + std::to_string(item) + " bytes for " + traits(part.kind).name,
           std::to_string(part.nbytes), number);
  }
  constexpr std::size_t most = std::size_t{1} << 60;
  if (part.nbytes > most || part.offset > most) refuse("fewer bytes", std::to_string(part.nbytes), number);
}

}  // namespace

GatherPlan::GatherPlan(const std::vector<GatherPart>& parts) : parts_(parts.size()) {
  for (std::size_t i = 0; i < parts.size(); ++i) {
    const GatherPart& part = parts[i];
    check(part, i);
    if (part.nbytes == 0) continue;
    const std::uint64_t count = part.nbytes / traits(part.kind).source_item;
    const auto kind = static_cast<std::uint32_t>(part.kind), first = static_cast<std::uint32_t>(blocks_);
    rows_.push_back({0, part.offset, count, kind, first});
    which_.push_back(i);
    blocks_ += pieces(part.kind != Kind::bytes, count);
    if (blocks_ > kMostBlocks) refuse("fewer bytes in all", std::to_string(part.nbytes) + " more", i);
  }
}

bool GatherPlan::upload(int index, Address table, const Address* sources, Address stream) {
  bool same = uploaded_ == table;
  for (std::size_t i = 0; i < rows_.size(); ++i) {
    const Address source = sources[which_[i]];
    if (source == 0) refuse("the address of a source", "0", which_[i]);
    same = same && rows_[i].source == source;
  }
  if (same || rows_.empty()) return false;
  // An upload may still read the rows, where devices reach pageable memory, and a launch the table.
  stream_synchronize(index, stream);
  uploaded_ = 0;
  for (std::size_t i = 0; i < rows_.size(); ++i) rows_[i].source = sources[which_[i]];
  copy(index, table, reinterpret_cast<Address>(rows_.data()), table_nbytes(), stream);
  uploaded_ = table;
  return true;
}

void GatherPlan::launch(int index, Address kernel, Address table, Address base, Address stream) const {
  if (rows_.empty()) return;
  if (uploaded_ != table) throw std::invalid_argument("Expected a table that was uploaded, got another one");
  auto count = static_cast<unsigned>(rows_.size());
  void* arguments[] = {&table, &count, &base};
  kernel_launch(index, kernel, static_cast<unsigned>(blocks_), kGatherThreads, arguments, stream);
}

#define SHMSYNC_TEXT(name) #name
#define SHMSYNC_TEXT_OF(name) SHMSYNC_TEXT(name)

Address gather_kernel(int index, const std::string& image) {
  return kernel_load(index, image, SHMSYNC_TEXT_OF(SHMSYNC_GATHER_KERNEL));
}

}  // namespace shmsync::cuda
