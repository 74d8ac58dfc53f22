#include <pybind11/stl.h>

#include <algorithm>
#include <optional>

#include "areas.hpp"
#include "arrays.hpp"
#include "machine.hpp"
#include "rows_copy.hpp"
#include "threads.hpp"

namespace leafsum {
namespace {

template <typename T>
void pack_block(const T* weight, int64_t num_rows, int64_t k, int64_t block, T* packed) {
  for (int64_t column = 0; column < COLUMNS_PER_BLOCK; ++column) {
    const int64_t row = block * COLUMNS_PER_BLOCK + column;
    T* to = packed + block * k * COLUMNS_PER_BLOCK + column;
    for (int64_t i = 0; i < k; ++i) to[i * COLUMNS_PER_BLOCK] = row < num_rows ? weight[row * k + i] : T(0);
  }
}

py::array pack_weight(const py::array& weight, const std::string& dtype_name) {
  const DType dtype = parse_dtype(dtype_name);
  const void* from = read_storage("weight", weight, dtype, {{"N"}, {"K"}});
  const int64_t num_rows = weight.shape(0), k = weight.shape(1);
  const int64_t num_blocks = padded(num_rows, COLUMNS_PER_BLOCK) / COLUMNS_PER_BLOCK;
  py::array packed = new_storage(dtype, {num_blocks, k, COLUMNS_PER_BLOCK});
  void* to = packed.mutable_data();
  without_gil([&] {
    parallel_for(num_blocks, 1.0 * k * COLUMNS_PER_BLOCK, [&](int64_t block) {
      if (dtype == DType::float32) {
        pack_block(static_cast<const float*>(from), num_rows, k, block, static_cast<float*>(to));
      } else {
        pack_block(static_cast<const uint16_t*>(from), num_rows, k, block, static_cast<uint16_t*>(to));
      }
    });
  });
  return packed;
}

void run_linear(LinearArgs args, const float* x, int64_t num_rows) {
  const Kernels& set = kernels();
  const RoundedRows rows(set, args.dtype, x, num_rows, args.k);
  args.x = rows.data();
  args.x_stride = rows.stride();
  const int64_t num_blocks = padded(args.num_columns, COLUMNS_PER_BLOCK) / COLUMNS_PER_BLOCK;
  const int64_t row_tasks = (num_rows + ROWS_PER_TASK - 1) / ROWS_PER_TASK;
  const int64_t block_tasks = (num_blocks + BLOCKS_PER_TASK - 1) / BLOCKS_PER_TASK;
  const double task_ns = chain_ns(args.k, COLUMNS_PER_TASK, std::min(num_rows, ROWS_PER_TASK));
  // Rows run fastest, so that neighbouring tasks share their weights.
  parallel_for(row_tasks * block_tasks, task_ns, [&](int64_t task) {
    const int64_t row = task % row_tasks * ROWS_PER_TASK, block = task / row_tasks * BLOCKS_PER_TASK;
    const int64_t row_end = std::min(num_rows, row + ROWS_PER_TASK);
    const int64_t block_end = std::min(num_blocks, block + BLOCKS_PER_TASK);
    set.linear(args, {row, row_end, block, block_end}, thread_scratch(LINEAR_SCRATCH));
  });
}

LinearArgs linear_args(const py::array& x, const py::array& packed, const std::string& dtype_name, int64_t num_columns,
                       int64_t leaf_k) {
  LinearArgs args{};
  args.dtype = parse_dtype(dtype_name);
  read<float>("x", x, {{"M"}, {"K"}});
  args.k = x.shape(1);
  if (num_columns < 0) fail_value("num_columns", "0 or more", std::to_string(num_columns));
  const int64_t num_blocks = num_columns / COLUMNS_PER_BLOCK + (num_columns % COLUMNS_PER_BLOCK != 0);
  args.packed =
      read_storage("packed", packed, args.dtype, {{"blocks", num_blocks}, {"K", args.k}, {"lanes", COLUMNS_PER_BLOCK}});
  args.num_columns = num_columns;
  args.leaf_k = leaf_k;
  return args;
}

py::array linear(const py::array& x, const py::array& packed, const std::string& dtype, int64_t num_columns,
                 int64_t leaf_k, const std::optional<py::array>& bias) {
  LinearArgs args = linear_args(x, packed, dtype, num_columns, leaf_k);
  if (leaf_k < 0) fail_value("leaf_k", "0 (wide) or the elements of a leaf", std::to_string(leaf_k));
  if (leaf_k == 0) args.leaf_k = std::max<int64_t>(args.k, 1);
  args.bias = bias ? read<float>("bias", *bias, {{"N", num_columns}}) : nullptr;
  py::array_t<float> out = new_array<float>({x.shape(0), num_columns});
  args.out = out.mutable_data();
  const float* from = static_cast<const float*>(x.data());
  const int64_t num_rows = x.shape(0);
  without_gil([&] { run_linear(args, from, num_rows); });
  return out;
}

py::array linear_leaves(const py::array& x, const py::array& packed, const std::string& dtype, int64_t num_columns,
                        int64_t leaf_k) {
  LinearArgs args = linear_args(x, packed, dtype, num_columns, leaf_k);
  if (leaf_k < 1 || args.k % leaf_k != 0) {
    fail_value("leaf_k", "a divisor of K = " + std::to_string(args.k), std::to_string(leaf_k));
  }
  args.keep_leaves = true;
  py::array_t<float> out = new_array<float>({x.shape(0), args.k / leaf_k, num_columns});
  args.out = out.mutable_data();
  const float* from = static_cast<const float*>(x.data());
  const int64_t num_rows = x.shape(0);
  without_gil([&] { run_linear(args, from, num_rows); });
  return out;
}

}  // namespace

void register_linear(py::module_& module) {
  module.def("pack_weight", &pack_weight, py::arg("weight"), py::arg("dtype"));
  module.def("linear", &linear, py::arg("x"), py::arg("packed"), py::arg("dtype"), py::arg("num_columns"),
             py::arg("leaf_k"), py::arg("bias").none(true));
  module.def("linear_leaves", &linear_leaves, py::arg("x"), py::arg("packed"), py::arg("dtype"), py::arg("num_columns"),
             py::arg("leaf_k"));
}

}  // namespace leafsum
