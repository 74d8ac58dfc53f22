// Arrays in and out of Python: checked, never converted. A mismatch is a ValueError that names argument, expected,
// found.
#pragma once

#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>

#include <initializer_list>
#include <string>
#include <vector>

#include "kernels.hpp"
#include "poison.hpp"

namespace leafsum {

namespace py = pybind11;

constexpr int64_t ANY = -1;

// One axis as the message shows it: "K" of any size, or "K=64".
struct Axis {
  const char* name;
  int64_t size = ANY;
};
using Axes = std::initializer_list<Axis>;

[[noreturn]] void fail(const std::string& text);
[[noreturn]] void fail_value(const char* argument, const std::string& expected, const std::string& found);
DType parse_dtype(const std::string& name);
void check_dtype(const char* argument, const py::array& array, char kind, int64_t item_size, const char* dtype_name);
void check_layout(const char* argument, const py::array& array, bool written);
void check_axes(const char* argument, const py::array& array, Axes axes);
void check_range(const char* argument, const int32_t* values, int64_t count, int64_t low, int64_t high);

template <typename T>
struct Element;
template <>
struct Element<float> {
  static constexpr char kind = 'f';
  static constexpr const char* name = "float32";
};
template <>
struct Element<int32_t> {
  static constexpr char kind = 'i';
  static constexpr const char* name = "int32";
};
template <>
struct Element<uint16_t> {
  static constexpr char kind = 'u';
  static constexpr const char* name = "uint16";
};

// The data of an array of any shape.
template <typename T>
const T* read_flat(const char* argument, const py::array& array) {
  check_dtype(argument, array, Element<T>::kind, sizeof(T), Element<T>::name);
  check_layout(argument, array, false);
  return static_cast<const T*>(array.data());
}

template <typename T>
const T* read(const char* argument, const py::array& array, Axes axes) {
  check_dtype(argument, array, Element<T>::kind, sizeof(T), Element<T>::name);
  check_axes(argument, array, axes);
  check_layout(argument, array, false);
  return static_cast<const T*>(array.data());
}

template <typename T>
T* write(const char* argument, py::array& array, Axes axes) {
  read<T>(argument, array, axes);
  check_layout(argument, array, true);
  return static_cast<T*>(array.mutable_data());
}

// An FP32 array of the shape of another.
const float* read_like(const char* argument, const py::array& array, const char* other_argument,
                       const py::array& other);

const void* read_storage(const char* argument, const py::array& array, DType dtype, Axes axes);
const void* read_storage_flat(const char* argument, const py::array& array, DType dtype);
void* write_storage(const char* argument, py::array& array, DType dtype, Axes axes);

std::vector<py::ssize_t> shape_of(const py::array& array);
py::array new_storage(DType dtype, const std::vector<py::ssize_t>& shape);

// Runs work while other Python threads run; no Python object may be touched, copied or returned inside.
template <typename Work>
void without_gil(const Work& work) {
  py::gil_scoped_release released;
  work();
}

template <typename T>
py::array_t<T> new_array(const std::vector<py::ssize_t>& shape) {
  py::array_t<T> array(shape);
  fill_if_poisoned(array.mutable_data(), static_cast<size_t>(array.nbytes()));
  return array;
}

}  // namespace leafsum
