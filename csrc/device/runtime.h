// The CUDA runtime that this process has loaded already, found when it is first asked for.
//
// Never a second one: each has its own idea of the current device and of the last error. Looked for in this order:
//   SHMSYNC_CUDART       a library to load instead, for tests
//   the global scope     torch loads its runtime into it
//   libcudart.so.13, 12  if loaded by somebody, without its names being global
// The driver's functions, for kernels of our own, are looked for likewise, the last of them in libcuda.so.1.
#pragma once

#include <stdexcept>
#include <string>

#include "device/abi.h"

namespace shmsync::cuda {

// An error of the runtime, or that there is none to be used.
class CudaError : public std::runtime_error {
 public:
  CudaError(int code, std::string name, const std::string& what)
      : std::runtime_error(what), code_(code), name_(std::move(name)) {}
  int code() const { return code_; }
  const std::string& name() const { return name_; }

 private:
  int code_;
  std::string name_;
};

// Of a CudaError that is not the runtime's: none is loaded, or it lacks a function.
constexpr int kUnavailable = -1;
constexpr const char* kUnavailableName = "unavailable";

struct Runtime {
#define SHMSYNC_MEMBER(name, ...) int (*name)(__VA_ARGS__) = nullptr;
  SHMSYNC_CUDA_FUNCTIONS(SHMSYNC_MEMBER)
#undef SHMSYNC_MEMBER
  GetErrorText cudaGetErrorName = nullptr, cudaGetErrorString = nullptr;
  GetDeviceProperties properties = nullptr;
  Batch12 batch12 = nullptr;  // at most one of the two is set
  Batch13 batch13 = nullptr;
#define SHMSYNC_MEMBER(name, ...) int (*name)(__VA_ARGS__) = nullptr;
  SHMSYNC_DRIVER_FUNCTIONS(SHMSYNC_MEMBER)
#undef SHMSYNC_MEMBER
  // The first of them that is not to be had, or nullptr: then there are no kernels, and all else works.
  const char* no_driver = nullptr;

  int version = 0;
  std::string where;
  // Why it can't be used, or empty; with the error that says so.
  std::string reason;
  int code = kUnavailable;
  std::string name = kUnavailableName;
};

// Contract: resolves once, by any thread; makes no context. The result never changes, also not in a forked child.
const Runtime& runtime();

// The same if it can be used; else raises CudaError with the reason.
const Runtime& usable_runtime();

}  // namespace shmsync::cuda
