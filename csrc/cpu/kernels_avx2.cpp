// The kernels for x86-64 machines with AVX2, FMA and F16C.
#if defined(__x86_64__)
#include <immintrin.h>

#include "hard_arguments.hpp"
#include "kernels.hpp"

// The target stays on to the end of the file: templates are instantiated there.
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,fma,f16c"))), apply_to = function)
#else
#pragma GCC target("avx2,fma,f16c")
#endif

#define LEAFSUM_AVX2
#define LEAFSUM_KERNELS AVX2_KERNELS
#define LEAFSUM_NAME "avx2"
#include "body.inc"

#if defined(__clang__)
#pragma clang attribute pop
#endif
#endif
