#include "areas.hpp"
#include "arrays.hpp"
#include "machine.hpp"
#include "threads.hpp"

namespace leafsum {
namespace {

constexpr int64_t ELEMENTS_PER_TASK = 8192;
constexpr double ELEMENT_NS = 2.5;

py::array apply(Function function, const py::array& x) {
  const float* from = read_flat<float>("x", x);
  py::array_t<float> y = new_array<float>(shape_of(x));
  float* to = y.mutable_data();
  const int64_t size = x.size();
  without_gil([&] {
    const Kernels& set = kernels();
    parallel_pieces(size, ELEMENTS_PER_TASK, ELEMENT_NS,
                    [&](int64_t begin, int64_t end) { set.apply(function, from + begin, to + begin, end - begin); });
  });
  return y;
}

using Pairwise = void (*)(const float* x, const float* y, float* out, int64_t count);

py::array apply_pairwise(Pairwise kernel, const float* x, const float* y, const py::array& shaped) {
  py::array_t<float> out = new_array<float>(shape_of(shaped));
  float* to = out.mutable_data();
  const int64_t size = shaped.size();
  without_gil([&] {
    parallel_pieces(size, ELEMENTS_PER_TASK, ELEMENT_NS,
                    [&](int64_t begin, int64_t end) { kernel(x + begin, y + begin, to + begin, end - begin); });
  });
  return out;
}

py::array swiglu(const py::array& gate, const py::array& up) {
  const float* gates = read_flat<float>("gate", gate);
  return apply_pairwise(kernels().swiglu, gates, read_like("up", up, "gate", gate), gate);
}

py::array sigmoid_times(const py::array& x, const py::array& gate) {
  const float* from = read_flat<float>("x", x);
  return apply_pairwise(kernels().sigmoid_times, from, read_like("gate", gate, "x", x), x);
}

}  // namespace

void register_functions(py::module_& module) {
  const std::pair<const char*, Function> functions[] = {
      {"exp", Function::exp}, {"log", Function::log},         {"sin", Function::sin},
      {"cos", Function::cos}, {"sigmoid", Function::sigmoid}, {"softplus", Function::softplus},
  };
  for (const auto& [name, function] : functions) {
    module.def(name, [function = function](const py::array& x) { return apply(function, x); }, py::arg("x"));
  }
  module.def("swiglu", &swiglu, py::arg("gate"), py::arg("up"));
  module.def("sigmoid_times", &sigmoid_times, py::arg("x"), py::arg("gate"));
}

}  // namespace leafsum
