// shmsync._C.same_tables: whether objects still have the very tables, with the very entries, that they had before.
// Python's own loops need a tenth of a microsecond for each table and entry, of which a large policy has thousands.
#include <pybind11/pybind11.h>

#include <cstdint>
#include <string>

#include "module.h"

namespace py = pybind11;

namespace {

// The entries that are left to be found, in the order of the tables.
struct Expected {
  PyObject *keys, *values;
  Py_ssize_t next = 0;

  Py_ssize_t left() const { return PyTuple_GET_SIZE(keys) - next; }

  // Only text is compared by value, which runs nobody's code.
  bool is_next(PyObject* key, PyObject* value) {
    PyObject* known = PyTuple_GET_ITEM(keys, next);
    if (value != PyTuple_GET_ITEM(values, next)) return false;
    ++next;
    if (key == known) return true;
    return PyUnicode_CheckExact(key) && PyUnicode_CheckExact(known) && PyUnicode_Compare(key, known) == 0;
  }
};

// Of the object itself, whatever its class has under that name. Borrowed; nullptr if it has none.
PyObject* table_of(PyObject* attributes, PyObject* name) {
  PyObject* found = PyDict_GetItemWithError(attributes, name);
  if (found == nullptr && PyErr_Occurred()) throw py::error_already_set();
  return found;
}

bool has_entries(PyObject* table, std::uint64_t count, Expected& expected) {
  if (!PyDict_Check(table) || static_cast<std::uint64_t>(PyDict_GET_SIZE(table)) != count) return false;
  if (static_cast<std::uint64_t>(expected.left()) < count) return false;
  PyObject *key, *value;
  for (Py_ssize_t at = 0; PyDict_Next(table, &at, &key, &value);) {
    if (!expected.is_next(key, value)) return false;
  }
  return true;
}

// A large policy is seldom in the cache when it is pushed: ask for what comes so many objects later.
constexpr std::size_t kAhead = 8;

void fetch_ahead(const py::tuple& objects, std::size_t index) {
  if (index < objects.size()) __builtin_prefetch(PyTuple_GET_ITEM(objects.ptr(), index));
}

void check_sizes(std::size_t owners, const py::tuple& names, const py::tuple& tables, std::size_t counts,
                 const Expected& expected) {
  const std::size_t wanted = owners * names.size();
  if (tables.size() != wanted || counts != wanted) {
    throw py::value_error("Expected " + std::to_string(wanted) + " tables and counts, got " +
                          std::to_string(tables.size()) + " and " + std::to_string(counts));
  }
  if (PyTuple_GET_SIZE(expected.keys) != PyTuple_GET_SIZE(expected.values)) {
    throw py::value_error("Expected as many values as keys");
  }
}

bool same_tables(const py::handle& first, const py::tuple& rest, const py::tuple& names, const py::tuple& tables,
                 const py::buffer& counts, const py::tuple& keys, const py::tuple& values) {
  const py::buffer_info sizes = uint64_buffer(counts);
  const auto* size = static_cast<const std::uint64_t*>(sizes.ptr);
  Expected expected{keys.ptr(), values.ptr()};
  check_sizes(1 + rest.size(), names, tables, static_cast<std::size_t>(sizes.size), expected);
  for (std::size_t owner = 0, table = 0; owner <= rest.size(); ++owner) {
    fetch_ahead(rest, owner + kAhead);
    PyObject* object = owner == 0 ? first.ptr() : PyTuple_GET_ITEM(rest.ptr(), owner - 1);
    const py::object attributes = py::reinterpret_steal<py::object>(PyObject_GenericGetDict(object, nullptr));
    if (!attributes) throw py::error_already_set();
    for (std::size_t name = 0; name < names.size(); ++name, ++table) {
      fetch_ahead(tables, table + kAhead * names.size());
      PyObject* found = table_of(attributes.ptr(), PyTuple_GET_ITEM(names.ptr(), name));
      if (found != PyTuple_GET_ITEM(tables.ptr(), table) || !has_entries(found, size[table], expected)) return false;
    }
  }
  return expected.left() == 0;
}

constexpr const char* kDoc = R"(Whether objects have the same tables as before, with the same entries in the same order.

first, rest: the objects. names: of their attributes that are tables. tables: these dicts, all of the first object, then
all of the next. counts: how many entries each has, in a buffer of uint64. keys, values: of all entries, one table after
the other.
Tables and values must be the very same objects; keys may be equal text. What a class has under a name does not count.
Raises ValueError if the numbers do not fit, AttributeError if an object has no __dict__.
Contract: runs no code of the objects', and no loop of Python's.)";

}  // namespace

void define_tables(py::module_& m) {
  m.def("same_tables", &same_tables, py::arg("first"), py::arg("rest"), py::arg("names"), py::arg("tables"),
        py::arg("counts"), py::arg("keys"), py::arg("values"), kDoc);
}
