// The kernels for x86-64 machines with AVX-512 F, DQ, BW and VL.
#if defined(__x86_64__)
#include <immintrin.h>

#include "hard_arguments.hpp"
#include "kernels.hpp"

// GCC 12 says this of its own intrinsics' undefined merge operands.
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#pragma GCC diagnostic ignored "-Wuninitialized"
#endif

// The target stays on to the end of the file: templates are instantiated there.
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx512f,avx512dq,avx512bw,avx512vl,avx2,fma,f16c"))), \
                             apply_to = function)
#else
#pragma GCC target("avx512f,avx512dq,avx512bw,avx512vl,avx2,fma,f16c,prefer-vector-width=512")
#endif

#define LEAFSUM_AVX512
#define LEAFSUM_KERNELS AVX512_KERNELS
#define LEAFSUM_NAME "avx512"
#include "body.inc"

#if defined(__clang__)
#pragma clang attribute pop
#endif
#endif
