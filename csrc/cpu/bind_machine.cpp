#include <pybind11/stl.h>

#include "areas.hpp"
#include "arrays.hpp"
#include "machine.hpp"
#include "poison.hpp"
#include "threads.hpp"

namespace leafsum {
namespace {

constexpr int MAX_THREADS = 1024;

void set_threads(int count) {
  if (count < 1 || count > MAX_THREADS) {
    fail_value("num_threads", "1 to " + std::to_string(MAX_THREADS), std::to_string(count));
  }
  py::gil_scoped_release released;
  set_num_threads(count);
}

void set_min_work(double seconds) {
  if (!(seconds >= 0)) fail_value("min_work_s", "0 or more", std::to_string(seconds));
  set_min_ns_per_thread(seconds * 1e9);
}

void choose(const std::string& name) {
  if (set_instruction_set(name)) return;
  std::string known;
  for (const std::string& set : instruction_sets()) known += (known.empty() ? "" : ", ") + set;
  fail_value("name", "an instruction set of this machine (" + known + ")", "'" + name + "'");
}

}  // namespace

void register_machine(py::module_& module) {
  module.attr("COLUMNS_PER_BLOCK") = COLUMNS_PER_BLOCK;
  module.def("set_num_threads", &set_threads, py::arg("num_threads"));
  module.def("num_threads", &num_threads);
  module.def("set_min_work", &set_min_work, py::arg("min_work_s"));
  module.def("min_work", [] { return min_ns_per_thread() / 1e9; });
  module.def("kernel_cpu_ns", &kernel_cpu_ns);
  module.def("instruction_sets", &instruction_sets);
  module.def("set_instruction_set", &choose, py::arg("name"));
  module.def("instruction_set", [] { return std::string(kernels().name); });
  module.def("set_poison", &set_poison, py::arg("is_on"));
  module.def("poison", &poison);
  module.def("subnormals_kept", &subnormals_kept, py::call_guard<py::gil_scoped_release>());
}

}  // namespace leafsum
