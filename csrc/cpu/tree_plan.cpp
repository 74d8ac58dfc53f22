#include "tree_plan.hpp"

#include <algorithm>

namespace leafsum {

TreeShape::TreeShape(int64_t num_ids, int64_t ids_per_leaf)
    : num_ids(num_ids),
      ids_per_leaf(ids_per_leaf),
      num_leaves((num_ids + ids_per_leaf - 1) / ids_per_leaf),
      num_padded(1) {
  while (num_padded < num_leaves) num_padded *= 2;
}

int64_t TreeShape::leaf_of(int64_t id) const { return std::min(id / ids_per_leaf, num_leaves - 1); }

GivenNodes::GivenNodes(const TreeShape& shape, const int32_t* nodes, int64_t count)
    : index(2 * shape.num_padded, -1), is_underneath(2 * shape.num_padded, false) {
  for (int64_t g = 0; g < count; ++g) {
    index[nodes[g]] = static_cast<int32_t>(g);
    for (int64_t above = nodes[g] / 2; above >= 1; above /= 2) is_underneath[above] = true;
  }
}

namespace {

class Planner {
 public:
  Planner(const GivenNodes& given, const std::vector<int32_t>& leaves, RowPlan& plan)
      : given_(given), leaves_(leaves), plan_(plan) {}

  // Pushes the value of `node`, the parent of leaves first .. first+width-1, unless it is empty.
  bool push(int64_t node, int64_t first, int64_t width) {
    if (given_.index[node] >= 0) {
      plan_.steps.push_back({TreeOp::given, given_.index[node], 1});
      return true;
    }
    const auto begin = std::lower_bound(leaves_.begin(), leaves_.end(), first);
    const auto end = std::lower_bound(begin, leaves_.end(), first + width);
    if (begin == end && !given_.is_underneath[node]) return false;
    if (width == 1) {
      plan_.steps.push_back(
          {TreeOp::leaf, static_cast<int32_t>(begin - leaves_.begin()), static_cast<int32_t>(end - begin)});
      return true;
    }
    const bool left = push(2 * node, first, width / 2);
    const bool right = push(2 * node + 1, first + width / 2, width / 2);
    if (left && right) plan_.steps.push_back({TreeOp::add, 0, 0});
    return left || right;
  }

 private:
  const GivenNodes& given_;
  const std::vector<int32_t>& leaves_;
  RowPlan& plan_;
};

}  // namespace

void plan_node(const TreeShape& shape, const GivenNodes& given, const std::vector<int32_t>& leaves, int64_t node,
               RowPlan& plan) {
  int64_t first = node, width = 1;
  for (; first < shape.num_padded; first *= 2) width *= 2;
  Planner(given, leaves, plan).push(node, first - shape.num_padded, width);
}

}  // namespace leafsum
