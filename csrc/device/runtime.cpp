#include "device/runtime.h"

#include <dlfcn.h>

#include <atomic>
#include <cstdlib>
#include <memory>

namespace shmsync::cuda {

namespace {

// Where names are looked up: a library, or the global scope.
struct Scope {
  void* library = nullptr;
  std::string where;
};

Scope named_scope(const char* path, Runtime& found) {
  const Scope scope{dlopen(path, RTLD_NOW | RTLD_LOCAL), std::string("SHMSYNC_CUDART=") + path};
  if (scope.library == nullptr) {
    const char* error = dlerror();
    found.reason = "the library of " + scope.where + " can't be loaded: " + (error ? error : "unknown error");
  }
  return scope;
}

Scope loaded_scope(Runtime& found) {
  if (dlsym(RTLD_DEFAULT, "cudaGetDeviceCount") != nullptr) return {RTLD_DEFAULT, "already loaded"};
  for (const char* name : {"libcudart.so.13", "libcudart.so.12"}) {
    if (void* library = dlopen(name, RTLD_NOW | RTLD_NOLOAD)) return {library, name};
  }
  found.reason = "no CUDA runtime is loaded";
  return {};
}

Scope scope_for(Runtime& found) {
  const char* path = std::getenv("SHMSYNC_CUDART");
  return path != nullptr && *path != '\0' ? named_scope(path, found) : loaded_scope(found);
}

template <class Function>
bool bind(const Scope& scope, const char* name, Function& function) {
  function = reinterpret_cast<Function>(dlsym(scope.library, name));
  return function != nullptr;
}

template <class Function>
void require(const Scope& scope, const char* name, Function& function, Runtime& found) {
  if (bind(scope, name, function) || !found.reason.empty()) return;
  found.reason = "the CUDA runtime (" + scope.where + ") lacks " + name;
}

void bind_required(const Scope& scope, Runtime& found) {
#define SHMSYNC_BIND(name, ...) require(scope, #name, found.name, found);
  SHMSYNC_CUDA_FUNCTIONS(SHMSYNC_BIND)
#undef SHMSYNC_BIND
  require(scope, "cudaGetErrorName", found.cudaGetErrorName, found);
  require(scope, "cudaGetErrorString", found.cudaGetErrorString, found);
  if (!bind(scope, "cudaGetDeviceProperties_v2", found.properties)) {
    require(scope, "cudaGetDeviceProperties", found.properties, found);
  }
}

// The version and not the name tells which function it is.
void bind_batch(const Scope& scope, Runtime& found) {
  if (found.version >= kBatchWithoutFailIdxSince) {
    bind(scope, "cudaMemcpyBatchAsync", found.batch13);
  } else if (found.version >= kBatchSince) {
    bind(scope, "cudaMemcpyBatchAsync", found.batch12);
  }
}

// The runtime has loaded the driver when it has been asked for something; its names need not be global.
void bind_driver(const Scope& scope, Runtime& found) {
  // Where libcuda isn't loaded, that null handle is RTLD_DEFAULT once more.
  const Scope others[] = {{RTLD_DEFAULT, ""}, {dlopen("libcuda.so.1", RTLD_NOW | RTLD_NOLOAD), ""}};
  const auto find = [&](const char* name, auto& function) {
    if (bind(scope, name, function)) return;
    for (const Scope& other : others) {
      if (bind(other, name, function)) return;
    }
    if (found.no_driver == nullptr) found.no_driver = name;
  };
#define SHMSYNC_BIND(name, ...) find(#name, found.name);
  SHMSYNC_DRIVER_FUNCTIONS(SHMSYNC_BIND)
#undef SHMSYNC_BIND
}

void refuse(Runtime& found, const char* attempt, int code) {
  found.code = code;
  found.name = found.cudaGetErrorName(code);
  found.reason = std::string(attempt) + " failed: " + found.name + " (" + found.cudaGetErrorString(code) + ")";
  found.cudaGetLastError();
}

void ask(Runtime& found) {
  if (const int code = found.cudaRuntimeGetVersion(&found.version)) return refuse(found, "cudaRuntimeGetVersion", code);
  int count = 0;
  if (const int code = found.cudaGetDeviceCount(&count)) return refuse(found, "cudaGetDeviceCount", code);
  if (count == 0) refuse(found, "cudaGetDeviceCount", kErrorNoDevice);
}

std::unique_ptr<const Runtime> resolve() {
  auto found = std::make_unique<Runtime>();
  const Scope scope = scope_for(*found);
  found->where = scope.where.empty() ? "nowhere" : scope.where;
  if (found->reason.empty()) bind_required(scope, *found);
  if (found->reason.empty()) ask(*found);
  if (found->reason.empty()) bind_batch(scope, *found);
  if (found->reason.empty()) bind_driver(scope, *found);
  return found;
}

}  // namespace

const Runtime& runtime() {
  // Not a function-local static: a child that is forked while another thread initialises one waits for it for ever. Two
  // threads may resolve at the same time; the first result stays.
  static std::atomic<const Runtime*> known{nullptr};
  if (const Runtime* table = known.load(std::memory_order_acquire)) return *table;
  std::unique_ptr<const Runtime> mine = resolve();
  const Runtime* winner = nullptr;
  if (known.compare_exchange_strong(winner, mine.get(), std::memory_order_acq_rel)) return *mine.release();
  return *winner;
}

const Runtime& usable_runtime() {
  const Runtime& found = runtime();
  if (found.reason.empty()) return found;
  throw CudaError(found.code, found.name, "Expected a CUDA runtime that can be used, got none: " + found.reason);
}

}  // namespace shmsync::cuda
