// The areas of the binding; each registers its own functions.
#pragma once

#include <pybind11/pybind11.h>

namespace leafsum {

void register_machine(pybind11::module_& module);
void register_functions(pybind11::module_& module);
void register_rounding(pybind11::module_& module);
void register_linear(pybind11::module_& module);
void register_experts(pybind11::module_& module);
void register_rows(pybind11::module_& module);
void register_attention(pybind11::module_& module);
void register_deltanet(pybind11::module_& module);
void register_streams(pybind11::module_& module);
void register_indexer(pybind11::module_& module);
void register_tree(pybind11::module_& module);
void register_meeting(pybind11::module_& module);

}  // namespace leafsum
