#include <pybind11/stl.h>

#include <algorithm>
#include <cmath>
#include <numeric>
#include <optional>

#include "areas.hpp"
#include "arrays.hpp"
#include "machine.hpp"
#include "rows_copy.hpp"
#include "threads.hpp"

namespace leafsum {
namespace {

void store_kv(const py::array& k, const py::array& v, py::array key_pages, py::array value_pages,
              const py::array& row_pages, const py::array& row_offsets, const std::string& dtype_name) {
  StoreArgs args{};
  args.dtype = parse_dtype(dtype_name);
  args.k = read<float>("k", k, {{"M"}, {"G"}, {"D"}});
  const int64_t num_rows = k.shape(0);
  args.num_kv_heads = k.shape(1);
  args.head_dim = k.shape(2);
  args.v = read<float>("v", v, {{"M", num_rows}, {"G", args.num_kv_heads}, {"D", args.head_dim}});
  const Axis pages{"P"}, heads{"G", args.num_kv_heads}, dim{"D", args.head_dim};
  args.key_pages = write_storage("key_pages", key_pages, args.dtype, {pages, heads, dim, {"page_size"}});
  const int64_t num_pages = key_pages.shape(0);
  args.page_size = key_pages.shape(3);
  args.value_pages = write_storage("value_pages", value_pages, args.dtype,
                                   {{"P", num_pages}, heads, {"page_size", args.page_size}, dim});
  args.row_pages = read<int32_t>("row_pages", row_pages, {{"M", num_rows}});
  args.row_offsets = read<int32_t>("row_offsets", row_offsets, {{"M", num_rows}});
  check_range("row_pages", args.row_pages, num_rows, 0, num_pages - 1);
  check_range("row_offsets", args.row_offsets, num_rows, 0, args.page_size - 1);
  without_gil([&] {
    const Kernels& set = kernels();
    parallel_rows(num_rows, 2.0 * args.num_kv_heads * args.head_dim, [&](int64_t row) { set.store_kv(args, row); });
  });
}

// The keys that rows list, where they do: counts[row] > 0 of selected[row].
struct KeyLists {
  const int32_t* selected = nullptr;
  const int32_t* counts = nullptr;
  int64_t width = 0;
  int32_t count(int64_t row) const { return counts ? counts[row] : 0; }
  const int32_t* list(int64_t row) const { return count(row) > 0 ? selected + row * width : nullptr; }
};

// Rows of one slot that follow each other, times the heads of one KV head, cut into tiles. A row with a list has tiles
// of its own.
class TileMaker {
 public:
  TileMaker(const int32_t* row_slots, const int32_t* row_num_keys, const KeyLists& lists, const int32_t* kv_index,
            int64_t num_heads)
      : row_slots_(row_slots), row_num_keys_(row_num_keys), lists_(lists), kv_index_(kv_index), heads_(num_heads) {
    std::iota(heads_.begin(), heads_.end(), 0);
    std::stable_sort(heads_.begin(), heads_.end(), [&](int32_t a, int32_t b) { return kv_index[a] < kv_index[b]; });
  }

  std::vector<AttentionTile> tiles(int64_t num_rows) {
    for (int64_t row = 0, next; row < num_rows; row = next) {
      next = row + 1;
      if (!lists_.list(row)) {
        while (next < num_rows && row_slots_[next] == row_slots_[row] && !lists_.list(next)) ++next;
      }
      add_rows(static_cast<int32_t>(row), static_cast<int32_t>(next));
    }
    return std::move(tiles_);
  }

 private:
  void add_rows(int32_t begin, int32_t end) {
    for (size_t first = 0, next; first < heads_.size(); first = next) {
      const int32_t kv_head = kv_index_[heads_[first]];
      for (next = first; next < heads_.size() && kv_index_[heads_[next]] == kv_head;) ++next;
      tiles_.push_back({row_slots_[begin], kv_head, 0, lists_.count(begin), lists_.list(begin), {}, {}});
      for (int32_t row = begin; row < end; ++row) {
        for (size_t head = first; head < next; ++head) add_query(row, heads_[head]);
      }
    }
  }

  void add_query(int32_t row, int32_t head) {
    if (tiles_.back().num_queries == QUERIES_PER_TILE) {
      const AttentionTile& full = tiles_.back();
      tiles_.push_back({full.slot, full.kv_head, 0, lists_.count(row), full.list, {}, {}});
    }
    AttentionTile& tile = tiles_.back();
    tile.rows[tile.num_queries] = row;
    tile.heads[tile.num_queries++] = head;
    if (!tile.list) tile.max_keys = std::max(tile.max_keys, row_num_keys_[row]);
  }

  const int32_t* row_slots_;
  const int32_t* row_num_keys_;
  KeyLists lists_;
  const int32_t* kv_index_;
  std::vector<int32_t> heads_;
  std::vector<AttentionTile> tiles_;
};

// Every page that some row will read must exist.
void check_pages(const AttentionArgs& args, const int32_t* row_slots, int64_t num_rows, int64_t num_pages) {
  for (int64_t row = 0; row < num_rows; ++row) {
    const int64_t used = (args.row_num_keys[row] + args.page_size - 1) / args.page_size;
    check_range("page_table", args.page_table + row_slots[row] * args.max_pages, used, 0, num_pages - 1);
  }
}

void run_attention(AttentionArgs args, const float* q, const std::vector<AttentionTile>& tiles, int64_t num_rows) {
  const Kernels& set = kernels();
  const int64_t row_size = args.num_heads * args.head_dim;
  std::vector<float> rounded(num_rows * row_size);
  parallel_pieces(num_rows * row_size, 65536, 0.3, [&](int64_t begin, int64_t end) {
    set.round_to(args.dtype, q + begin, rounded.data() + begin, end - begin);
  });
  args.q = rounded.data();
  const int64_t scratch_size = attention_scratch(args.head_dim);
  double all_ns = 0;
  for (const AttentionTile& tile : tiles) all_ns += tile.max_keys * tile.num_queries * (0.08 * args.head_dim + 4);
  parallel_for(static_cast<int64_t>(tiles.size()), all_ns / tiles.size(),
               [&](int64_t tile) { set.attention(args, tiles[tile], thread_scratch(scratch_size)); });
}

// What a row lists must be keys that it could see.
KeyLists read_lists(const AttentionArgs& args, const std::optional<py::array>& selected,
                    const std::optional<py::array>& counts, int64_t num_rows) {
  if (selected.has_value() != counts.has_value()) fail("expected selected and counts together, or neither");
  if (!selected) return {};
  KeyLists lists;
  lists.selected = read<int32_t>("selected", *selected, {{"M", num_rows}, {"W"}});
  lists.counts = read<int32_t>("counts", *counts, {{"M", num_rows}});
  lists.width = selected->shape(1);
  check_range("counts", lists.counts, num_rows, NO_CHOICE, lists.width);
  for (int64_t row = 0; row < num_rows; ++row) {
    const int64_t count = std::max(lists.counts[row], 0);
    check_range("selected", lists.selected + row * lists.width, count, 0, args.row_num_keys[row] - 1);
  }
  return lists;
}

py::array attention(const py::array& q, const py::array& key_pages, const py::array& value_pages,
                    const py::array& page_table, const py::array& row_slots, const py::array& row_num_keys,
                    const py::array& kv_index, double scale, const std::string& dtype_name,
                    const std::optional<py::array>& selected, const std::optional<py::array>& counts) {
  AttentionArgs args{};
  args.dtype = parse_dtype(dtype_name);
  const float* from = read<float>("q", q, {{"M"}, {"Hq"}, {"D"}});
  const int64_t num_rows = q.shape(0);
  args.num_heads = q.shape(1);
  args.head_dim = q.shape(2);
  const Axis dim{"D", args.head_dim};
  args.key_pages = read_storage("key_pages", key_pages, args.dtype, {{"P"}, {"G"}, dim, {"page_size"}});
  const Axis pages{"P", key_pages.shape(0)}, heads{"G", key_pages.shape(1)}, page{"page_size", key_pages.shape(3)};
  args.value_pages = read_storage("value_pages", value_pages, args.dtype, {pages, heads, page, dim});
  args.num_kv_heads = heads.size;
  args.page_size = page.size;
  if (args.page_size < 1) fail_value("key_pages", "a page of at least one position", "page_size = 0");
  args.page_table = read<int32_t>("page_table", page_table, {{"slots"}, {"max_pages"}});
  args.max_pages = page_table.shape(1);
  const int32_t* slots = read<int32_t>("row_slots", row_slots, {{"M", num_rows}});
  check_range("row_slots", slots, num_rows, 0, page_table.shape(0) - 1);
  args.row_num_keys = read<int32_t>("row_num_keys", row_num_keys, {{"M", num_rows}});
  check_range("row_num_keys", args.row_num_keys, num_rows, 0, args.max_pages * args.page_size);
  const int32_t* kv = read<int32_t>("kv_index", kv_index, {{"Hq", args.num_heads}});
  check_range("kv_index", kv, args.num_heads, 0, args.num_kv_heads - 1);
  check_pages(args, slots, num_rows, pages.size);
  const KeyLists lists = read_lists(args, selected, counts, num_rows);
  args.scale = static_cast<float>(scale);
  py::array_t<float> out = new_array<float>(shape_of(q));
  args.out = out.mutable_data();
  without_gil([&] {
    run_attention(args, from, TileMaker(slots, args.row_num_keys, lists, kv, args.num_heads).tiles(num_rows), num_rows);
    const int64_t row_size = args.num_heads * args.head_dim;
    for (int64_t row = 0; row < num_rows; ++row) {
      if (lists.count(row) == NO_CHOICE) std::fill_n(args.out + row * row_size, row_size, std::nanf(""));
    }
  });
  return out;
}

}  // namespace

void register_attention(py::module_& module) {
  module.def("store_kv", &store_kv, py::arg("k"), py::arg("v"), py::arg("key_pages"), py::arg("value_pages"),
             py::arg("row_pages"), py::arg("row_offsets"), py::arg("dtype"));
  module.def("attention", &attention, py::arg("q"), py::arg("key_pages"), py::arg("value_pages"), py::arg("page_table"),
             py::arg("row_slots"), py::arg("row_num_keys"), py::arg("kv_index"), py::arg("scale"), py::arg("dtype"),
             py::arg("selected") = py::none(), py::arg("counts") = py::none());
}

}  // namespace leafsum
