#include "areas.hpp"

PYBIND11_MODULE(_C, module) {
  module.doc() = "CPU kernels of leafsum, in the orders of docs/numerics.md.";
  leafsum::register_machine(module);
  leafsum::register_functions(module);
  leafsum::register_rounding(module);
  leafsum::register_linear(module);
  leafsum::register_experts(module);
  leafsum::register_rows(module);
  leafsum::register_attention(module);
  leafsum::register_deltanet(module);
  leafsum::register_streams(module);
  leafsum::register_indexer(module);
  leafsum::register_tree(module);
  leafsum::register_meeting(module);
}
