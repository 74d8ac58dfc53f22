#include "rows_copy.hpp"

#include "threads.hpp"

namespace leafsum {

// The stride is an odd number of cache lines: rows a power of two apart would share a few sets of the first-level
// cache.
RoundedRows::RoundedRows(const Kernels& set, DType dtype, const float* x, int64_t num_rows, int64_t size)
    : stride_((padded(size, 16) / 16 | 1) * 16), data_(new float[num_rows * stride_]) {
  parallel_pieces(num_rows, 16, 0.3 * size, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) set.round_to(dtype, x + row * size, data_.get() + row * stride_, size);
  });
}

}  // namespace leafsum
