#include <algorithm>

#include "areas.hpp"
#include "arrays.hpp"
#include "machine.hpp"
#include "rows_copy.hpp"
#include "threads.hpp"

namespace leafsum {
namespace {

// The owned (row, slot) pairs, sorted by expert and, inside, by row.
struct Pairs {
  std::vector<ExpertGroup> groups;
  std::vector<int32_t> rows;
  std::vector<int64_t> slots;
  std::vector<float> weights;
};

struct Slots {
  const int32_t* ids;
  const float* weights;
  int64_t num_rows, slots_per_row;
};

Pairs group_pairs(const Slots& slots, const int32_t* local_index, int64_t num_owned) {
  const int64_t num_slots = slots.num_rows * slots.slots_per_row;
  std::vector<int64_t> next(num_owned + 1, 0);
  for (int64_t s = 0; s < num_slots; ++s) {
    if (slots.ids[s] >= 0 && local_index[slots.ids[s]] >= 0) ++next[local_index[slots.ids[s]] + 1];
  }
  Pairs pairs;
  for (int64_t owned = 0; owned < num_owned; ++owned) {
    if (next[owned + 1] > 0) pairs.groups.push_back({owned, next[owned], next[owned] + next[owned + 1]});
    next[owned + 1] += next[owned];
  }
  const int64_t num_pairs = next[num_owned];
  pairs.rows.resize(num_pairs);
  pairs.slots.resize(num_pairs);
  pairs.weights.resize(num_pairs);
  for (int64_t s = 0; s < num_slots; ++s) {
    if (slots.ids[s] < 0 || local_index[slots.ids[s]] < 0) continue;
    const int64_t pair = next[local_index[slots.ids[s]]]++;
    pairs.rows[pair] = static_cast<int32_t>(s / slots.slots_per_row);
    pairs.slots[pair] = s;
    pairs.weights[pair] = slots.weights[s];
  }
  return pairs;
}

using Kernel = void (*)(const ExpertArgs&, int64_t, int64_t, int64_t, float*);

void run_blocks(const ExpertArgs& args, int64_t num_groups, int64_t num_columns, double task_ns, Kernel kernel) {
  const int64_t num_blocks = padded(num_columns, COLUMNS_PER_BLOCK) / COLUMNS_PER_BLOCK;
  const int64_t tasks = (num_blocks + BLOCKS_PER_TASK - 1) / BLOCKS_PER_TASK;
  parallel_for(num_groups * tasks, task_ns, [&](int64_t task) {
    const int64_t block = task % tasks * BLOCKS_PER_TASK;
    const int64_t block_end = std::min(num_blocks, block + BLOCKS_PER_TASK);
    kernel(args, task / tasks, block, block_end, thread_scratch(EXPERTS_SCRATCH));
  });
}

void run_experts(ExpertArgs args, const float* x, const Slots& slots, const int32_t* local_index, int64_t num_owned) {
  const Kernels& set = kernels();
  const Pairs pairs = group_pairs(slots, local_index, num_owned);
  if (pairs.groups.empty()) return;
  const RoundedRows rows(set, args.dtype, x, slots.num_rows, args.hidden_size);
  args.x = rows.data();
  args.x_stride = rows.stride();
  args.inner_stride = (padded(args.inner_size, 16) / 16 | 1) * 16;
  const std::unique_ptr<float[]> inner(new float[pairs.rows.size() * args.inner_stride]);
  args.inner = inner.get();
  args.groups = pairs.groups.data();
  args.pair_rows = pairs.rows.data();
  args.pair_slots = pairs.slots.data();
  args.pair_weights = pairs.weights.data();
  const int64_t num_groups = static_cast<int64_t>(pairs.groups.size());
  const int64_t pairs_per_group = static_cast<int64_t>(pairs.rows.size()) / num_groups;
  const double inner_ns = 2 * chain_ns(args.hidden_size, COLUMNS_PER_TASK, pairs_per_group);
  const double down_ns = chain_ns(args.inner_size, COLUMNS_PER_TASK, pairs_per_group);
  run_blocks(args, num_groups, args.inner_size, inner_ns, set.expert_inner);
  run_blocks(args, num_groups, args.hidden_size, down_ns, set.expert_down);
}

void experts(const py::array& x, const py::array& slot_ids, const py::array& slot_weights, const py::array& gate,
             const py::array& up, const py::array& down, const py::array& local_index, const std::string& dtype_name,
             py::array out) {
  ExpertArgs args{};
  args.dtype = parse_dtype(dtype_name);
  const float* from = read<float>("x", x, {{"M"}, {"H"}});
  const int64_t num_rows = x.shape(0), hidden_size = x.shape(1);
  const int32_t* ids = read<int32_t>("slot_ids", slot_ids, {{"M", num_rows}, {"S"}});
  const int64_t num_slots = slot_ids.shape(1);
  const float* weights = read<float>("slot_weights", slot_weights, {{"M", num_rows}, {"S", num_slots}});
  const int64_t hidden_blocks = padded(hidden_size, COLUMNS_PER_BLOCK) / COLUMNS_PER_BLOCK;
  args.down = read_storage("down", down, args.dtype, {{"n"}, {"H/16", hidden_blocks}, {"I"}, {"lanes", 16}});
  const int64_t num_owned = down.shape(0);
  args.inner_size = down.shape(2);
  args.hidden_size = hidden_size;
  const int64_t inner_blocks = padded(args.inner_size, COLUMNS_PER_BLOCK) / COLUMNS_PER_BLOCK;
  const Axes matrix = {{"n", num_owned}, {"I/16", inner_blocks}, {"H", hidden_size}, {"lanes", 16}};
  args.gate = read_storage("gate", gate, args.dtype, matrix);
  args.up = read_storage("up", up, args.dtype, matrix);
  const int32_t* owned = read<int32_t>("local_index", local_index, {{"E"}});
  check_range("local_index", owned, local_index.size(), -1, num_owned - 1);
  check_range("slot_ids", ids, slot_ids.size(), INT32_MIN, local_index.size() - 1);
  args.out = write<float>("out", out, {{"M", num_rows}, {"S", num_slots}, {"H", hidden_size}});
  without_gil([&] { run_experts(args, from, {ids, weights, num_rows, num_slots}, owned, num_owned); });
}

}  // namespace

void register_experts(py::module_& module) {
  module.def("experts", &experts, py::arg("x"), py::arg("slot_ids"), py::arg("slot_weights"), py::arg("gate"),
             py::arg("up"), py::arg("down"), py::arg("local_index"), py::arg("dtype"), py::arg("out"));
}

}  // namespace leafsum
