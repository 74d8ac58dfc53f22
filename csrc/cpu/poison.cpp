#include "poison.hpp"

#include <string.h>

#include <atomic>

namespace leafsum {
namespace {

std::atomic<bool> poison_is_on{false};

}  // namespace

void set_poison(bool is_on) { poison_is_on = is_on; }
bool poison() { return poison_is_on; }

void fill_if_poisoned(void* memory, size_t num_bytes) {
  if (poison() && num_bytes > 0) memset(memory, 0xFF, num_bytes);
}

}  // namespace leafsum
