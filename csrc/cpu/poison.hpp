// Poison for receipts: memory that is handed out is filled with NaN bytes, so that whoever reads before writing shows.
#pragma once

#include <stddef.h>

namespace leafsum {

void set_poison(bool is_on);
bool poison();
void fill_if_poisoned(void* memory, size_t num_bytes);  // 0xFF: a NaN in every float format, -1 in integers.

}  // namespace leafsum
