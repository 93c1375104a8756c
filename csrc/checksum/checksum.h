// Checksums of a stretch of memory, to find out later whether it has changed.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace shmsync {

// Fixed, because two sides compare them: each checksum is of this many bytes, the last one of what is left.
constexpr std::size_t kChecksumPiece = std::size_t{4} << 20;

// XXH3, 64 bits, seed 0, of each piece. Reads on threads() threads.
std::vector<std::uint64_t> checksums(const void* address, std::size_t nbytes);

}  // namespace shmsync
