#include "hard_arguments.hpp"

namespace leafsum {
const HardTable HARD_EXP = {nullptr, 0};
const HardTable HARD_LOG = {nullptr, 0};
const HardTable HARD_SIN = {nullptr, 0};
const HardTable HARD_COS = {nullptr, 0};
const HardTable HARD_SIGMOID = {nullptr, 0};
const HardTable HARD_SOFTPLUS = {nullptr, 0};
}  // namespace leafsum
