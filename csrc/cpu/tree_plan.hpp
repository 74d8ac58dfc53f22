// The postfix program of one row and one wanted node: children before parents, left before right.
#pragma once

#include <cstdint>
#include <vector>

#include "kernels.hpp"

namespace leafsum {

// The shape of a tree in heap numbering: root 1, leaf l is node num_padded + l.
struct TreeShape {
  int64_t num_ids, ids_per_leaf, num_leaves, num_padded;

  TreeShape(int64_t num_ids, int64_t ids_per_leaf);
  int64_t leaf_of(int64_t id) const;  // The shared id num_ids lies in the last leaf.
};

// Given nodes by position in the tree.
struct GivenNodes {
  std::vector<int32_t> index;       // [2 * num_padded]: index of the given row, or -1.
  std::vector<bool> is_underneath;  // [2 * num_padded]: a given node lies below this one.

  GivenNodes(const TreeShape& shape, const int32_t* nodes, int64_t count);
};

struct RowPlan {
  std::vector<TreeStep> steps;
};

// leaves: the leaf of every present slot of the row, ascending; present slot i is entry i of the row's slot order.
void plan_node(const TreeShape& shape, const GivenNodes& given, const std::vector<int32_t>& leaves, int64_t node,
               RowPlan& plan);

}  // namespace leafsum
