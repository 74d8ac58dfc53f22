// Rows rounded to the compute dtype once per call, before the chains.
#pragma once

#include <cstdint>
#include <memory>

#include "kernels.hpp"

namespace leafsum {

class RoundedRows {
 public:
  // x [num_rows, size]
  RoundedRows(const Kernels& set, DType dtype, const float* x, int64_t num_rows, int64_t size);

  const float* data() const { return data_.get(); }
  int64_t stride() const { return stride_; }

 private:
  int64_t stride_;
  std::unique_ptr<float[]> data_;
};

// About what chains of k steps take: a weight from memory, or the fma units.
constexpr double chain_ns(int64_t k, int64_t num_columns, int64_t num_rows) {
  return 1.0 * k * num_columns * (num_rows < 4 ? 0.08 : 0.025 * num_rows);
}

}  // namespace leafsum
