// shmsync._C.cuda: the calls of device/calls.h for Python. It is there also where CUDA is not.
#include <pybind11/stl.h>

#include <cstdint>
#include <exception>
#include <optional>
#include <string>
#include <vector>

#include "device/calls.h"
#include "device/gather_plan.h"
#include "module.h"

namespace py = pybind11;
namespace cuda = shmsync::cuda;

namespace {

using cuda::Address;

static_assert(sizeof(Address) == sizeof(std::uint64_t) && sizeof(std::size_t) == sizeof(std::uint64_t),
              "a buffer of uint64 is taken as addresses and as sizes");

constexpr const char* kDoc = R"(Calls of the CUDA runtime that is loaded already, by addresses and handles.

A device is its index in this process; memory, streams and events are integers, torch's `cuda_stream` among them.
Contract: no call holds the GIL; each leaves the thread's current device as it was; a call that fails has no effect, but
what was queued before stays queued. device_count, device_uuid, attribute and can_access_peer make no context.
Raises CudaError that says what was attempted, also if reason() is not None.)";

constexpr const char* kErrorDoc = R"(An error of the CUDA runtime, or that there is none that can be used.

name, code: CUDA's, as ("cudaErrorMemoryAllocation", 2); ("unavailable", -1) if no runtime was found or
it is incomplete.)";

constexpr const char* kBatchDoc = R"(Queue the copies of nbytes[i] bytes at sources[i] to destinations[i], in any order.

Each argument: a buffer of uint64 (fastest) or a sequence, all of one length. Rows of 0 bytes are left out.
Contract: the arrays may be changed when it returns, the memory when the stream has come past the copies. In one call of
the runtime from CUDA 12.8 on, unless the stream is a default one (0, 1 or 2); else in one for each row, and if one
fails those before it are queued.)";

constexpr const char* kGatherDoc = R"(Many arrays of a device, copied or cast to one place on it by one launch.

Row i: nbytes[i] bytes of a source go to offsets[i] behind a base, as they are or, by kinds[i], cast to half or twice as
many. Addresses need no alignment; sources and destinations must not overlap.
Raises ValueError that names the row if the lengths differ, a kind is unknown or nbytes is no whole number of items.)";

constexpr const char* kUploadDoc = R"(Queue the copy of the rows, with these sources, to device memory.

table: table_nbytes of it. sources: one address for each row, in a buffer of uint64 (fastest) or a sequence. Returns
whether anything was queued: not if these sources are there already. If it is, what was queued before is waited for.
Contract: nobody else writes to the table; `launch` and `upload` of one object are not called at once; the object
outlives what it queues. Raises ValueError if a source is 0.)";

constexpr const char* kGatherKernelDoc = R"(The gather kernel of a fatbin, loaded for that device.

Contract: makes a context; the kernel stays to the end of the process. Raises CudaError, also where the driver is not to
be had; ValueError for other bytes.)";

// ── CudaError ────────────────────────────────────────────────────────────────────────────────────────────────────────

// Owned by the module; a reference of ours keeps it to the end of the process.
PyObject* error_class = nullptr;

void raise(const cuda::CudaError& error) {
  try {
    const py::object raised = py::reinterpret_borrow<py::object>(error_class)(error.what());
    raised.attr("name") = error.name();
    raised.attr("code") = error.code();
    PyErr_SetObject(error_class, raised.ptr());
  } catch (py::error_already_set& instead) {
    instead.restore();
  }
}

void translate(std::exception_ptr thrown) {
  try {
    if (thrown) std::rethrow_exception(thrown);
  } catch (const cuda::CudaError& error) {
    raise(error);
  }
}

void define_error(py::module_& m) {
  error_class = PyErr_NewExceptionWithDoc("shmsync._C.cuda.CudaError", kErrorDoc, PyExc_RuntimeError, nullptr);
  if (error_class == nullptr) throw py::error_already_set();
  m.attr("CudaError") = py::reinterpret_borrow<py::object>(error_class);
  py::register_exception_translator(&translate);
}

// ── Arguments and results ────────────────────────────────────────────────────────────────────────────────────────────

// A column of a batch, held as long as this lives. Made and destroyed with the GIL.
class Column {
 public:
  Column(const char* what, const py::object& from) : what_(what) {
    if (PyObject_CheckBuffer(from.ptr())) {
      buffer_ = uint64_buffer(py::reinterpret_borrow<py::buffer>(from));
    } else {
      numbers_ = from.cast<std::vector<std::uint64_t>>();
    }
  }

  std::size_t size() const { return buffer_ ? static_cast<std::size_t>(buffer_->size) : numbers_.size(); }

  template <class Number>
  const Number* data() const {
    return static_cast<const Number*>(buffer_ ? buffer_->ptr : static_cast<const void*>(numbers_.data()));
  }

  void check_size(std::size_t expected) const {
    if (size() == expected) return;
    throw py::value_error("Expected " + std::to_string(expected) + " " + what_ + ", one for each destination, got " +
                          std::to_string(size()));
  }

 private:
  const char* what_;
  std::optional<py::buffer_info> buffer_;
  std::vector<std::uint64_t> numbers_;
};

Column column(const char* what, const py::object& from) {
  try {
    return {what, from};
  } catch (const py::cast_error&) {
    throw py::type_error(std::string("Expected ") + what + " as a buffer or sequence of numbers, got " +
                         std::string(py::str(py::type::of(from))));
  }
}

void copy_batch(int index, const py::object& destinations, const py::object& sources, const py::object& nbytes,
                Address stream) {
  const Column to = column("destinations", destinations), from = column("sources", sources),
               sizes = column("sizes", nbytes);
  from.check_size(to.size());
  sizes.check_size(to.size());
  py::gil_scoped_release release;
  cuda::copy_batch(index, to.data<Address>(), from.data<Address>(), sizes.data<std::size_t>(), to.size(), stream);
}

cuda::GatherPlan gather_plan(const py::object& offsets, const py::object& nbytes,
                             const std::vector<std::string>& kinds) {
  const Column to = column("offsets", offsets), sizes = column("sizes", nbytes);
  sizes.check_size(to.size());
  if (kinds.size() != to.size()) {
    throw py::value_error("Expected one kind for each row, got " + std::to_string(kinds.size()));
  }
  std::vector<cuda::GatherPart> parts;
  parts.reserve(to.size());
  for (std::size_t i = 0; i < to.size(); ++i) {
    parts.push_back({to.data<Address>()[i], sizes.data<std::size_t>()[i], kind_named(kinds[i], i)});
  }
  return cuda::GatherPlan(parts);
}

bool upload(cuda::GatherPlan& plan, int index, Address table, const py::object& sources, Address stream) {
  const Column from = column("sources", sources);
  from.check_size(plan.size());
  py::gil_scoped_release release;
  return plan.upload(index, table, from.data<Address>(), stream);
}

template <class Call>
auto without_gil(Call call) {
  py::gil_scoped_release release;
  return call();
}

py::bytes device_uuid(int index) {
  return without_gil([&] { return cuda::device_uuid(index); });
}

py::bytes ipc_export(int index, Address address) {
  return without_gil([&] { return cuda::ipc_export(index, address); });
}

Address ipc_open(int index, const py::bytes& handle) {
  const std::string copied = handle;
  return without_gil([&] { return cuda::ipc_open(index, copied); });
}

Address gather_kernel(int index, const py::bytes& image) {
  const std::string copied = image;
  return without_gil([&] { return cuda::gather_kernel(index, copied); });
}

std::optional<std::string> reason() {
  const std::string& text = without_gil([]() -> const cuda::Runtime& { return cuda::runtime(); }).reason;
  return text.empty() ? std::nullopt : std::optional(text);
}

// ── The module ───────────────────────────────────────────────────────────────────────────────────────────────────────

using NoGil = py::call_guard<py::gil_scoped_release>;

void define_runtime(py::module_& m) {
  m.def("reason", &reason, "Why CUDA can't be used, or None if it can; SHMSYNC_CUDART names a runtime for tests.");
  m.def("where", [] { return cuda::runtime().where; }, NoGil(), "Which way the runtime was found, or 'nowhere'.");
  m.def("runtime_version", [] { return cuda::usable_runtime().version; }, NoGil(), "As 12080 for 12.8.");
}

void define_devices(py::module_& m) {
  m.def("device_count", &cuda::device_count, NoGil());
  m.def("device_uuid", &device_uuid, py::arg("index"), "16 bytes that are the same in every process.");
  m.def("attribute", &cuda::attribute, py::arg("index"), py::arg("attribute"), NoGil(), "A cudaDeviceAttr's value.");
  m.def("can_access_peer", &cuda::can_access_peer, py::arg("index"), py::arg("peer"), NoGil());
  m.def("enable_peer_access", &cuda::enable_peer_access, py::arg("index"), py::arg("peer"), NoGil(),
        "Let the device `index` use the memory of `peer`; fine if it does already.");
}

void define_memory(py::module_& m) {
  m.def("malloc", &cuda::allocate, py::arg("index"), py::arg("nbytes"), NoGil());
  m.def("free", &cuda::release, py::arg("index"), py::arg("address"), NoGil(), "Waits for the device's work.");
  m.def("ipc_export", &ipc_export, py::arg("index"), py::arg("address"), "64 bytes for ipc_open in other processes.");
  m.def("ipc_open", &ipc_open, py::arg("index"), py::arg("handle"), "Its address here; not in the exporting process.");
  m.def("ipc_close", &cuda::ipc_close, py::arg("index"), py::arg("address"), NoGil(),
        "Doesn't wait for work that uses it.");
  m.def("host_register", &cuda::host_register, py::arg("address"), py::arg("nbytes"), py::arg("read_only"), NoGil(),
        "Pin that mapping for this process, on all devices.");
  m.def("host_unregister", &cuda::host_unregister, py::arg("address"), NoGil(), "Doesn't wait for work that uses it.");
  m.def("pointer_device", &cuda::pointer_device, py::arg("address"), NoGil(),
        "The device whose memory that is; None for memory of the host and unknown addresses.");
}

void define_streams(py::module_& m) {
  m.def("stream_create", &cuda::stream_create, py::arg("index"), NoGil(), "It doesn't wait for the default stream.");
  m.def("stream_destroy", &cuda::stream_destroy, py::arg("index"), py::arg("stream"), NoGil());
  m.def("stream_wait_event", &cuda::stream_wait_event, py::arg("index"), py::arg("stream"), py::arg("event"), NoGil(),
        "Later work of the stream waits for what the event's latest record before this call stands for.");
  m.def("stream_synchronize", &cuda::stream_synchronize, py::arg("index"), py::arg("stream"), NoGil());
  m.def("event_create", &cuda::event_create, py::arg("index"), NoGil());
  m.def("event_record", &cuda::event_record, py::arg("index"), py::arg("event"), py::arg("stream"), NoGil());
  m.def("event_query", &cuda::event_query, py::arg("index"), py::arg("event"), NoGil(),
        "Whether the work before its latest record is done; True if it was never recorded.");
  m.def("event_synchronize", &cuda::event_synchronize, py::arg("index"), py::arg("event"), NoGil());
  m.def("event_destroy", &cuda::event_destroy, py::arg("index"), py::arg("event"), NoGil());
}

void define_copies(py::module_& m) {
  m.def("copy", &cuda::copy, py::arg("index"), py::arg("destination"), py::arg("source"), py::arg("nbytes"),
        py::arg("stream"), NoGil(), "Queue a copy; where either is pageable memory of the host it may block.");
  m.def("copy_batch", &copy_batch, py::arg("index"), py::arg("destinations"), py::arg("sources"), py::arg("nbytes"),
        py::arg("stream"), kBatchDoc);
}

void define_gather(py::module_& m) {
  m.def("gather_kernel", &gather_kernel, py::arg("index"), py::arg("image"), kGatherKernelDoc);
  py::class_<cuda::GatherPlan>(m, "Gather", kGatherDoc)
      .def(py::init(&gather_plan), py::arg("offsets"), py::arg("nbytes"), py::arg("kinds"))
      .def("upload", &upload, py::arg("index"), py::arg("table"), py::arg("sources"), py::arg("stream"), kUploadDoc)
      .def("launch", &cuda::GatherPlan::launch, py::arg("index"), py::arg("kernel"), py::arg("table"), py::arg("base"),
           py::arg("stream"), NoGil(), "Queue the kernel, with the rows that were uploaded to `table`.")
      .def_property_readonly("table_nbytes", &cuda::GatherPlan::table_nbytes, "0: there is nothing to be copied.");
}

}  // namespace

void define_cuda(py::module_& m) {
  py::module_ sub = m.def_submodule("cuda", kDoc);
  define_error(sub);
  define_runtime(sub);
  define_devices(sub);
  define_memory(sub);
  define_streams(sub);
  define_copies(sub);
  define_gather(sub);
}
