// A CUDA runtime over memory of the host, for tests on machines without a GPU: the real one's names, and `fake...` to
// steer and to ask. See state.h for how it works, fake.py for what the environment says.
#include <cstdarg>

#include "memory.h"

using namespace fake;

#define EXPORT extern "C" __attribute__((visibility("default")))

namespace {

thread_local int current = 0;  // device
thread_local int last_error = kSuccess;
thread_local int capture_mode = 0;  // concerning all threads
constexpr int kCaptureModeRelaxed = 2;

struct Named {
  int code;
  const char *name, *text;
};

constexpr Named kErrors[] = {
    {kSuccess, "cudaSuccess", "no error"},
    {kInvalidValue, "cudaErrorInvalidValue", "invalid argument"},
    {kMemoryAllocation, "cudaErrorMemoryAllocation", "out of memory"},
    {kInitialization, "cudaErrorInitializationError", "initialization error"},
    {kInsufficientDriver, "cudaErrorInsufficientDriver",
     "CUDA driver version is insufficient for CUDA runtime version"},
    {kDevicesUnavailable, "cudaErrorDevicesUnavailable", "CUDA-capable device(s) is/are busy or unavailable"},
    {kNoDevice, "cudaErrorNoDevice", "no CUDA-capable device is detected"},
    {kInvalidDevice, "cudaErrorInvalidDevice", "invalid device ordinal"},
    {200, "cudaErrorInvalidKernelImage", "device kernel image is invalid"},
    {kDeviceUninitialized, "cudaErrorDeviceUninitialized", "invalid device context"},
    {kMapBufferObjectFailed, "cudaErrorMapBufferObjectFailed", "mapping of buffer object failed"},
    {kPeerAccessUnsupported, "cudaErrorPeerAccessUnsupported",
     "peer access is not supported between these two devices"},
    {kInvalidResourceHandle, "cudaErrorInvalidResourceHandle", "invalid resource handle"},
    {kNotReady, "cudaErrorNotReady", "device not ready"},
    {kIllegalAddress, "cudaErrorIllegalAddress", "an illegal memory access was encountered"},
    {kPeerAccessAlreadyEnabled, "cudaErrorPeerAccessAlreadyEnabled", "peer access is already enabled"},
    {kHostMemoryAlreadyRegistered, "cudaErrorHostMemoryAlreadyRegistered",
     "part or all of the requested memory range is already mapped"},
    {kHostMemoryNotRegistered, "cudaErrorHostMemoryNotRegistered",
     "pointer does not correspond to a registered memory region"},
    {kLaunchFailure, "cudaErrorLaunchFailure", "unspecified launch failure"},
    {kNotSupported, "cudaErrorNotSupported", "operation not supported"},
    {kStreamCaptureUnsupported, "cudaErrorStreamCaptureUnsupported",
     "operation not permitted when stream is capturing"},
    {kUnknown, "cudaErrorUnknown", "unknown error"},
};

// Unnamed errors are what the real runtime says of codes that it doesn't know.
const Named& named(int code) {
  static constexpr Named unnamed{-1, "unrecognized error code", "unrecognized error code"};
  for (const Named& error : kErrors) {
    if (error.code == code) return error;
  }
  return unnamed;
}

// The error that was ordered for this call, or 0. Every fault of the function counts the call.
int ordered_fault(const char* function) {
  auto [from, to] = state().faults.equal_range(function);
  int error = kSuccess;
  while (from != to) {
    Fault& fault = from->second;
    const bool due = fault.always || --fault.nth == 0;
    if (due) error = fault.error;
    from = due && !fault.always ? state().faults.erase(from) : std::next(from);
  }
  return error;
}

// One call of the runtime, which may be ordered to fail.
template <class Body>
int call(const char* function, Body body) {
  const std::lock_guard<std::mutex> guard(state().mutex);
  int code = ordered_fault(function);
  if (code == kSuccess) code = body();
  if (code != kSuccess) last_error = code;
  return code;
}

// One that makes a context on the current device. Often some of the queued work is done before it, and often none.
template <class Body>
int call_in_context(const char* function, Body body) {
  return call(function, [&] {
    if (state().below(2) == 0) run_some(state().below(6));
    if (!state().is_device(current)) return kNoDevice;
    if (state().capturing && capture_mode != kCaptureModeRelaxed) return kStreamCaptureUnsupported;
    state().contexts.insert(current);
    return body();
  });
}

template <class Pointer>
Address address(Pointer pointer) {
  return reinterpret_cast<Address>(pointer);
}

void* pointer(Address at) { return reinterpret_cast<void*>(at); }

int with_stream(void* handle, Stream*& stream) {
  stream = stream_of(address(handle), current);
  return stream == nullptr ? kInvalidResourceHandle : kSuccess;
}

Event* event_of(void* handle) {
  const auto found = state().events.find(address(handle));
  return found == state().events.end() ? nullptr : &found->second;
}

}  // namespace

// ── Errors and devices ───────────────────────────────────────────────────────────────────────────────────────────────

EXPORT const char* cudaGetErrorName(int code) { return named(code).name; }
EXPORT const char* cudaGetErrorString(int code) { return named(code).text; }

EXPORT int cudaGetLastError() {
  const int code = last_error;
  last_error = kSuccess;
  return code;
}

EXPORT int cudaRuntimeGetVersion(int* version) {
  return call(__func__, [&] {
    *version = state().version;
    return kSuccess;
  });
}

EXPORT int cudaGetDeviceCount(int* count) {
  return call(__func__, [&] {
    *count = int(state().physical.size());
    return *count == 0 ? kNoDevice : kSuccess;
  });
}

EXPORT int cudaGetDevice(int* device) {
  return call(__func__, [&] {
    *device = current;
    return kSuccess;
  });
}

// As since CUDA 12, it makes the context.
EXPORT int cudaSetDevice(int device) {
  return call(__func__, [&] {
    if (!state().is_device(device)) return kInvalidDevice;
    state().contexts.insert(current = device);
    return kSuccess;
  });
}

EXPORT int cudaThreadExchangeStreamCaptureMode(int* mode) {
  std::swap(*mode, capture_mode);
  return kSuccess;
}

EXPORT int cudaDeviceGetAttribute(int* value, int attribute, int device) {
  return call(__func__, [&] {
    if (!state().is_device(device)) return kInvalidDevice;
    if (attribute < 1 || attribute > 200) return kInvalidValue;
    *value = state().attributes[attribute];
    return kSuccess;
  });
}

namespace {

// The beginning of a cudaDeviceProp, which has some 1000 bytes.
int properties(const char* function, char* at, int device) {
  return call(function, [&] {
    if (!state().is_device(device)) return kInvalidDevice;
    std::memset(at, 0xEE, 1008);
    std::snprintf(at, 256, "Fake device");
    std::memcpy(at + 256, "fake GPU", 8);
    std::memset(at + 264, state().physical[std::size_t(device)], 8);
    return kSuccess;
  });
}

}  // namespace

// 12.x has both names, 13 the first only.
EXPORT int cudaGetDeviceProperties(char* at, int device) { return properties("cudaGetDeviceProperties", at, device); }
#ifndef FAKE_WITHOUT_PROPERTIES_V2
EXPORT int cudaGetDeviceProperties_v2(char* at, int device) {
  return properties("cudaGetDeviceProperties", at, device);
}
#endif

EXPORT int cudaDeviceCanAccessPeer(int* can, int device, int peer) {
  return call(__func__, [&] {
    if (!state().is_device(device) || !state().is_device(peer)) return kInvalidDevice;
    *can = device != peer && state().peers;
    return kSuccess;
  });
}

EXPORT int cudaDeviceEnablePeerAccess(int peer, unsigned flags) {
  return call_in_context(__func__, [&] {
    if (!state().is_device(peer) || peer == current) return kInvalidDevice;
    if (flags != 0) return kInvalidValue;
    if (!state().peers) return kPeerAccessUnsupported;
    return state().enabled_peers.insert({current, peer}).second ? kSuccess : kPeerAccessAlreadyEnabled;
  });
}

// ── Memory ───────────────────────────────────────────────────────────────────────────────────────────────────────────

EXPORT int cudaMalloc(void** made, std::size_t nbytes) {
  return call_in_context(__func__, [&] {
    Address at = 0;
    const int code = allocate(current, nbytes, at);
    *made = pointer(at);
    return code;
  });
}

EXPORT int cudaFree(void* at) {
  return call_in_context(__func__, [&] { return free_block(address(at)); });
}

EXPORT int cudaIpcGetMemHandle(Handle* handle, void* at) {
  return call_in_context(__func__, [&] { return export_block(address(at), *handle); });
}

EXPORT int cudaIpcOpenMemHandle(void** made, Handle handle, unsigned flags) {
  return call_in_context(__func__, [&] {
    Address at = 0;
    const int code = open_handle(handle, current, flags, at);
    *made = pointer(at);
    return code;
  });
}

EXPORT int cudaIpcCloseMemHandle(void* at) {
  return call_in_context(__func__, [&] { return close_block(address(at)); });
}

EXPORT int cudaHostRegister(void* at, std::size_t nbytes, unsigned flags) {
  return call_in_context(__func__, [&] { return register_host({address(at), nbytes}, flags); });
}

EXPORT int cudaHostUnregister(void* at) {
  return call_in_context(__func__, [&] { return unregister_host(address(at)); });
}

struct PointerAttributes {
  int type, device;
  void *device_pointer, *host_pointer;
  long reserved[8];
};

EXPORT int cudaPointerGetAttributes(PointerAttributes* attributes, const void* at) {
  return call_in_context(__func__, [&] {
    *attributes = {};
    attributes->device = -2;
    const Range byte{address(at), 1};
    const Block* block = block_of(byte);
    if (block != nullptr) *attributes = {2, block->device, pointer(byte.begin), nullptr, {}};
    const bool registered = block == nullptr && place_in_registrations(byte) != Place::pageable;
    if (registered) *attributes = {1, 0, pointer(byte.begin), pointer(byte.begin), {}};
    return kSuccess;
  });
}

// ── Streams and events ───────────────────────────────────────────────────────────────────────────────────────────────

EXPORT int cudaStreamCreateWithFlags(void** made, unsigned flags) {
  return call_in_context(__func__, [&] {
    if (flags > 1) return kInvalidValue;
    const Address handle = state().new_handle();
    Stream& stream = state().streams[handle];
    stream.device = current;
    stream.blocking = flags == 0;
    *made = pointer(handle);
    return kSuccess;
  });
}

// What is queued is still done.
EXPORT int cudaStreamDestroy(void* handle) {
  return call_in_context(__func__, [&] {
    if (!is_created_stream(address(handle))) return kInvalidResourceHandle;
    Stream& stream = state().streams[address(handle)];
    stream.destroyed = true;
    if (stream.queue.empty()) state().streams.erase(address(handle));
    return kSuccess;
  });
}

EXPORT int cudaStreamSynchronize(void* handle) {
  return call_in_context(__func__, [&] {
    Stream* stream = nullptr;
    if (const int code = with_stream(handle, stream)) return code;
    drain(*stream);
    return kSuccess;
  });
}

EXPORT int cudaStreamWaitEvent(void* handle, void* event_handle, unsigned flags) {
  return call_in_context(__func__, [&] {
    Stream* stream = nullptr;
    const Event* event = event_of(event_handle);
    if (with_stream(handle, stream) != kSuccess || event == nullptr) return kInvalidResourceHandle;
    if (flags > 1) return kInvalidValue;
    Entry wait;
    if (event->latest) wait.after.push_back(event->latest);
    enqueue(*stream, std::move(wait));
    return kSuccess;
  });
}

EXPORT int cudaEventCreateWithFlags(void** made, unsigned flags) {
  return call_in_context(__func__, [&] {
    if (flags > 7) return kInvalidValue;
    const Address handle = state().new_handle();
    state().events[handle].device = current;
    *made = pointer(handle);
    return kSuccess;
  });
}

EXPORT int cudaEventRecord(void* event_handle, void* handle) {
  return call_in_context(__func__, [&] {
    Stream* stream = nullptr;
    Event* event = event_of(event_handle);
    if (with_stream(handle, stream) != kSuccess || event == nullptr) return kInvalidResourceHandle;
    if (stream->device != event->device) return kInvalidResourceHandle;
    Entry record;
    event->latest = record.done;
    enqueue(*stream, std::move(record));
    return kSuccess;
  });
}

EXPORT int cudaEventQuery(void* handle) {
  return call_in_context(__func__, [&] {
    const Event* event = event_of(handle);
    if (event == nullptr) return kInvalidResourceHandle;
    run_some(state().below(4));
    return !event->latest || *event->latest ? kSuccess : kNotReady;
  });
}

EXPORT int cudaEventSynchronize(void* handle) {
  return call_in_context(__func__, [&] {
    const Event* event = event_of(handle);
    if (event == nullptr) return kInvalidResourceHandle;
    run_until([&] { return !event->latest || *event->latest; });
    return kSuccess;
  });
}

EXPORT int cudaEventDestroy(void* handle) {
  return call_in_context(__func__, [&] {
    return state().events.erase(address(handle)) == 1 ? kSuccess : kInvalidResourceHandle;
  });
}

// ── Copies ───────────────────────────────────────────────────────────────────────────────────────────────────────────

namespace {

int check_copy(const Row& row) {
  const Place to = place_of(row.destination), from = place_of(row.source);
  if (to == Place::invalid || from == Place::invalid) return kInvalidValue;
  if (to != Place::read_only) return kSuccess;
  state().violation("written to read-only memory");
  return kInvalidValue;
}

// With pageable memory a copy is done when the call returns.
bool is_synchronous(const Row& row) {
  return !is_queueable(place_of(row.destination)) || !is_queueable(place_of(row.source));
}

int copy(Stream& stream, const std::vector<Row>& rows) {
  Entry later;
  later.kind = Kind::copy;
  Entry now = later;
  for (const Row& row : rows) {
    if (const int code = check_copy(row)) return code;
    (is_synchronous(row) ? now : later).rows.push_back(row);
  }
  const bool wait = !now.rows.empty();
  if (wait) enqueue(stream, std::move(now));
  if (wait) drain(stream);
  if (!later.rows.empty()) enqueue(stream, std::move(later));
  return kSuccess;
}

struct Attributes {
  int source_access_order;
  int hints[4];
  unsigned flags;
};

// Whether the stream is one that takes batches. If not, the caller means the other form, and that is a violation, or it
// gave a default stream. In the long form failIdx is not a stream.
bool is_batch_stream(void* stream, const void* fail_idx) {
  const bool mixed_up = is_created_stream(address(fail_idx));
  if (!mixed_up && is_created_stream(address(stream))) return true;
  const bool is_default = !mixed_up && address(stream) < kDefaultStreams;
  state().violation(is_default ? "batch on a default stream" : "batch signature");
  return false;
}

bool is_short_form() {
  const std::lock_guard<std::mutex> guard(state().mutex);
  return state().version >= 13000;
}

bool are_batch_attributes(const Attributes* attributes, const std::size_t* first, std::size_t count, std::size_t rows) {
  if (attributes == nullptr || first == nullptr || count < 1 || count > rows || first[0] != 0) return false;
  for (std::size_t i = 0; i < count; ++i) {
    if (attributes[i].source_access_order != 1) return false;  // others are not faked
  }
  return true;
}

}  // namespace

EXPORT int cudaMemcpyAsync(void* destination, const void* source, std::size_t nbytes, int kind, void* handle) {
  return call_in_context(__func__, [&] {
    Stream* stream = nullptr;
    if (const int code = with_stream(handle, stream)) return code;
    if (kind != 4) return kNotSupported;  // not faked
    if (nbytes == 0) return kSuccess;
    return copy(*stream, {{{address(destination), nbytes}, {address(source), nbytes}}});
  });
}

// One symbol for both forms. 13.0: eight arguments, the last is the stream. 12.8 and 12.9: nine, failIdx and stream.
// Variadic, because a function may write to where its declared arguments lie; with eight given, a ninth would lie in
// the caller's own frame.
EXPORT int cudaMemcpyBatchAsync(void** destinations, void** sources, std::size_t* sizes, std::size_t count,
                                Attributes* attributes, std::size_t* first, std::size_t attribute_count, void* eighth,
                                ...) {
  std::size_t* fail_idx = nullptr;
  void* handle = eighth;
  if (!is_short_form()) {
    std::va_list rest;
    va_start(rest, eighth);
    fail_idx = static_cast<std::size_t*>(eighth);
    handle = va_arg(rest, void*);
    va_end(rest);
  }
  return call_in_context(__func__, [&] {
    if (!is_batch_stream(handle, fail_idx)) return kInvalidValue;
    if (count == 0 || !are_batch_attributes(attributes, first, attribute_count, count)) return kInvalidValue;
    std::vector<Row> rows;
    for (std::size_t i = 0; i < count; ++i) {
      rows.push_back({{address(destinations[i]), sizes[i]}, {address(sources[i]), sizes[i]}});
      if (sizes[i] != 0 && check_copy(rows.back()) == kSuccess) continue;
      if (fail_idx != nullptr) *fail_idx = i;
      return kInvalidValue;
    }
    return copy(*stream_of(address(handle), current), rows);
  });
}

// ── Work of others: their kernels ────────────────────────────────────────────────────────────────────────────────────

namespace {

// Queues what touches only memory that a kernel can.
int launch(int device, void* handle, Entry entry) {
  return call("fakeLaunch", [&] {
    Stream* const stream = stream_of(address(handle), device);
    if (stream == nullptr || stream->device != device) return kInvalidResourceHandle;
    for (const Row& row : entry.rows) {
      if (row.destination.nbytes != 0 && !is_queueable(place_of(row.destination))) return kInvalidValue;
      if (row.destination.nbytes != 0 && place_of(row.destination) == Place::read_only) return kInvalidValue;
      if (row.source.nbytes != 0 && !is_queueable(place_of(row.source))) return kInvalidValue;
    }
    enqueue(*stream, std::move(entry));
    return kSuccess;
  });
}

Entry kernel(Kind kind, const Range& destination, const Range& source) {
  Entry entry;
  entry.kind = kind;
  entry.rows.push_back({destination, source});
  return entry;
}

}  // namespace

EXPORT int fakeFill(int device, void* stream, void* at, std::size_t nbytes, int value) {
  Entry entry = kernel(Kind::fill, {address(at), nbytes}, {});
  entry.value = static_cast<unsigned char>(value);
  return launch(device, stream, std::move(entry));
}

// The least and the greatest byte go to `seen` when all are read.
EXPORT int fakeCheck(int device, void* stream, void* at, std::size_t nbytes, unsigned char* seen) {
  Entry entry = kernel(Kind::check, {}, {address(at), nbytes});
  entry.seen = seen;
  return launch(device, stream, std::move(entry));
}

EXPORT int fakeCopyCast(int device, void* stream, void* destination, void* source, std::size_t count, int kind) {
  if (kind < 0 || kind > 3) return kInvalidValue;
  const std::size_t size = cast_source_bytes(kind);
  Entry entry = kernel(Kind::cast, {address(destination), count * (6 - size)}, {address(source), count * size});
  entry.cast = kind;
  return launch(device, stream, std::move(entry));
}

// ── The driver: modules, of which all are taken to have the gather kernel ─────────────────────────────────────────────

#ifndef FAKE_WITHOUT_DRIVER

namespace {

constexpr int kInvalidImage = 200, kNotFound = 500;

#define FAKE_TEXT(name) #name
#define FAKE_TEXT_OF(name) FAKE_TEXT(name)

template <class Handles>
int made(Handles& handles, void** handle) {
  const Address at = state().new_handle();
  handles[at] = current;
  *handle = pointer(at);
  return kSuccess;
}

bool is_reachable(const Range& range, bool written) {
  const Place place = place_of(range);
  return place == Place::device || place == Place::registered || (place == Place::read_only && !written);
}

// What a device would answer with an error some time later, or not at all.
const char* wrong_with(const Gather& gather, unsigned blocks, unsigned threads) {
  const Range table{address(gather.rows), gather.count * sizeof *gather.rows};
  if (gather.count == 0 || block_of(table) == nullptr) return "gather: the table is not on a device";
  std::uint64_t first = 0;
  for (unsigned i = 0; i < gather.count; ++i) {
    const auto& row = gather.rows[i];
    if (row.kind >= shmsync::kKindCount || row.count == 0 || row.first != first) return "gather: a bad row";
    const auto& kind = shmsync::kKinds[row.kind];
    const Range to{address(gather.base) + row.offset, row.count * kind.destination_item};
    if (!is_reachable(to, true)) return "gather: a destination that can't be written";
    if (!is_reachable({row.source, row.count * kind.source_item}, false)) return "gather: a source that can't be read";
    first += shmsync::cuda::pieces(row.kind != 0, row.count);
  }
  return first == blocks && threads == shmsync::cuda::kGatherThreads ? nullptr : "gather: a wrong number of blocks";
}

// The table is read now, because copies from pageable memory, which brought it, are done when they return.
int launch_gather(Stream& stream, const Gather& gather, unsigned blocks, unsigned threads) {
  if (const char* wrong = wrong_with(gather, blocks, threads)) {
    state().violation(wrong);
    return kSuccess;
  }
  Entry entry;
  entry.kind = Kind::gather;
  entry.gather = gather;
  for (unsigned block = 0; block < blocks; ++block) entry.rows.push_back(row_of_block(gather, block));
  enqueue(stream, std::move(entry));
  return kSuccess;
}

}  // namespace

EXPORT int cuModuleLoadData(void** module, const void* image) {
  return call_in_context(__func__, [&] {
    std::uint32_t magic = 0;
    std::memcpy(&magic, image, sizeof magic);
    return magic == 0xBA55ED50 ? made(state().modules, module) : kInvalidImage;
  });
}

EXPORT int cuModuleGetFunction(void** kernel, void* module, const char* name) {
  return call_in_context(__func__, [&] {
    if (state().modules.count(address(module)) == 0) return kInvalidResourceHandle;
    return std::strcmp(name, FAKE_TEXT_OF(SHMSYNC_GATHER_KERNEL)) == 0 ? made(state().kernels, kernel) : kNotFound;
  });
}

EXPORT int cuLaunchKernel(void* kernel, unsigned x, unsigned y, unsigned z, unsigned threads, unsigned threads_y,
                          unsigned threads_z, unsigned shared, void* handle, void** arguments, void** extra) {
  return call_in_context(__func__, [&] {
    Stream* stream = nullptr;
    if (const int code = with_stream(handle, stream)) return code;
    const auto known = state().kernels.find(address(kernel));
    const bool here = known != state().kernels.end() && known->second == current && stream->device == current;
    if (!here) return kInvalidResourceHandle;
    if (x == 0 || y != 1 || z != 1 || threads_y != 1 || threads_z != 1 || shared != 0 || extra != nullptr) {
      return kInvalidValue;
    }
    Gather gather;
    std::memcpy(&gather.rows, arguments[0], sizeof gather.rows);
    std::memcpy(&gather.count, arguments[1], sizeof gather.count);
    std::memcpy(&gather.base, arguments[2], sizeof gather.base);
    return launch_gather(*stream, gather, x, threads);
  });
}

#endif

// ── Control ──────────────────────────────────────────────────────────────────────────────────────────────────────────

namespace {

struct Locked {
  std::lock_guard<std::mutex> guard{state().mutex};
};

void release_everything() {
  drain_all();
  for (const auto& [address, block] : state().blocks) unmap(block);
  forget_freed();
  state().blocks.clear();
  state().registrations.clear();
  state().streams.clear();
  state().events.clear();
  state().contexts.clear();
  state().enabled_peers.clear();
  state().modules.clear();
  state().kernels.clear();
  state().faults.clear();
  state().violations.clear();
}

std::size_t created_streams() {
  std::size_t count = 0;
  for (const auto& [handle, stream] : state().streams) count += handle > 0x1000 && !stream.destroyed;
  return count;
}

std::size_t blocks(bool opened) {
  std::size_t count = 0;
  for (const auto& [address, block] : state().blocks) count += opened ? std::size_t(block.opens) : block.opens == 0;
  return count;
}

std::size_t bytes() {
  std::size_t sum = 0;
  for (std::size_t i = 0; i < state().physical.size(); ++i) sum += bytes_on(int(i));
  return sum;
}

}  // namespace

EXPORT void fakeReset() {
  const Locked locked;
  release_everything();
  state().restart();
  current = 0;
  last_error = kSuccess;
}

EXPORT void fakeSeed(unsigned long long seed) {
  const Locked locked;
  state().random.seed(seed);
}

EXPORT void fakeRunSome(std::size_t pieces) {
  const Locked locked;
  run_some(pieces);
}

EXPORT void fakeDrain() {
  const Locked locked;
  drain_all();
}

EXPORT void fakeFail(const char* function, long nth, int error) {
  const Locked locked;
  state().faults.insert({function, {nth, error, false}});
}

EXPORT void fakeFailAlways(const char* function, int error) {
  const Locked locked;
  state().faults.insert({function, {0, error, true}});
}

EXPORT void fakeFailNever() {
  const Locked locked;
  state().faults.clear();
}

EXPORT void fakeLimit(int device, std::size_t nbytes) {
  const Locked locked;
  state().limits[device] = nbytes;
}

EXPORT void fakeSetAttribute(int attribute, int value) {
  const Locked locked;
  state().attributes[attribute] = value;
}

// -1: nothing is counted under that name.
EXPORT long long fakeCount(const char* what) {
  const Locked locked;
  const std::string name = what;
  if (name == "allocations") return (long long)blocks(false);
  if (name == "bytes") return (long long)bytes();
  if (name == "registrations") return (long long)state().registrations.size();
  if (name == "events") return (long long)state().events.size();
  if (name == "streams") return (long long)created_streams();
  if (name == "opens") return (long long)blocks(true);
  if (name == "contexts") return (long long)state().contexts.size();
  if (name == "queued") return (long long)queued();
  return -1;
}

// One a line; returns how many bytes there are, with the final 0.
EXPORT std::size_t fakeViolations(char* buffer, std::size_t size) {
  const Locked locked;
  std::string text;
  for (const std::string& violation : state().violations) text += violation + "\n";
  if (size != 0) std::snprintf(buffer, size, "%s", text.c_str());
  return text.size() + 1;
}

// Between the two every call of another thread blocks. Both by the same thread.
EXPORT void fakeHold() { state().mutex.lock(); }
EXPORT void fakeLetGo() { state().mutex.unlock(); }

// The calling thread's last error, without clearing it.
EXPORT int fakeLastError() { return last_error; }
EXPORT int fakeCurrentDevice() { return current; }
EXPORT void fakeSetCurrentDevice(int device) { current = device; }

// Whether some thread captures a graph, and this one's mode.
EXPORT void fakeCapturing(int on) {
  const Locked locked;
  state().capturing = on != 0;
}
EXPORT int fakeCaptureMode() { return capture_mode; }
