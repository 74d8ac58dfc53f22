// Arguments whose exact function value lies within 2^-50 (relative) of a border between two FP32 roundings.
#pragma once

#include <stdint.h>

namespace leafsum {

struct HardArgument {
  uint32_t argument, value;  // FP32 bits; the tables ascend by argument.
};

struct HardTable {
  const HardArgument* entries;
  int64_t count;
};

extern const HardTable HARD_EXP;
extern const HardTable HARD_LOG;
extern const HardTable HARD_SIN;  // Non-negative arguments; sin(-x) = -sin(x).
extern const HardTable HARD_COS;  // Non-negative arguments; cos(-x) = cos(x).
extern const HardTable HARD_SIGMOID;
extern const HardTable HARD_SOFTPLUS;

}  // namespace leafsum
