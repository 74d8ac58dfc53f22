// The kernels for any machine: fma comes from the C library where the baseline has none.
#include "kernels.hpp"

#define LEAFSUM_KERNELS PLAIN_KERNELS
#define LEAFSUM_NAME "plain"
#include "body.inc"
