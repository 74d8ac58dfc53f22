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

py::array swiglu(const py::array& gate, const py::array& up) {
  const float* gates = read_flat<float>("gate", gate);
  const float* ups = read_flat<float>("up", up);
  if (shape_of(gate) != shape_of(up)) {
    fail_value("up", "the shape of gate " + py::str(gate.attr("shape")).cast<std::string>(),
               py::str(up.attr("shape")).cast<std::string>());
  }
  py::array_t<float> out = new_array<float>(shape_of(gate));
  float* to = out.mutable_data();
  const int64_t size = gate.size();
  without_gil([&] {
    const Kernels& set = kernels();
    parallel_pieces(size, ELEMENTS_PER_TASK, ELEMENT_NS, [&](int64_t begin, int64_t end) {
      set.swiglu(gates + begin, ups + begin, to + begin, end - begin);
    });
  });
  return out;
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
}

}  // namespace leafsum
