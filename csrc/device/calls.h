// The calls of the CUDA runtime that shmsync makes. Each raises CudaError that says what was attempted, leaves the last
// error of the runtime clear, and leaves the calling thread's current device as it was.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>

#include "device/runtime.h"

namespace shmsync::cuda {

using Address = std::uintptr_t;  // of memory, and the value of a stream or event

// None of these makes a context.
int device_count();
std::string device_uuid(int index);  // kUuidBytes
int attribute(int index, int attribute);
bool can_access_peer(int index, int peer);

void enable_peer_access(int index, int peer);  // fine if it is enabled already
Address allocate(int index, std::size_t nbytes);
void release(int index, Address address);

std::string ipc_export(int index, Address address);  // kIpcHandleBytes
Address ipc_open(int index, const std::string& handle);
void ipc_close(int index, Address address);

void host_register(Address address, std::size_t nbytes, bool read_only);
void host_unregister(Address address);

Address stream_create(int index);  // doesn't wait for the default stream
void stream_destroy(int index, Address stream);
void stream_wait_event(int index, Address stream, Address event);
void stream_synchronize(int index, Address stream);

Address event_create(int index);  // without a time
void event_record(int index, Address event, Address stream);
bool event_query(int index, Address event);
void event_synchronize(int index, Address event);
void event_destroy(int index, Address event);

void copy(int index, Address destination, Address source, std::size_t nbytes, Address stream);
// In one call where the runtime has one for it; the order of the rows is not defined. Rows of 0 bytes are left out.
void copy_batch(int index, const Address* destinations, const Address* sources, const std::size_t* nbytes,
                std::size_t count, Address stream);

// A kernel of a fatbin, for that device; it stays loaded to the end of the process. Raises CudaError also if the
// driver's functions are not to be had, and std::invalid_argument if `image` is no whole fatbin.
Address kernel_load(int index, const std::string& image, const char* name);
// Queues it. `arguments`: where the value of each lies.
void kernel_launch(int index, Address kernel, unsigned blocks, unsigned threads, void** arguments, Address stream);

// The device whose memory that is; nothing for memory of the host, and for what the runtime doesn't know.
std::optional<int> pointer_device(Address address);

}  // namespace shmsync::cuda
