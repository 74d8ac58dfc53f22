// Looks at every FP32 argument of one function. Built and driven by hard_arguments.py.
//
// scan_functions FUNCTION quick FIRST LAST
//     prints "near ARGUMENT" where the double value lies within 2^-47 of a border between two roundings
// scan_functions FUNCTION full FIRST LAST
//     holds every instruction set of this machine against the C library's function in double, or in 80 bits where a
//     double cannot tell: "wrong ARGUMENT FOUND EXPECTED", "near ARGUMENT FOUND" where 80 bits cannot tell either,
//     "unequal NAME ARGUMENT"; ends with "checked COUNT"
// FIRST, LAST: FP32 bits, hexadecimal, LAST included. Needs x86-64: elsewhere long double has other widths.
#include <cinttypes>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <initializer_list>

#include "../cpu/hard_arguments.hpp"
#include "../cpu/kernels.hpp"

namespace leafsum {
namespace {
#include "../cpu/lanes.inc"
#include "../cpu/rounding.inc"
#include "../cpu/functions.inc"

// A little over twice the error of a few operations: glibc's functions stay within one unit of the last place.
constexpr double NEAR_IN_DOUBLE = 0x1p-47;
constexpr long double NEAR_IN_80_BITS = 0x1p-58L;
constexpr uint64_t CHUNK = 4096;

const char* const NAMES[] = {"exp", "log", "sin", "cos", "sigmoid", "softplus"};

template <typename Real>
Real from_library(Function function, Real x) {
  switch (function) {
    case Function::exp:
      return std::exp(x);
    case Function::log:
      return std::log(x);
    case Function::sin:
      return std::sin(x);
    case Function::cos:
      return std::cos(x);
    case Function::sigmoid:
      return 1 / (1 + std::exp(-x));
    case Function::softplus:
      return x > 0 ? x + std::log1p(std::exp(-x)) : std::log1p(std::exp(x));
  }
  return 0;
}

double from_core(Function function, float x) {
  switch (function) {
    case Function::exp:
      return Exp::rest(x);
    case Function::log:
      return Log::rest(x);
    case Function::sin:
      return Sin::rest(x);
    case Function::cos:
      return Cos::rest(x);
    case Function::sigmoid:
      return Sigmoid::rest(x);
    case Function::softplus:
      return Softplus::rest(x);
  }
  return 0;
}

void quick(Function function, uint64_t first, uint64_t last) {
  for (uint64_t bits = first; bits <= last; ++bits) {
    const double value = from_core(function, float_of(static_cast<uint32_t>(bits)));
    const float low = static_cast<float>(value * (1 - NEAR_IN_DOUBLE));
    const float high = static_cast<float>(value * (1 + NEAR_IN_DOUBLE));
    if (low != high && value == value) std::printf("near %08" PRIx64 "\n", bits);
  }
}

// True if every value within `near` of value rounds alike.
template <typename Real>
bool decides(Real value, Real near, uint32_t& rounded) {
  const float low = static_cast<float>(value * (1 - near)), high = static_cast<float>(value * (1 + near));
  rounded = value == value ? bits_of(low) : 0x7fc00000u;
  return low == high || value != value;
}

void compare(Function function, uint32_t argument, uint32_t found) {
  uint32_t expected;
  const float x = float_of(argument);
  if (!decides<double>(from_library<double>(function, x), NEAR_IN_DOUBLE, expected) &&
      !decides<long double>(from_library<long double>(function, x), NEAR_IN_80_BITS, expected)) {
    std::printf("near %08x %08x\n", argument, found);
  } else if (found != expected) {
    std::printf("wrong %08x %08x %08x\n", argument, found, expected);
  }
}

void full(Function function, uint64_t first, uint64_t last) {
  static float x[CHUNK], y[CHUNK], other[CHUNK];
  for (uint64_t begin = first; begin <= last; begin += CHUNK) {
    const uint64_t size = last - begin + 1 < CHUNK ? last - begin + 1 : CHUNK;
    for (uint64_t i = 0; i < size; ++i) x[i] = float_of(static_cast<uint32_t>(begin + i));
    PLAIN_KERNELS.apply(function, x, y, size);
    for (uint64_t i = 0; i < size; ++i) compare(function, bits_of(x[i]), bits_of(y[i]));
    for (const Kernels* set : {&AVX2_KERNELS, &AVX512_KERNELS}) {
      const bool runs = set == &AVX2_KERNELS ? __builtin_cpu_supports("avx2") : __builtin_cpu_supports("avx512vl");
      if (!runs) continue;
      set->apply(function, x, other, size);
      if (std::memcmp(y, other, size * sizeof(float)) != 0) std::printf("unequal %s %08" PRIx64 "\n", set->name, begin);
    }
  }
  std::printf("checked %" PRIu64 "\n", last - first + 1);
}

int run(int argc, char** argv) {
  if (argc != 5) return 2;
  for (int f = 0; f < 6; ++f) {
    if (std::strcmp(argv[1], NAMES[f]) != 0) continue;
    const uint64_t first = std::strtoull(argv[3], nullptr, 16), last = std::strtoull(argv[4], nullptr, 16);
    const bool is_full = std::strcmp(argv[2], "full") == 0;
    (is_full ? full : quick)(static_cast<Function>(f), first, last);
    return 0;
  }
  return 2;
}

}  // namespace
}  // namespace leafsum

int main(int argc, char** argv) { return leafsum::run(argc, argv); }
