// shmsync._C: with module_cuda.cpp and module_tables.cpp the only file that knows Python. It deals in addresses and
// sizes, never in tensors, so that one build serves every version of torch.
#include "module.h"

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "checksum/checksum.h"
#include "copy/convert.h"
#include "copy/kernels.h"
#include "copy/plan.h"
#include "settings.h"

namespace py = pybind11;

shmsync::Kind kind_named(const std::string& name, std::size_t row) {
  std::string names;
  for (std::size_t i = 0; i < shmsync::kKindCount; ++i) {
    if (name == shmsync::kKinds[i].name) return static_cast<shmsync::Kind>(i);
    names += (i == 0 ? "" : ", ") + std::string(shmsync::kKinds[i].name);
  }
  throw py::value_error("Expected a kind out of " + names + ", got '" + name + "' - at row " + std::to_string(row));
}

namespace {

using Addresses = std::vector<std::uintptr_t>;
using Sizes = std::vector<std::size_t>;
using Kinds = std::vector<std::string>;

// What Python calls a plan: one that may know its sources.
struct Plan {
  shmsync::Plan plan;
  std::optional<Addresses> sources;
};

void check_count(const char* what, std::size_t count, std::size_t expected) {
  if (count == expected) return;
  throw py::value_error("Expected " + std::to_string(expected) + " " + what + ", one for each row, got " +
                        std::to_string(count));
}

Plan plan_from(const Addresses& destinations, std::optional<Addresses> sources, const Sizes& nbytes,
               const std::optional<Kinds>& kinds) {
  const std::size_t count = destinations.size();
  check_count("sizes", nbytes.size(), count);
  if (sources) check_count("sources", sources->size(), count);
  if (kinds) check_count("kinds", kinds->size(), count);
  std::vector<shmsync::Row> rows;
  rows.reserve(count);
  for (std::size_t i = 0; i < count; ++i) {
    rows.push_back({destinations[i], nbytes[i], kinds ? kind_named((*kinds)[i], i) : shmsync::Kind::bytes});
  }
  Plan made{shmsync::Plan(std::move(rows)), std::move(sources)};
  if (made.sources) made.plan.check_sources(made.sources->data());
  return made;
}

void run_from(const Plan& made, const std::uintptr_t* sources, std::size_t count) {
  check_count("sources", count, made.plan.size());
  py::gil_scoped_release release;
  made.plan.run(sources);
}

void run(const Plan& made) {
  if (!made.sources) throw py::value_error("Expected sources, got none: the plan was made without");
  run_from(made, made.sources->data(), made.sources->size());
}

void run_from_buffer(const Plan& made, const py::buffer& sources) {
  const py::buffer_info info = uint64_buffer(sources);  // held until the run is over
  run_from(made, static_cast<const std::uintptr_t*>(info.ptr), static_cast<std::size_t>(info.size));
}

void run_from_list(const Plan& made, const Addresses& sources) { run_from(made, sources.data(), sources.size()); }

std::vector<std::uint64_t> checksums(std::uintptr_t address, std::size_t nbytes) {
  if (address == 0 && nbytes != 0) throw py::value_error("Expected an address, got 0");
  py::gil_scoped_release release;
  return shmsync::checksums(reinterpret_cast<const void*>(address), nbytes);
}

constexpr const char* kPlanDoc = R"(A copy of many separate arrays that is prepared once and made many times.

Row i: the nbytes[i] bytes at sources[i] go to destinations[i], as they are or, by kinds[i], cast to half or twice as
many. Addresses need no alignment; sources and destinations must not overlap.
Raises ValueError that names the row if the lengths differ, a kind is unknown, an address is 0 where nbytes is not,
nbytes is no whole number of items, or two destinations overlap.)";

constexpr const char* kRunDoc = R"(Make the copy, from the sources given now or else at construction.

sources: one address for each row, in a buffer of uint64 (fastest) or a sequence.
Contract: blocks until the bytes are there, without the GIL, on up to threads() threads; any number of threads may run
plans at once; a forked child may too. The caller keeps the memory alive, and sources, if it is a buffer, unchanged.
Raises ValueError, before a byte is written, if a source is 0.)";

constexpr const char* kChecksumsDoc = R"(XXH3 (64 bits, seed 0) of each CHECKSUM_PIECE bytes, and of the rest.

Contract: reads without the GIL, on up to threads() threads. The caller keeps the memory alive.)";

void define_plan(py::module_& m) {
  py::class_<Plan>(m, "Plan", kPlanDoc)
      .def(py::init(&plan_from), py::arg("destinations"), py::arg("sources").none(true), py::arg("nbytes"),
           py::arg("kinds") = py::none())
      .def("run", &run, kRunDoc)
      .def("run", &run_from_buffer, py::arg("sources"))
      .def("run", &run_from_list, py::arg("sources"))
      .def("__len__", [](const Plan& made) { return made.plan.size(); })
      .def_property_readonly("source_nbytes", [](const Plan& made) { return made.plan.source_nbytes(); })
      .def_property_readonly("destination_nbytes", [](const Plan& made) { return made.plan.destination_nbytes(); })
      .def_property_readonly(
          "streaming", [](const Plan& made) { return made.plan.streaming(); }, "Whether a run writes past the cache.");
}

void define_settings(py::module_& m) {
  m.def("threads", &shmsync::threads, "Threads that a large copy uses, the calling one among them.");
  m.def("set_threads", &shmsync::set_threads, py::arg("count"),
        "Set threads(), which is 1 until then; SHMSYNC_THREADS overrides it.");
  m.def("stream_min_bytes", &shmsync::stream_min_bytes,
        "How many bytes a plan has to write to write them past the cache; SHMSYNC_STREAM_MIN_BYTES overrides it.");
  m.def(
      "isa", [] { return shmsync::kernels().isa; },
      "The instruction set that copies use: 'avx512', 'avx2' or 'plain'; SHMSYNC_ISA overrides the choice.");
  m.def(
      "set_bfloat16_nan", [](std::uint16_t pattern) { shmsync::bfloat16_nan = pattern; }, py::arg("pattern"),
      "Set the bits that a NaN becomes in a cast to bfloat16 (0xFFFF until then): torch's depend on the processor.");
}

}  // namespace

py::buffer_info uint64_buffer(const py::buffer& buffer) {
  py::buffer_info info = buffer.request();
  const bool dense = info.ndim == 1 && (info.size < 2 || info.strides[0] == info.itemsize);
  if (dense && info.item_type_is_equivalent_to<std::uint64_t>()) return info;
  throw py::value_error("Expected a contiguous buffer of uint64 in one dimension, got " + std::to_string(info.ndim) +
                        " dimensions of format '" + info.format + "'");
}

PYBIND11_MODULE(_C, m) {
  m.doc() = "The compiled part of shmsync: addresses and sizes only.";
  define_plan(m);
  define_settings(m);
  define_cuda(m);
  define_tables(m);
  m.def("checksums", &checksums, py::arg("address"), py::arg("nbytes"), kChecksumsDoc);
  m.attr("CHECKSUM_PIECE") = shmsync::kChecksumPiece;
}
