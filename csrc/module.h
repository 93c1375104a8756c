// What the files that know Python share: module.cpp, module_cuda.cpp and module_tables.cpp.
#pragma once

#include <pybind11/pybind11.h>

#include <cstddef>
#include <string>

#include "copy/kind.h"

// The buffer's memory, held while the result lives. Raises ValueError if it isn't contiguous uint64 in one dimension.
pybind11::buffer_info uint64_buffer(const pybind11::buffer& buffer);

// Raises ValueError that names the row and all kinds.
shmsync::Kind kind_named(const std::string& name, std::size_t row);

void define_cuda(pybind11::module_& m);
void define_tables(pybind11::module_& m);
