#include <string.h>

#include <algorithm>

#include "areas.hpp"
#include "arrays.hpp"
#include "machine.hpp"
#include "runs.hpp"
#include "threads.hpp"

namespace leafsum {
namespace {

void check_block_size(int64_t block_size) {
  if (block_size < 1) fail_value("block_size", "1 or more", std::to_string(block_size));
}

// The pages that hold blocks 0 .. num_blocks-1 of a slot must exist.
void check_block_pages(const int32_t* pages, int64_t num_blocks, int64_t blocks_per_page, int64_t max_pages,
                       int64_t num_pages) {
  const int64_t used = (num_blocks + blocks_per_page - 1) / blocks_per_page;
  if (used > max_pages) {
    fail_value("page_table", "pages for " + std::to_string(num_blocks) + " blocks", std::to_string(max_pages));
  }
  check_range("page_table", pages, used, 0, num_pages - 1);
}

void store_index_keys(const py::array& raw, py::array ring, const py::array& weight, double eps, bool one_plus_weight,
                      const py::array& frequencies, double attention_factor, int64_t block_size, py::array key_pages,
                      const py::array& page_table, const py::array& row_order, const py::array& run_slots,
                      const py::array& run_starts, const py::array& run_ends, const std::string& dtype) {
  check_block_size(block_size);
  IndexKeyArgs args{};
  args.dtype = parse_dtype(dtype);
  args.raw = read<float>("raw", raw, {{"M"}, {"D"}});
  args.size = raw.shape(1);
  float* kept = write<float>("ring", ring, {{"slots"}, {"ring_rows"}, {"D", args.size}});
  args.ring = kept;
  args.ring_rows = ring.shape(1);
  if (args.ring_rows < block_size) {
    fail_value("ring", "at least block_size = " + std::to_string(block_size) + " rows", std::to_string(args.ring_rows));
  }
  args.weight = read<float>("weight", weight, {{"D", args.size}});
  args.eps = static_cast<float>(eps);
  args.one_plus_weight = one_plus_weight;
  args.frequencies = read<float>("frequencies", frequencies, {{"R/2"}});
  args.num_frequencies = frequencies.shape(0);
  if (2 * args.num_frequencies > args.size) {
    fail_value("frequencies", "at most D/2 = " + std::to_string(args.size / 2), std::to_string(args.num_frequencies));
  }
  args.attention_factor = static_cast<float>(attention_factor);
  args.block_size = block_size;
  args.key_pages = write_storage("key_pages", key_pages, args.dtype, {{"P"}, {"D", args.size}, {"blocks_per_page"}});
  args.blocks_per_page = key_pages.shape(2);
  if (args.blocks_per_page < 1) fail_value("key_pages", "a page of at least one block", "blocks_per_page = 0");
  args.page_table = read<int32_t>("page_table", page_table, {{"slots", ring.shape(0)}, {"max_pages"}});
  args.max_pages = page_table.shape(1);
  const Runs runs(row_order, run_slots, run_starts, run_ends, raw.shape(0), ring.shape(0));
  for (const Run& run : runs.all()) {
    check_block_pages(args.page_table + run.slot * args.max_pages, (run.start + run.num_rows) / block_size,
                      args.blocks_per_page, args.max_pages, key_pages.shape(0));
  }
  without_gil([&] {
    const Kernels& set = kernels();
    parallel_rows(runs.num_rows(), 20.0 * args.size / block_size, [&](int64_t i) {
      const RunRow row = runs.row(i);
      if ((row.run.start + row.index + 1) % block_size != 0) return;
      set.index_key(args, row.run, row.index, thread_scratch(3 * args.size));
    });
    keep_in_ring(runs, args.raw, args.size, args.ring_rows, kept);
  });
}

// The `count` best of scores, all of them at least +0.0, as ascending places; of equal scores the lower place.
void take_best(const float* scores, int64_t num_scores, int64_t count, std::vector<uint64_t>& order) {
  order.resize(num_scores);
  for (int64_t i = 0; i < num_scores; ++i) {
    uint32_t bits;  // Scores at least zero order as their bits do.
    memcpy(&bits, scores + i, sizeof(bits));
    order[i] = static_cast<uint64_t>(~bits) << 32 | static_cast<uint64_t>(i);
  }
  std::nth_element(order.begin(), order.begin() + count - 1, order.end());
  order.resize(count);
  for (uint64_t& place : order) place &= 0xffffffffu;
  std::sort(order.begin(), order.end());
}

struct Selection {
  int64_t block_size, num_best, width;
  const int32_t* positions;
  int32_t* selected;
  int32_t* counts;
};

void select_row(const Kernels& set, const IndexScoreArgs& args, const Selection& to, int64_t row) {
  int32_t* selected = to.selected + row * to.width;
  std::fill(selected, selected + to.width, 0);
  const int64_t num_keys = to.positions[row] + 1, num_blocks = num_keys / to.block_size;
  to.counts[row] = 0;
  if (num_blocks <= to.num_best) return;
  thread_local std::vector<float> scores;
  thread_local std::vector<uint64_t> best;
  scores.resize(num_blocks);
  set.index_score(args, row, num_blocks, scores.data(), thread_scratch((args.size + args.num_heads) * KEYS_PER_BLOCK));
  if (std::any_of(scores.begin(), scores.end(), [](float score) { return score != score; })) {
    to.counts[row] = NO_CHOICE;
    return;
  }
  take_best(scores.data(), num_blocks, to.num_best, best);
  int32_t count = 0;
  for (const uint64_t block : best) {
    for (int64_t i = 0; i < to.block_size; ++i) selected[count++] = static_cast<int32_t>(block * to.block_size + i);
  }
  for (int64_t key = num_blocks * to.block_size; key < num_keys; ++key) selected[count++] = static_cast<int32_t>(key);
  to.counts[row] = count;
}

py::tuple select_keys(const py::array& q, const py::array& key_pages, const py::array& page_table,
                      const py::array& row_slots, const py::array& positions, int64_t block_size, int64_t budget,
                      double scale, const std::string& dtype) {
  check_block_size(block_size);
  if (budget < block_size || budget % block_size != 0) {
    fail_value("budget", "a multiple of block_size = " + std::to_string(block_size), std::to_string(budget));
  }
  IndexScoreArgs args{};
  args.dtype = parse_dtype(dtype);
  const float* queries = read<float>("q", q, {{"M"}, {"heads"}, {"D"}});
  const int64_t num_rows = q.shape(0);
  args.num_heads = q.shape(1);
  args.size = q.shape(2);
  if (args.num_heads < 1) fail_value("q", "at least one head", "heads = 0");
  args.key_pages = read_storage("key_pages", key_pages, args.dtype, {{"P"}, {"D", args.size}, {"blocks_per_page"}});
  args.blocks_per_page = key_pages.shape(2);
  if (args.blocks_per_page < 1) fail_value("key_pages", "a page of at least one block", "blocks_per_page = 0");
  args.page_table = read<int32_t>("page_table", page_table, {{"slots"}, {"max_pages"}});
  args.max_pages = page_table.shape(1);
  args.row_slots = read<int32_t>("row_slots", row_slots, {{"M", num_rows}});
  check_range("row_slots", args.row_slots, num_rows, 0, page_table.shape(0) - 1);
  Selection to{block_size, budget / block_size, budget + block_size - 1, nullptr, nullptr, nullptr};
  to.positions = read<int32_t>("positions", positions, {{"M", num_rows}});
  check_range("positions", to.positions, num_rows, 0, INT32_MAX - 1);
  for (int64_t row = 0; row < num_rows; ++row) {
    check_block_pages(args.page_table + args.row_slots[row] * args.max_pages, (to.positions[row] + 1) / block_size,
                      args.blocks_per_page, args.max_pages, key_pages.shape(0));
  }
  args.scale = static_cast<float>(scale);
  py::array_t<int32_t> selected = new_array<int32_t>({num_rows, to.width});
  py::array_t<int32_t> counts = new_array<int32_t>({num_rows});
  to.selected = selected.mutable_data();
  to.counts = counts.mutable_data();
  without_gil([&] {
    const Kernels& set = kernels();
    const int64_t row_size = args.num_heads * args.size;
    std::vector<float> rounded(num_rows * row_size);
    set.round_to(args.dtype, queries, rounded.data(), num_rows * row_size);
    args.queries = rounded.data();
    double all_ns = 0;
    for (int64_t row = 0; row < num_rows; ++row) all_ns += (0.1 * row_size + 10.0) * to.positions[row] / block_size;
    parallel_for(num_rows, num_rows > 0 ? all_ns / num_rows : 0, [&](int64_t row) { select_row(set, args, to, row); });
  });
  return py::make_tuple(selected, counts);
}

}  // namespace

void register_indexer(py::module_& module) {
  module.def("store_index_keys", &store_index_keys, py::arg("raw"), py::arg("ring"), py::arg("weight"), py::arg("eps"),
             py::arg("one_plus_weight"), py::arg("frequencies"), py::arg("attention_factor"), py::arg("block_size"),
             py::arg("key_pages"), py::arg("page_table"), py::arg("row_order"), py::arg("run_slots"),
             py::arg("run_starts"), py::arg("run_ends"), py::arg("dtype"));
  module.def("select_keys", &select_keys, py::arg("q"), py::arg("key_pages"), py::arg("page_table"),
             py::arg("row_slots"), py::arg("positions"), py::arg("block_size"), py::arg("budget"), py::arg("scale"),
             py::arg("dtype"));
}

}  // namespace leafsum
