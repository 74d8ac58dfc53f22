#include "arrays.hpp"

namespace leafsum {
namespace {

std::string shape_text(const py::array& array) {
  std::string text = "[";
  for (py::ssize_t axis = 0; axis < array.ndim(); ++axis) {
    text += (axis ? ", " : "") + std::to_string(array.shape(axis));
  }
  return text + "]";
}

std::string axes_text(Axes axes) {
  std::string text = "[";
  for (const Axis& axis : axes) {
    if (text.size() > 1) text += ", ";
    text += axis.name;
    if (axis.size != ANY) text += "=" + std::to_string(axis.size);
  }
  return text + "]";
}

constexpr int64_t storage_size(DType dtype) { return dtype == DType::float32 ? 4 : 2; }

void check_storage(const char* argument, const py::array& array, DType dtype) {
  if (dtype == DType::float32) return check_dtype(argument, array, 'f', 4, "float32");
  check_dtype(argument, array, 'u', storage_size(dtype), "uint16");
}

}  // namespace

void fail(const std::string& text) { throw py::value_error(text); }

void fail_value(const char* argument, const std::string& expected, const std::string& found) {
  fail(std::string(argument) + ": expected " + expected + ", found " + found);
}

DType parse_dtype(const std::string& name) {
  if (name == "float32") return DType::float32;
  if (name == "bfloat16") return DType::bfloat16;
  if (name == "float16") return DType::float16;
  fail_value("dtype", "float32, bfloat16 or float16", "'" + name + "'");
}

void check_dtype(const char* argument, const py::array& array, char kind, int64_t item_size, const char* dtype_name) {
  const py::dtype found = array.dtype();
  const char order = found.byteorder();
  const bool native = order == '=' || order == '|' || found.itemsize() == 1;
  if (found.kind() == kind && found.itemsize() == item_size && native) return;
  fail_value(argument, std::string("an array of native ") + dtype_name, py::str(py::object(found)).cast<std::string>());
}

void check_axes(const char* argument, const py::array& array, Axes axes) {
  bool fits = array.ndim() == static_cast<py::ssize_t>(axes.size());
  py::ssize_t index = 0;
  for (const Axis& axis : axes) {
    if (fits && axis.size != ANY && array.shape(index) != axis.size) fits = false;
    ++index;
  }
  if (!fits) fail_value(argument, "shape " + axes_text(axes), "shape " + shape_text(array));
}

void check_layout(const char* argument, const py::array& array, bool written) {
  const int flags = array.flags();
  if (!(flags & py::array::c_style)) fail_value(argument, "a C-contiguous array", "other strides");
  if (!(flags & py::detail::npy_api::NPY_ARRAY_ALIGNED_)) fail_value(argument, "aligned memory", "an unaligned array");
  if (written && !array.writeable()) fail_value(argument, "a writeable array", "a read-only one");
}

void check_range(const char* argument, const int32_t* values, int64_t count, int64_t low, int64_t high) {
  for (int64_t i = 0; i < count; ++i) {
    if (values[i] >= low && values[i] <= high) continue;
    fail_value(argument, "values " + std::to_string(low) + " to " + std::to_string(high),
               std::to_string(values[i]) + " at flat index " + std::to_string(i));
  }
}

const void* read_storage_flat(const char* argument, const py::array& array, DType dtype) {
  check_storage(argument, array, dtype);
  check_layout(argument, array, false);
  return array.data();
}

const float* read_like(const char* argument, const py::array& array, const char* other_argument,
                       const py::array& other) {
  const float* data = read_flat<float>(argument, array);
  if (shape_of(array) != shape_of(other)) {
    fail_value(argument,
               std::string("the shape of ") + other_argument + " " + py::str(other.attr("shape")).cast<std::string>(),
               py::str(array.attr("shape")).cast<std::string>());
  }
  return data;
}

const void* read_storage(const char* argument, const py::array& array, DType dtype, Axes axes) {
  check_storage(argument, array, dtype);
  check_axes(argument, array, axes);
  check_layout(argument, array, false);
  return array.data();
}

void* write_storage(const char* argument, py::array& array, DType dtype, Axes axes) {
  read_storage(argument, array, dtype, axes);
  check_layout(argument, array, true);
  return array.mutable_data();
}

std::vector<py::ssize_t> shape_of(const py::array& array) {
  return std::vector<py::ssize_t>(array.shape(), array.shape() + array.ndim());
}

py::array new_storage(DType dtype, const std::vector<py::ssize_t>& shape) {
  if (dtype == DType::float32) return new_array<float>(shape);
  return new_array<uint16_t>(shape);
}

}  // namespace leafsum
