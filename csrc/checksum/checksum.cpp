#include "checksum/checksum.h"

#include <algorithm>

#include "settings.h"
#include "threads/parts.h"

#define XXH_INLINE_ALL
#include "vendor/xxhash/xxhash.h"

namespace shmsync {

namespace {

class ChecksumRun final : public Parts {
 public:
  ChecksumRun(const char* address, std::size_t nbytes, std::vector<std::uint64_t>& results, std::size_t threads)
      : Parts(results.size(), threads), address_(address), nbytes_(nbytes), results_(results) {}

 private:
  void part(std::size_t index) noexcept override {
    const std::size_t offset = index * kChecksumPiece;
    results_[index] = XXH3_64bits(address_ + offset, std::min(kChecksumPiece, nbytes_ - offset));
  }

  const char* address_;
  std::size_t nbytes_;
  std::vector<std::uint64_t>& results_;
};

}  // namespace

std::vector<std::uint64_t> checksums(const void* address, std::size_t nbytes) {
  const std::size_t count = nbytes / kChecksumPiece + (nbytes % kChecksumPiece != 0);
  std::vector<std::uint64_t> results(count);
  const std::size_t together = std::min(threads(), std::max<std::size_t>(count, 1));
  ChecksumRun run(static_cast<const char*>(address), nbytes, results, together);
  run_together(run, together - 1);
  return results;
}

}  // namespace shmsync
