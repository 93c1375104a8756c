// What this library knows of the CUDA runtime's binary interface. Written out here, because nothing of CUDA is there
// when the library is built; compared with cuda_runtime_api.h of 13.0.
#pragma once

#include <cstddef>
#include <cstdint>

namespace shmsync::cuda {

using Handle = void*;  // a cudaStream_t or cudaEvent_t

constexpr std::size_t kIpcHandleBytes = 64;  // CUDA_IPC_HANDLE_SIZE
struct IpcHandle {
  char bytes[kIpcHandleBytes];
};

struct Location {
  int type;
  int id;
};

struct CopyAttributes {
  int source_access_order;
  Location source_hint, destination_hint;
  unsigned flags;
};

struct PointerAttributes {
  int type;
  int device;
  void* device_pointer;
  void* host_pointer;
  char room[232];  // 13.0 has 64 reserved bytes here; a later version may have more
};

// A cudaDeviceProp of any version: all begin with `char name[256]; cudaUUID_t uuid`, none has many more than 1000
// bytes.
constexpr std::size_t kUuidBytes = 16;
struct Properties {
  char name[256];
  char uuid[kUuidBytes];
  char room[4096 - 256 - kUuidBytes];
};

// Errors that are answers.
constexpr int kSuccess = 0;
constexpr int kErrorNoDevice = 100;
constexpr int kErrorNotReady = 600;
constexpr int kErrorPeerAccessAlreadyEnabled = 704;

constexpr unsigned kIpcLazyEnablePeerAccess = 1;
constexpr unsigned kHostRegisterPortable = 1;
constexpr unsigned kHostRegisterReadOnly = 8;
constexpr unsigned kStreamNonBlocking = 1;
constexpr unsigned kEventDisableTiming = 2;
constexpr int kCopyDefault = 4;       // the addresses say which way
constexpr int kAccessOrderStream = 1;  // sources are read in stream order
constexpr int kMemoryTypeDevice = 2;
constexpr int kCaptureModeRelaxed = 2;

// cudaMemcpyBatchAsync is one name for two functions.
constexpr int kBatchSince = 12080;
constexpr int kBatchWithoutFailIdxSince = 13000;

// The functions that every supported runtime (11.0 on) has. X(name, types of the arguments)
#define SHMSYNC_CUDA_FUNCTIONS(X)                                                           \
  X(cudaRuntimeGetVersion, int*)                                                            \
  X(cudaGetLastError, void)                                                                 \
  X(cudaGetDeviceCount, int*)                                                               \
  X(cudaGetDevice, int*)                                                                    \
  X(cudaSetDevice, int)                                                                     \
  X(cudaDeviceGetAttribute, int*, int, int)                                                 \
  X(cudaDeviceCanAccessPeer, int*, int, int)                                                \
  X(cudaDeviceEnablePeerAccess, int, unsigned)                                              \
  X(cudaMalloc, void**, std::size_t)                                                        \
  X(cudaFree, void*)                                                                        \
  X(cudaIpcGetMemHandle, ::shmsync::cuda::IpcHandle*, void*)                                \
  X(cudaIpcOpenMemHandle, void**, ::shmsync::cuda::IpcHandle, unsigned)                     \
  X(cudaIpcCloseMemHandle, void*)                                                           \
  X(cudaHostRegister, void*, std::size_t, unsigned)                                         \
  X(cudaHostUnregister, void*)                                                              \
  X(cudaStreamCreateWithFlags, ::shmsync::cuda::Handle*, unsigned)                          \
  X(cudaStreamDestroy, ::shmsync::cuda::Handle)                                             \
  X(cudaStreamWaitEvent, ::shmsync::cuda::Handle, ::shmsync::cuda::Handle, unsigned)        \
  X(cudaStreamSynchronize, ::shmsync::cuda::Handle)                                         \
  X(cudaEventCreateWithFlags, ::shmsync::cuda::Handle*, unsigned)                           \
  X(cudaEventRecord, ::shmsync::cuda::Handle, ::shmsync::cuda::Handle)                      \
  X(cudaEventQuery, ::shmsync::cuda::Handle)                                                \
  X(cudaEventSynchronize, ::shmsync::cuda::Handle)                                          \
  X(cudaEventDestroy, ::shmsync::cuda::Handle)                                              \
  X(cudaMemcpyAsync, void*, const void*, std::size_t, int, ::shmsync::cuda::Handle)         \
  X(cudaThreadExchangeStreamCaptureMode, int*)                                              \
  X(cudaPointerGetAttributes, ::shmsync::cuda::PointerAttributes*, const void*)

// Of the driver's interface, for kernels of our own. Its errors are numbered as the runtime's.
#define SHMSYNC_DRIVER_FUNCTIONS(X)                                                         \
  X(cuModuleLoadData, ::shmsync::cuda::Handle*, const void*)                                \
  X(cuModuleGetFunction, ::shmsync::cuda::Handle*, ::shmsync::cuda::Handle, const char*)    \
  X(cuLaunchKernel, ::shmsync::cuda::Handle, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, \
    ::shmsync::cuda::Handle, void**, void**)

// How a fatbin begins, as nvcc writes it.
constexpr std::uint32_t kFatbinMagic = 0xBA55ED50;
struct FatbinHeader {
  std::uint32_t magic;
  std::uint16_t version, header_nbytes;
  std::uint64_t nbytes;  // after the header
};

using GetDeviceProperties = int (*)(Properties*, int);
using GetErrorText = const char* (*)(int);
using Batch12 = int (*)(void**, void**, std::size_t*, std::size_t, CopyAttributes*, std::size_t*, std::size_t,
                        std::size_t*, Handle);
using Batch13 = int (*)(void* const*, const void* const*, const std::size_t*, std::size_t, CopyAttributes*,
                        std::size_t*, std::size_t, Handle);

}  // namespace shmsync::cuda
