// The rows of a call grouped by slot: in a slot, positions follow each other. A slot has one run.
#pragma once

#include <vector>

#include "arrays.hpp"

namespace leafsum {

// Row `index` of a run.
struct RunRow {
  const Run& run;
  int64_t index;
};

// Checked arguments row_order, run_slots, run_starts and run_ends of a binding. The memory stays the arrays'.
class Runs {
 public:
  Runs(const py::array& row_order, const py::array& run_slots, const py::array& run_starts, const py::array& run_ends,
       int64_t num_rows, int64_t num_slots);

  const std::vector<Run>& all() const { return runs_; }
  int64_t num_rows() const { return static_cast<int64_t>(run_of_index_.size()); }

  // The i-th row in the order of runs.
  RunRow row(int64_t i) const { return {runs_[run_of_index_[i]], i - begins_[run_of_index_[i]]}; }

 private:
  std::vector<Run> runs_;
  std::vector<int32_t> run_of_index_;
  std::vector<int32_t> begins_;
};

// The last ring_rows rows of every run, [M, size], into the ring [slots, ring_rows, size] by position.
void keep_in_ring(const Runs& runs, const float* rows, int64_t size, int64_t ring_rows, float* ring);

}  // namespace leafsum
