#include "areas.hpp"
#include "arrays.hpp"
#include "machine.hpp"
#include "threads.hpp"

namespace leafsum {
namespace {

constexpr int64_t ELEMENTS_PER_TASK = 65536;
constexpr double ELEMENT_NS = 0.3;

py::array round_to(const py::array& x, const std::string& dtype_name) {
  const DType dtype = parse_dtype(dtype_name);
  const float* from = read_flat<float>("x", x);
  py::array_t<float> y = new_array<float>(shape_of(x));
  float* to = y.mutable_data();
  const int64_t size = x.size();
  without_gil([&] {
    const Kernels& set = kernels();
    parallel_pieces(size, ELEMENTS_PER_TASK, ELEMENT_NS,
                    [&](int64_t begin, int64_t end) { set.round_to(dtype, from + begin, to + begin, end - begin); });
  });
  return y;
}

template <typename T>
T* offset(T* base, DType dtype, int64_t elements) {
  using Byte = std::conditional_t<std::is_const_v<T>, const char, char>;
  return static_cast<Byte*>(base) + elements * (dtype == DType::float32 ? 4 : 2);
}

py::array narrow(const py::array& x, const std::string& dtype_name) {
  const DType dtype = parse_dtype(dtype_name);
  const float* from = read_flat<float>("x", x);
  py::array y = new_storage(dtype, shape_of(x));
  void* to = y.mutable_data();
  const int64_t size = x.size();
  without_gil([&] {
    const Kernels& set = kernels();
    parallel_pieces(size, ELEMENTS_PER_TASK, ELEMENT_NS, [&](int64_t begin, int64_t end) {
      set.narrow(dtype, from + begin, offset(to, dtype, begin), end - begin);
    });
  });
  return y;
}

py::array widen(const py::array& x, const std::string& dtype_name) {
  const DType dtype = parse_dtype(dtype_name);
  const void* from = read_storage_flat("x", x, dtype);
  py::array_t<float> y = new_array<float>(shape_of(x));
  float* to = y.mutable_data();
  const int64_t size = x.size();
  without_gil([&] {
    const Kernels& set = kernels();
    parallel_pieces(size, ELEMENTS_PER_TASK, ELEMENT_NS, [&](int64_t begin, int64_t end) {
      set.widen(dtype, offset(from, dtype, begin), to + begin, end - begin);
    });
  });
  return y;
}

}  // namespace

void register_rounding(py::module_& module) {
  module.def("round_to", &round_to, py::arg("x"), py::arg("dtype"));
  module.def("narrow", &narrow, py::arg("x"), py::arg("dtype"));
  module.def("widen", &widen, py::arg("x"), py::arg("dtype"));
}

}  // namespace leafsum
