#include "runs.hpp"

#include <string.h>

#include <algorithm>

namespace leafsum {
namespace {

constexpr int32_t MAX_POSITION = 1 << 29;  // Below it, a position times a frequency is exact in double.

void check_once(const char* argument, const int32_t* values, int64_t count, int64_t limit) {
  check_range(argument, values, count, 0, limit - 1);
  std::vector<bool> found(limit, false);
  for (int64_t i = 0; i < count; ++i) {
    if (found[values[i]]) fail_value(argument, "every value once", std::to_string(values[i]) + " twice");
    found[values[i]] = true;
  }
}

}  // namespace

Runs::Runs(const py::array& row_order, const py::array& run_slots, const py::array& run_starts,
           const py::array& run_ends, int64_t num_rows, int64_t num_slots) {
  const int32_t* rows = read<int32_t>("row_order", row_order, {{"M", num_rows}});
  check_once("row_order", rows, num_rows, num_rows);
  const int32_t* slots = read<int32_t>("run_slots", run_slots, {{"R"}});
  const int64_t num_runs = run_slots.shape(0);
  check_once("run_slots", slots, num_runs, num_slots);
  const int32_t* starts = read<int32_t>("run_starts", run_starts, {{"R", num_runs}});
  check_range("run_starts", starts, num_runs, 0, MAX_POSITION);
  const int32_t* ends = read<int32_t>("run_ends", run_ends, {{"R", num_runs}});
  run_of_index_.reserve(num_rows);
  int64_t begin = 0;
  for (int64_t run = 0; run < num_runs; ++run) {
    if (ends[run] <= begin || ends[run] > num_rows) {
      fail_value("run_ends", "ascending ends of at most " + std::to_string(num_rows), std::to_string(ends[run]));
    }
    runs_.push_back({rows + begin, ends[run] - begin, slots[run], starts[run]});
    begins_.push_back(static_cast<int32_t>(begin));
    run_of_index_.insert(run_of_index_.end(), ends[run] - begin, static_cast<int32_t>(run));
    begin = ends[run];
  }
  if (begin != num_rows) fail_value("run_ends", std::to_string(num_rows) + " at last", std::to_string(begin));
}

void keep_in_ring(const Runs& runs, const float* rows, int64_t size, int64_t ring_rows, float* ring) {
  for (const Run& run : runs.all()) {
    for (int64_t i = std::max<int64_t>(0, run.num_rows - ring_rows); i < run.num_rows; ++i) {
      float* to = ring + (run.slot * ring_rows + (run.start + i) % ring_rows) * size;
      memcpy(to, rows + run.rows[i] * size, size * sizeof(float));
    }
  }
}

}  // namespace leafsum
