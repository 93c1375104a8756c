// Memory of devices, of other processes' devices, and registered memory of the host.
#pragma once

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstdio>
#include <cstring>

#include "work.h"

namespace fake {

constexpr std::size_t kHandleBytes = 64;

struct Handle {
  char magic[8];
  std::int32_t pid, fd;
  std::uint64_t nbytes, nonce;
  std::int32_t physical;
  char rest[kHandleBytes - 36];
};
static_assert(sizeof(Handle) == kHandleBytes);

constexpr char kMagic[8] = {'f', 'a', 'k', 'e', 'C', 'U', 'D', 'A'};

inline std::size_t page() { return std::size_t(sysconf(_SC_PAGESIZE)); }
inline std::size_t in_pages(std::size_t nbytes) { return (nbytes + page() - 1) / page() * page(); }

// The last page of a block's file says which block it is; 0 once it is freed.
inline std::uint64_t& nonce_of(const Range& range) {
  return *reinterpret_cast<std::uint64_t*>(range.begin + in_pages(range.nbytes));
}

inline int lock(int fd, short type) {
  struct flock lock {};
  lock.l_type = type;
  lock.l_whence = SEEK_SET;
  return fcntl(fd, F_OFD_SETLK, &lock);
}

// Its address, or 0.
inline Address map(int fd, std::size_t nbytes) {
  void* mapped = mmap(nullptr, in_pages(nbytes) + page(), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  return mapped == MAP_FAILED ? 0 : reinterpret_cast<Address>(mapped);
}

// Leaves the addresses reserved, so that a use of them is found out.
inline void unmap(const Block& block) {
  const std::size_t whole = in_pages(block.range.nbytes) + page();
  mmap(reinterpret_cast<void*>(block.range.begin), whole, PROT_NONE,
       MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED | MAP_NORESERVE, -1, 0);
  close(block.fd);
  state().freed.push_back({block.range.begin, whole});
}

inline std::size_t bytes_on(int device) {
  std::size_t sum = 0;
  for (const auto& [address, block] : state().blocks) {
    if (block.opens == 0 && block.device == device) sum += block.range.nbytes;
  }
  return sum;
}

inline int allocate(int device, std::size_t nbytes, Address& made) {
  made = 0;
  if (nbytes == 0) return kSuccess;
  const auto limit = state().limits.find(device);
  if (nbytes > (std::size_t{1} << 46)) return kMemoryAllocation;
  if (limit != state().limits.end() && bytes_on(device) + nbytes > limit->second) return kMemoryAllocation;
  const int fd = memfd_create("fake-cuda", MFD_CLOEXEC);
  if (fd < 0) return kMemoryAllocation;
  const bool sized = ftruncate(fd, off_t(in_pages(nbytes) + page())) == 0;
  made = sized ? map(fd, nbytes) : 0;
  if (made == 0) {
    close(fd);
    return kMemoryAllocation;
  }
  const Range range{made, nbytes};
  std::memset(reinterpret_cast<void*>(made), 0xCC, nbytes);
  // Not from the seed: two processes may have the same.
  nonce_of(range) = std::random_device{}() | std::uint64_t{std::random_device{}()} << 32 | 1;
  state().blocks[made] = {range, device, fd, 0, ""};
  return kSuccess;
}

inline int free_block(Address address) {
  if (address == 0) return kSuccess;
  const auto found = state().blocks.find(address);
  if (found == state().blocks.end() || found->second.opens != 0) return kInvalidValue;
  const Block block = found->second;
  drain_device(block.device);
  finish_work_on(block.range);  // of other devices
  if (lock(block.fd, F_WRLCK) != 0) state().violation("freed under a mapping");
  nonce_of(block.range) = 0;
  std::memset(reinterpret_cast<void*>(address), 0xDD, block.range.nbytes);
  unmap(block);
  state().blocks.erase(address);
  return kSuccess;
}

// The block that a range lies in, or nullptr.
inline const Block* block_of(const Range& range) {
  auto after = state().blocks.upper_bound(range.begin);
  if (after == state().blocks.begin()) return nullptr;
  const Block& block = std::prev(after)->second;
  return block.range.holds(range) ? &block : nullptr;
}

// ── Between processes ────────────────────────────────────────────────────────────────────────────────────────────────

inline int export_block(Address address, Handle& handle) {
  const Block* block = block_of({address, 1});
  if (block == nullptr || block->opens != 0) return kInvalidValue;
  handle = {};
  std::memcpy(handle.magic, kMagic, sizeof kMagic);
  handle.pid = getpid();
  handle.fd = block->fd;
  handle.nbytes = block->range.nbytes;
  handle.nonce = nonce_of(block->range);
  handle.physical = state().physical[std::size_t(block->device)];
  return kSuccess;
}

inline Block* open_block(const std::string& handle) {
  for (auto& [address, block] : state().blocks) {
    if (block.opens != 0 && block.handle == handle) return &block;
  }
  return nullptr;
}

// A file description of our own of what the handle names; -1 if the process or its file is gone.
inline int open_file(const Handle& handle) {
  char path[64];
  std::snprintf(path, sizeof path, "/proc/%d/fd/%d", handle.pid, handle.fd);
  const int fd = open(path, O_RDWR | O_CLOEXEC);
  if (fd < 0) return -1;
  struct stat status {};
  const bool same = fstat(fd, &status) == 0 && status.st_size == off_t(in_pages(handle.nbytes) + page());
  if (same && lock(fd, F_RDLCK) == 0) return fd;
  close(fd);
  return -1;
}

inline int map_handle(const Handle& handle, int device, Address& made) {
  const int fd = open_file(handle);
  if (fd < 0) return kMapBufferObjectFailed;
  const Block block{{map(fd, handle.nbytes), handle.nbytes}, device, fd, 1,
                    {reinterpret_cast<const char*>(&handle), kHandleBytes}};
  // Under the lock: the owner clears it under the exclusive one.
  if (block.range.begin != 0 && nonce_of(block.range) == handle.nonce) {
    state().blocks[made = block.range.begin] = block;
    return kSuccess;
  }
  if (block.range.begin != 0) munmap(reinterpret_cast<void*>(block.range.begin), in_pages(handle.nbytes) + page());
  close(fd);
  return kMapBufferObjectFailed;
}

inline int open_handle(const Handle& handle, int current_device, unsigned flags, Address& made) {
  if (std::memcmp(handle.magic, kMagic, sizeof kMagic) != 0) return kInvalidValue;
  if (handle.pid == getpid()) return kInvalidResourceHandle;
  const int device = state().index_of(handle.physical);
  if (device < 0) return kInvalidDevice;
  if (device != current_device && (flags & 1) == 0) return kInvalidValue;
  if (device != current_device && !state().peers) return kPeerAccessUnsupported;
  if (Block* open = open_block({reinterpret_cast<const char*>(&handle), kHandleBytes})) {
    state().violation("opened twice");
    ++open->opens;
    made = open->range.begin;
    return kSuccess;
  }
  return map_handle(handle, device, made);
}

inline int close_block(Address address) {
  const auto found = state().blocks.find(address);
  if (found == state().blocks.end() || found->second.opens == 0) return kInvalidValue;
  finish_work_on(found->second.range);
  if (--found->second.opens != 0) return kSuccess;
  unmap(found->second);
  state().blocks.erase(found);
  return kSuccess;
}

// ── Memory of the host ───────────────────────────────────────────────────────────────────────────────────────────────

// What /proc/self/maps says about every page of a range: "" if one is not mapped, else "r" or "rw".
inline std::string permissions(const Range& range) {
  std::FILE* maps = std::fopen("/proc/self/maps", "re");
  if (maps == nullptr) return "";
  Address covered = range.begin;
  bool writable = true;
  char line[4096];
  while (covered < range.end() && std::fgets(line, sizeof line, maps) != nullptr) {
    unsigned long begin = 0, end = 0;
    char flags[5] = "";
    if (std::sscanf(line, "%lx-%lx %4s", &begin, &end, flags) != 3 || end <= covered) continue;
    if (begin > covered || flags[0] != 'r') break;
    writable = writable && flags[1] == 'w';
    covered = end;
  }
  std::fclose(maps);
  if (covered < range.end()) return "";
  return writable ? "rw" : "r";
}

constexpr int kReadOnlySupported = 113;  // cudaDevAttrHostRegisterReadOnlySupported
constexpr unsigned kReadOnly = 8;

inline int register_host(const Range& range, unsigned flags) {
  if (range.begin == 0 || range.nbytes == 0 || (flags & ~15u) != 0) return kInvalidValue;
  for (const auto& [address, other] : state().registrations) {
    if (other.range.meets(range)) return kHostMemoryAlreadyRegistered;
  }
  const bool read_only = (flags & kReadOnly) != 0;
  if (read_only && state().attributes[kReadOnlySupported] == 0) return kNotSupported;
  const std::string allowed = permissions(range);
  if (allowed.empty() || (allowed == "r" && !read_only)) return kInvalidValue;
  state().registrations[range.begin] = {range, read_only};
  return kSuccess;
}

inline int unregister_host(Address address) {
  const auto found = state().registrations.find(address);
  if (found == state().registrations.end()) return kHostMemoryNotRegistered;
  finish_work_on(found->second.range);
  state().registrations.erase(found);
  return kSuccess;
}

// ── What a range is ──────────────────────────────────────────────────────────────────────────────────────────────────

enum class Place { device, registered, read_only, pageable, invalid };

inline Place place_in_registrations(const Range& range) {
  for (const auto& [address, registration] : state().registrations) {
    if (registration.range.holds(range)) return registration.read_only ? Place::read_only : Place::registered;
    if (registration.range.meets(range)) return Place::invalid;
  }
  return Place::pageable;
}

inline Place place_of(const Range& range) {
  if (range.begin == 0 || range.end() < range.begin) return Place::invalid;
  if (block_of(range) != nullptr) return Place::device;
  for (const auto& [address, block] : state().blocks) {
    if (block.range.meets(range)) return Place::invalid;
  }
  for (const Range& freed : state().freed) {
    if (freed.meets(range)) return Place::invalid;
  }
  const Address first = range.begin / page() * page();
  const bool mapped = msync(reinterpret_cast<void*>(first), range.end() - first, MS_ASYNC) == 0;
  return mapped ? place_in_registrations(range) : Place::invalid;
}

inline bool is_queueable(Place place) { return place != Place::pageable && place != Place::invalid; }

inline void forget_freed() {
  for (const Range& freed : state().freed) munmap(reinterpret_cast<void*>(freed.begin), freed.nbytes);
  state().freed.clear();
}

}  // namespace fake
