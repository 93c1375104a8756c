// shmsync._C: the only file that knows Python. Its functions take addresses and sizes, never tensors, so that one build
// serves every version of torch.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <cstdint>
#include <string>
#include <vector>

#include "copy/copy.h"

namespace py = pybind11;

namespace {

using Addresses = std::vector<std::uintptr_t>;
using Sizes = std::vector<std::size_t>;

std::vector<shmsync::Piece> pieces_from(const Addresses& destinations, const Addresses& sources, const Sizes& nbytes) {
  const std::size_t count = nbytes.size();
  if (destinations.size() != count || sources.size() != count) {
    throw py::value_error("Expected three sequences of equal length, got " + std::to_string(destinations.size()) +
                          " destinations, " + std::to_string(sources.size()) + " sources and " +
                          std::to_string(count) + " sizes");
  }
  std::vector<shmsync::Piece> pieces;
  pieces.reserve(count);
  for (std::size_t i = 0; i < count; ++i) {
    if (nbytes[i] != 0 && (destinations[i] == 0 || sources[i] == 0)) {
      throw py::value_error("Expected an address, got 0 - at piece " + std::to_string(i));
    }
    pieces.push_back({reinterpret_cast<void*>(destinations[i]), reinterpret_cast<const void*>(sources[i]), nbytes[i]});
  }
  return pieces;
}

void copy_pieces(const Addresses& destinations, const Addresses& sources, const Sizes& nbytes) {
  const auto pieces = pieces_from(destinations, sources, nbytes);
  py::gil_scoped_release release;
  shmsync::copy_pieces(pieces.data(), pieces.size());
}

}  // namespace

PYBIND11_MODULE(_C, m) {
  m.doc() = "The compiled part of shmsync: addresses and sizes only.";
  m.def("copy_pieces", &copy_pieces, py::arg("destinations"), py::arg("sources"), py::arg("nbytes"),
        "Copy nbytes[i] bytes from address sources[i] to address destinations[i], for every i, without the GIL.\n\n"
        "Source and destination must not overlap; the caller vouches for the addresses and keeps their memory alive.\n"
        "Raises ValueError, before a byte is written, if the lengths differ or an address is 0 where nbytes is not.");
}
