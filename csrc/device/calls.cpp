#include "device/calls.h"

#include <cinttypes>
#include <cstdio>
#include <cstring>
#include <numeric>
#include <stdexcept>
#include <vector>

namespace shmsync::cuda {

namespace {

std::string hex(Address address) {
  char text[2 + 16 + 1];
  std::snprintf(text, sizeof text, "0x%" PRIxPTR, address);
  return text;
}

std::string on(int index) { return " on device " + std::to_string(index); }

void* pointer(Address address) { return reinterpret_cast<void*>(address); }

Address address_of(const void* pointer) { return reinterpret_cast<Address>(pointer); }

// An error that is not cleared would be reported again by the next call that asks for the last one, which is torch's.
void clear(const Runtime& cuda) { cuda.cudaGetLastError(); }

[[noreturn]] void fail(const Runtime& cuda, int code, const std::string& attempt) {
  clear(cuda);
  const std::string name = cuda.cudaGetErrorName(code);
  throw CudaError(code, name, attempt + " failed: " + name + " (" + cuda.cudaGetErrorString(code) + ")");
}

// `attempt()` is text that is only made for an error.
template <class Attempt>
void check(const Runtime& cuda, int code, Attempt attempt) {
  if (code != kSuccess) fail(cuda, code, attempt());
}

// While another thread captures a CUDA graph in the usual mode, most calls of this one would fail and spoil the graph,
// although they have nothing to do with it. In this mode they don't.
class NotCapturing {
 public:
  explicit NotCapturing(const Runtime& cuda) : cuda_(cuda) { cuda_.cudaThreadExchangeStreamCaptureMode(&mode_); }
  ~NotCapturing() { cuda_.cudaThreadExchangeStreamCaptureMode(&mode_); }
  NotCapturing(const NotCapturing&) = delete;
  NotCapturing& operator=(const NotCapturing&) = delete;

 private:
  const Runtime& cuda_;
  int mode_ = kCaptureModeRelaxed;  // and then the one before
};

// What `call(cuda)` returns with the device `index` current. If the way back fails, `undo(cuda)` gives up what was
// made: the caller gets an error and so can't. The way back makes a context on the device before if it has none, because
// cudaSetDevice does so since CUDA 12: a thread that uses one device had better make that current itself.
template <class Attempt, class Call, class Undo>
int code_on_device(const Runtime& cuda, int index, Attempt attempt, Call call, Undo undo) {
  const NotCapturing relaxed(cuda);
  int before = 0;
  check(cuda, cuda.cudaGetDevice(&before), [&] { return "cudaGetDevice before " + attempt(); });
  if (before == index) return call(cuda);
  const auto set = [&](int device) { return "cudaSetDevice to " + std::to_string(device) + " for " + attempt(); };
  check(cuda, cuda.cudaSetDevice(index), [&] { return set(index); });
  const int code = call(cuda);
  const int back = cuda.cudaSetDevice(before);
  if (back != kSuccess && code == kSuccess) {
    undo(cuda);
    fail(cuda, back, set(before));
  }
  return code;
}

constexpr auto nothing_to_undo = [](const Runtime&) {};

template <class Attempt, class Call>
void on_device(int index, Attempt attempt, Call call) {
  const Runtime& cuda = usable_runtime();
  check(cuda, code_on_device(cuda, index, attempt, call, nothing_to_undo), attempt);
}

// The pointer or handle that `make(cuda, &it)` makes.
template <class Attempt, class Make, class Undo>
Address made_on_device(int index, Attempt attempt, Make make, Undo undo) {
  const Runtime& cuda = usable_runtime();
  void* made = nullptr;
  const auto call = [&](const Runtime& c) { return make(c, &made); };
  check(cuda, code_on_device(cuda, index, attempt, call, [&](const Runtime& c) { undo(c, made); }), attempt);
  return address_of(made);
}

// ── Batches ──────────────────────────────────────────────────────────────────────────────────────────────────────────

struct Rows {
  std::vector<void*> destinations, sources;
  std::vector<std::size_t> nbytes;
};

Rows rows_with_bytes(const Address* destinations, const Address* sources, const std::size_t* nbytes,
                     std::size_t count) {
  Rows rows;
  for (auto* column : {&rows.destinations, &rows.sources}) column->reserve(count);
  rows.nbytes.reserve(count);
  for (std::size_t i = 0; i < count; ++i) {
    if (nbytes[i] == 0) continue;
    rows.destinations.push_back(pointer(destinations[i]));
    rows.sources.push_back(pointer(sources[i]));
    rows.nbytes.push_back(nbytes[i]);
  }
  return rows;
}

std::string batch(const Rows& rows, const char* function) {
  const std::size_t total = std::accumulate(rows.nbytes.begin(), rows.nbytes.end(), std::size_t{0});
  return std::string(function) + " of " + std::to_string(rows.nbytes.size()) + " rows, " + std::to_string(total) +
         " bytes,";
}

std::string copying(Address destination, Address source, std::size_t nbytes) {
  return "cudaMemcpyAsync of " + std::to_string(nbytes) + " bytes from " + hex(source) + " to " + hex(destination);
}

// Handles 0, 1 and 2 are the default streams, which batches don't take.
bool takes_batches(const Runtime& cuda, Address stream) { return stream > 2 && (cuda.batch12 || cuda.batch13); }

void copy_at_once(const Runtime& cuda, int index, Rows& rows, Address stream) {
  CopyAttributes attributes{};
  attributes.source_access_order = kAccessOrderStream;
  std::size_t first = 0, failed = SIZE_MAX;
  const auto call = [&](const Runtime&) {
    void **to = rows.destinations.data(), **from = rows.sources.data();
    std::size_t *sizes = rows.nbytes.data(), count = rows.nbytes.size();
    return cuda.batch13 ? cuda.batch13(to, from, sizes, count, &attributes, &first, 1, pointer(stream))
                        : cuda.batch12(to, from, sizes, count, &attributes, &first, 1, &failed, pointer(stream));
  };
  const auto attempt = [&] {
    const bool known = failed < rows.nbytes.size();
    const std::string row = known ? " at the copy of " + std::to_string(rows.nbytes[failed]) + " bytes from " +
                                        hex(address_of(rows.sources[failed])) + " to " +
                                        hex(address_of(rows.destinations[failed])) + ","
                                  : "";
    return batch(rows, "cudaMemcpyBatchAsync") + row + on(index);
  };
  check(cuda, code_on_device(cuda, index, attempt, call, nothing_to_undo), attempt);
}

void copy_one_by_one(const Runtime& cuda, int index, const Rows& rows, Address stream) {
  std::size_t row = 0;
  const auto call = [&](const Runtime&) {
    for (; row < rows.nbytes.size(); ++row) {
      const int code = cuda.cudaMemcpyAsync(rows.destinations[row], rows.sources[row], rows.nbytes[row], kCopyDefault,
                                            pointer(stream));
      if (code != kSuccess) return code;
    }
    return kSuccess;
  };
  const auto attempt = [&] {
    if (row == rows.nbytes.size()) return batch(rows, "cudaMemcpyAsync") + on(index);
    return copying(address_of(rows.destinations[row]), address_of(rows.sources[row]), rows.nbytes[row]) + on(index);
  };
  check(cuda, code_on_device(cuda, index, attempt, call, nothing_to_undo), attempt);
}

// ── Kernels ──────────────────────────────────────────────────────────────────────────────────────────────────────────

// The driver gets no size, so it must not come to read beyond the end.
void check_fatbin(const std::string& image) {
  FatbinHeader header{};
  if (image.size() >= sizeof header) std::memcpy(&header, image.data(), sizeof header);
  const bool whole = header.magic == kFatbinMagic && header.header_nbytes >= sizeof header &&
                     header.header_nbytes <= image.size() && header.nbytes <= image.size() - header.header_nbytes;
  if (!whole) throw std::invalid_argument("Expected a fatbin, got " + std::to_string(image.size()) + " other bytes");
}

// What the driver does needs a context on this thread; only calls of the runtime bring the device's one there. This is
// one that does nothing else.
template <class Call>
int in_context(const Runtime& cuda, Call call) {
  const int code = cuda.cudaFree(nullptr);
  return code == kSuccess ? call() : code;
}

const Runtime& runtime_with_driver() {
  const Runtime& cuda = usable_runtime();
  if (cuda.no_driver == nullptr) return cuda;
  throw CudaError(kUnavailable, kUnavailableName,
                  std::string("Expected the CUDA driver, got none: it has no ") + cuda.no_driver);
}

}  // namespace

// ── Devices ──────────────────────────────────────────────────────────────────────────────────────────────────────────

int device_count() {
  const Runtime& cuda = usable_runtime();
  int count = 0;
  check(cuda, cuda.cudaGetDeviceCount(&count), [] { return "cudaGetDeviceCount"; });
  return count;
}

std::string device_uuid(int index) {
  const Runtime& cuda = usable_runtime();
  Properties properties{};
  check(cuda, cuda.properties(&properties, index),
        [&] { return "cudaGetDeviceProperties of device " + std::to_string(index); });
  return {properties.uuid, kUuidBytes};
}

int attribute(int index, int attribute) {
  const Runtime& cuda = usable_runtime();
  int value = 0;
  check(cuda, cuda.cudaDeviceGetAttribute(&value, attribute, index), [&] {
    return "cudaDeviceGetAttribute of attribute " + std::to_string(attribute) + on(index);
  });
  return value;
}

bool can_access_peer(int index, int peer) {
  const Runtime& cuda = usable_runtime();
  int can = 0;
  check(cuda, cuda.cudaDeviceCanAccessPeer(&can, index, peer),
        [&] { return "cudaDeviceCanAccessPeer to device " + std::to_string(peer) + on(index); });
  return can != 0;
}

void enable_peer_access(int index, int peer) {
  on_device(
      index, [&] { return "cudaDeviceEnablePeerAccess to device " + std::to_string(peer) + on(index); },
      [&](const Runtime& cuda) {
        const int code = cuda.cudaDeviceEnablePeerAccess(peer, 0);
        if (code != kErrorPeerAccessAlreadyEnabled) return code;
        clear(cuda);
        return kSuccess;
      });
}

// ── Memory ───────────────────────────────────────────────────────────────────────────────────────────────────────────

Address allocate(int index, std::size_t nbytes) {
  if (nbytes == 0) throw std::invalid_argument("Expected to allocate at least 1 byte, got 0");
  return made_on_device(
      index, [&] { return "cudaMalloc of " + std::to_string(nbytes) + " bytes" + on(index); },
      [&](const Runtime& cuda, void** made) { return cuda.cudaMalloc(made, nbytes); },
      [](const Runtime& cuda, void* made) { cuda.cudaFree(made); });
}

void release(int index, Address address) {
  on_device(
      index, [&] { return "cudaFree of " + hex(address) + on(index); },
      [&](const Runtime& cuda) { return cuda.cudaFree(pointer(address)); });
}

std::string ipc_export(int index, Address address) {
  IpcHandle handle{};
  on_device(
      index, [&] { return "cudaIpcGetMemHandle of " + hex(address) + on(index); },
      [&](const Runtime& cuda) { return cuda.cudaIpcGetMemHandle(&handle, pointer(address)); });
  return {handle.bytes, kIpcHandleBytes};
}

Address ipc_open(int index, const std::string& handle) {
  if (handle.size() != kIpcHandleBytes) {
    throw std::invalid_argument("Expected a handle of " + std::to_string(kIpcHandleBytes) + " bytes, got " +
                                std::to_string(handle.size()));
  }
  IpcHandle copied;
  std::memcpy(copied.bytes, handle.data(), kIpcHandleBytes);
  return made_on_device(
      index, [&] { return "cudaIpcOpenMemHandle" + on(index); },
      [&](const Runtime& cuda, void** made) {
        return cuda.cudaIpcOpenMemHandle(made, copied, kIpcLazyEnablePeerAccess);
      },
      [](const Runtime& cuda, void* made) { cuda.cudaIpcCloseMemHandle(made); });
}

void ipc_close(int index, Address address) {
  on_device(
      index, [&] { return "cudaIpcCloseMemHandle of " + hex(address) + on(index); },
      [&](const Runtime& cuda) { return cuda.cudaIpcCloseMemHandle(pointer(address)); });
}

void host_register(Address address, std::size_t nbytes, bool read_only) {
  const Runtime& cuda = usable_runtime();
  const unsigned flags = kHostRegisterPortable | (read_only ? kHostRegisterReadOnly : 0);
  check(cuda, cuda.cudaHostRegister(pointer(address), nbytes, flags), [&] {
    return "cudaHostRegister of " + std::to_string(nbytes) + (read_only ? " read-only" : "") + " bytes at " +
           hex(address);
  });
}

void host_unregister(Address address) {
  const Runtime& cuda = usable_runtime();
  check(cuda, cuda.cudaHostUnregister(pointer(address)), [&] { return "cudaHostUnregister of " + hex(address); });
}

std::optional<int> pointer_device(Address address) {
  const Runtime& cuda = usable_runtime();
  PointerAttributes attributes{};
  check(cuda, cuda.cudaPointerGetAttributes(&attributes, pointer(address)),
        [&] { return "cudaPointerGetAttributes of " + hex(address); });
  if (attributes.type != kMemoryTypeDevice) return std::nullopt;
  return attributes.device;
}

// ── Streams ──────────────────────────────────────────────────────────────────────────────────────────────────────────

Address stream_create(int index) {
  return made_on_device(
      index, [&] { return "cudaStreamCreateWithFlags" + on(index); },
      [](const Runtime& cuda, Handle* made) { return cuda.cudaStreamCreateWithFlags(made, kStreamNonBlocking); },
      [](const Runtime& cuda, Handle made) { cuda.cudaStreamDestroy(made); });
}

void stream_destroy(int index, Address stream) {
  on_device(
      index, [&] { return "cudaStreamDestroy of " + hex(stream) + on(index); },
      [&](const Runtime& cuda) { return cuda.cudaStreamDestroy(pointer(stream)); });
}

void stream_wait_event(int index, Address stream, Address event) {
  on_device(
      index, [&] { return "cudaStreamWaitEvent of stream " + hex(stream) + " for event " + hex(event) + on(index); },
      [&](const Runtime& cuda) { return cuda.cudaStreamWaitEvent(pointer(stream), pointer(event), 0); });
}

void stream_synchronize(int index, Address stream) {
  on_device(
      index, [&] { return "cudaStreamSynchronize of " + hex(stream) + on(index); },
      [&](const Runtime& cuda) { return cuda.cudaStreamSynchronize(pointer(stream)); });
}

// ── Events ───────────────────────────────────────────────────────────────────────────────────────────────────────────

Address event_create(int index) {
  return made_on_device(
      index, [&] { return "cudaEventCreateWithFlags" + on(index); },
      [](const Runtime& cuda, Handle* made) { return cuda.cudaEventCreateWithFlags(made, kEventDisableTiming); },
      [](const Runtime& cuda, Handle made) { cuda.cudaEventDestroy(made); });
}

void event_record(int index, Address event, Address stream) {
  on_device(
      index, [&] { return "cudaEventRecord of event " + hex(event) + " in stream " + hex(stream) + on(index); },
      [&](const Runtime& cuda) { return cuda.cudaEventRecord(pointer(event), pointer(stream)); });
}

bool event_query(int index, Address event) {
  bool done = false;
  on_device(
      index, [&] { return "cudaEventQuery of " + hex(event) + on(index); },
      [&](const Runtime& cuda) {
        const int code = cuda.cudaEventQuery(pointer(event));
        done = code == kSuccess;
        if (code != kErrorNotReady) return code;
        clear(cuda);  // it counts as an error until then
        return kSuccess;
      });
  return done;
}

void event_synchronize(int index, Address event) {
  on_device(
      index, [&] { return "cudaEventSynchronize of " + hex(event) + on(index); },
      [&](const Runtime& cuda) { return cuda.cudaEventSynchronize(pointer(event)); });
}

void event_destroy(int index, Address event) {
  on_device(
      index, [&] { return "cudaEventDestroy of " + hex(event) + on(index); },
      [&](const Runtime& cuda) { return cuda.cudaEventDestroy(pointer(event)); });
}

// ── Copies ───────────────────────────────────────────────────────────────────────────────────────────────────────────

void copy(int index, Address destination, Address source, std::size_t nbytes, Address stream) {
  on_device(
      index, [&] { return copying(destination, source, nbytes) + on(index); },
      [&](const Runtime& cuda) {
        return cuda.cudaMemcpyAsync(pointer(destination), pointer(source), nbytes, kCopyDefault, pointer(stream));
      });
}

void copy_batch(int index, const Address* destinations, const Address* sources, const std::size_t* nbytes,
                std::size_t count, Address stream) {
  const Runtime& cuda = usable_runtime();
  Rows rows = rows_with_bytes(destinations, sources, nbytes, count);
  if (rows.nbytes.empty()) return;
  takes_batches(cuda, stream) ? copy_at_once(cuda, index, rows, stream) : copy_one_by_one(cuda, index, rows, stream);
}

// ── Kernels ──────────────────────────────────────────────────────────────────────────────────────────────────────────

Address kernel_load(int index, const std::string& image, const char* name) {
  check_fatbin(image);
  runtime_with_driver();
  Handle module = nullptr, kernel = nullptr;
  on_device(
      index, [&] { return "cuModuleLoadData of " + std::to_string(image.size()) + " bytes" + on(index); },
      [&](const Runtime& cuda) {
        return in_context(cuda, [&] { return cuda.cuModuleLoadData(&module, image.data()); });
      });
  on_device(
      index, [&] { return std::string("cuModuleGetFunction of ") + name + on(index); },
      [&](const Runtime& cuda) {
        return in_context(cuda, [&] { return cuda.cuModuleGetFunction(&kernel, module, name); });
      });
  return address_of(kernel);
}

void kernel_launch(int index, Address kernel, unsigned blocks, unsigned threads, void** arguments, Address stream) {
  runtime_with_driver();
  on_device(
      index, [&] { return "cuLaunchKernel of " + std::to_string(blocks) + " blocks" + on(index); },
      [&](const Runtime& cuda) {
        return in_context(cuda, [&] {
          return cuda.cuLaunchKernel(pointer(kernel), blocks, 1, 1, threads, 1, 1, 0, pointer(stream), arguments,
                                     nullptr);
        });
      });
}

}  // namespace shmsync::cuda
