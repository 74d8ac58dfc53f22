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

}  // namespace leafsum
