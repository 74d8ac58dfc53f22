#include <algorithm>

#include "areas.hpp"
#include "arrays.hpp"
#include "machine.hpp"
#include "threads.hpp"
#include "tree_plan.hpp"

namespace leafsum {
namespace {

constexpr int64_t MAX_IDS = 1 << 24;

// Present slots of one row and their leaves.
struct RowSlots {
  std::vector<int32_t> order, leaves;

  void find(const TreeShape& shape, const int32_t* ids, int64_t num_slots) {
    order.clear();
    leaves.clear();
    for (int32_t slot = 0; slot < num_slots; ++slot) {
      if (ids[slot] < 0) continue;
      order.push_back(slot);
      leaves.push_back(static_cast<int32_t>(shape.leaf_of(ids[slot])));
    }
  }
};

void check_ascending(const int32_t* ids, int64_t num_rows, int64_t num_slots) {
  for (int64_t row = 0; row < num_rows; ++row) {
    int32_t last = -1;
    for (int64_t slot = 0; slot < num_slots; ++slot) {
      const int32_t id = ids[row * num_slots + slot];
      if (id < 0) continue;
      if (id <= last) {
        fail_value("slot_ids", "ids ascending in a row",
                   std::to_string(id) + " after " + std::to_string(last) + " in row " + std::to_string(row));
      }
      last = id;
    }
  }
}

struct TreeCall {
  TreeShape shape;
  GivenNodes given;
  const float* slot_rows;
  const int32_t* slot_ids;
  const float* given_rows;
  const int32_t* wanted;
  int64_t num_rows, num_slots, num_given, num_wanted, size;
  float* out;
};

// All wanted nodes of one row over a range of columns.
void run_row(const Kernels& set, const TreeCall& call, int64_t row, int64_t column_begin, int64_t column_end) {
  thread_local RowSlots slots;
  thread_local RowPlan plan;
  slots.find(call.shape, call.slot_ids + row * call.num_slots, call.num_slots);
  TreeArgs args{};
  args.slot_rows = call.slot_rows + row * call.num_slots * call.size;
  args.given_rows = call.given_rows + row * call.num_given * call.size;
  args.slot_order = slots.order.data();
  args.size = call.size;
  for (int64_t w = 0; w < call.num_wanted; ++w) {
    plan.steps.clear();
    plan_node(call.shape, call.given, slots.leaves, call.wanted[w], plan);
    args.steps = plan.steps.data();
    args.num_steps = static_cast<int64_t>(plan.steps.size());
    args.out = call.out + (row * call.num_wanted + w) * call.size;
    for (int64_t begin = column_begin; begin < column_end; begin += TREE_COLUMNS_PER_STACK) {
      set.tree(args, begin, std::min(column_end, begin + TREE_COLUMNS_PER_STACK));
    }
  }
}

void run_tree(const TreeCall& call) {
  constexpr int64_t COLUMNS_PER_PIECE = 4 * TREE_COLUMNS_PER_STACK;
  const Kernels& set = kernels();
  const int64_t pieces = (call.size + COLUMNS_PER_PIECE - 1) / COLUMNS_PER_PIECE;
  const double slots_ns = 0.2 * std::min(call.size, COLUMNS_PER_PIECE) * (call.num_slots + call.num_given);
  parallel_for(call.num_rows * pieces, 500 + slots_ns, [&](int64_t task) {
    const int64_t begin = task % pieces * COLUMNS_PER_PIECE;
    run_row(set, call, task / pieces, begin, std::min(call.size, begin + COLUMNS_PER_PIECE));
  });
}

py::array tree_nodes(const py::array& slot_rows, const py::array& slot_ids, int64_t num_ids, int64_t ids_per_leaf,
                     bool has_shared, const py::array& given_nodes, const py::array& given_rows,
                     const py::array& wanted_nodes) {
  if (num_ids < 1 || num_ids > MAX_IDS) {
    fail_value("num_ids", "1 to " + std::to_string(MAX_IDS), std::to_string(num_ids));
  }
  if (ids_per_leaf < 1) fail_value("ids_per_leaf", "at least 1", std::to_string(ids_per_leaf));
  const TreeShape shape(num_ids, std::min(ids_per_leaf, num_ids));
  const float* rows = read<float>("slot_rows", slot_rows, {{"M"}, {"S"}, {"H"}});
  const int64_t num_rows = slot_rows.shape(0), num_slots = slot_rows.shape(1), size = slot_rows.shape(2);
  const int32_t* ids = read<int32_t>("slot_ids", slot_ids, {{"M", num_rows}, {"S", num_slots}});
  check_range("slot_ids", ids, slot_ids.size(), -1, has_shared ? num_ids : num_ids - 1);
  check_ascending(ids, num_rows, num_slots);
  const int32_t* given = read<int32_t>("given_nodes", given_nodes, {{"G"}});
  const int64_t num_given = given_nodes.shape(0);
  check_range("given_nodes", given, num_given, 1, 2 * shape.num_padded - 1);
  const float* values = read<float>("given_rows", given_rows, {{"M", num_rows}, {"G", num_given}, {"H", size}});
  const int32_t* wanted = read<int32_t>("wanted_nodes", wanted_nodes, {{"W"}});
  const int64_t num_wanted = wanted_nodes.shape(0);
  check_range("wanted_nodes", wanted, num_wanted, 1, 2 * shape.num_padded - 1);
  py::array_t<float> out = new_array<float>({num_rows, num_wanted, size});
  float* to = out.mutable_data();
  without_gil([&] {
    run_tree({shape, GivenNodes(shape, given, num_given), rows, ids, values, wanted, num_rows, num_slots, num_given,
              num_wanted, size, to});
  });
  return out;
}

}  // namespace

void register_tree(py::module_& module) {
  module.def("tree_nodes", &tree_nodes, py::arg("slot_rows"), py::arg("slot_ids"), py::arg("num_ids"),
             py::arg("ids_per_leaf"), py::arg("has_shared"), py::arg("given_nodes"), py::arg("given_rows"),
             py::arg("wanted_nodes"));
}

}  // namespace leafsum
