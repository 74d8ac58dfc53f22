// Which kernels run: the best set of instructions this machine has, or the one that was asked for.
#pragma once

#include <string>
#include <vector>

#include "kernels.hpp"

namespace leafsum {

std::vector<std::string> instruction_sets();        // Best first, "plain" last.
bool set_instruction_set(const std::string& name);  // False if this machine does not have it.
const Kernels& kernels();
bool subnormals_kept();

}  // namespace leafsum
