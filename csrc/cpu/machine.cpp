#include "machine.hpp"

#include <atomic>

#include "threads.hpp"

namespace leafsum {
namespace {

std::vector<const Kernels*> runnable() {
  std::vector<const Kernels*> found;
#if defined(__x86_64__)
  __builtin_cpu_init();
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
  const bool avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512dq") &&
                      __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl");
  if (avx2 && avx512) found.push_back(&AVX512_KERNELS);
  if (avx2) found.push_back(&AVX2_KERNELS);
#endif
  found.push_back(&PLAIN_KERNELS);
  return found;
}

std::atomic<const Kernels*>& active() {
  static std::atomic<const Kernels*> instance{runnable().front()};
  return instance;
}

// Flush-to-zero shows in a result, denormals-are-zero in an operand.
bool subnormals_kept_here() {
  volatile float smallest_normal = 0x1p-126f, largest_subnormal = 0x1.fffffcp-127f, half = 0.5f, two = 2.0f;
  const volatile float result = smallest_normal * half;
  const volatile float operand = largest_subnormal * two;
  return result != 0.0f && operand == 0x1.fffffcp-126f;
}

}  // namespace

std::vector<std::string> instruction_sets() {
  std::vector<std::string> names;
  for (const Kernels* set : runnable()) names.emplace_back(set->name);
  return names;
}

bool set_instruction_set(const std::string& name) {
  for (const Kernels* set : runnable()) {
    if (name == set->name) {
      active() = set;
      return true;
    }
  }
  return false;
}

const Kernels& kernels() { return *active().load(); }

bool subnormals_kept() {
  std::atomic<bool> kept{true};
  on_every_thread([&] {
    if (!subnormals_kept_here()) kept = false;
  });
  return kept;
}

}  // namespace leafsum
