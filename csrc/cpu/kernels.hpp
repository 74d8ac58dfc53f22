// Arguments of every kernel, one struct each, and the table of kernels of one instruction set. Only plain data: the
// instruction-set files include this, and nothing they include may hold a function that the linker could share with a
// file compiled for a smaller machine.
#pragma once

#include <stdint.h>

namespace leafsum {

enum class DType { float32, bfloat16, float16 };
enum class Function { exp, log, sin, cos, sigmoid, softplus };

constexpr int64_t COLUMNS_PER_BLOCK = 16;
constexpr int64_t BLOCKS_PER_TASK = 8;  // Columns of a linear are handed out 128 at a time,
constexpr int64_t COLUMNS_PER_TASK = BLOCKS_PER_TASK * COLUMNS_PER_BLOCK;
constexpr int64_t ROWS_PER_TASK = 96;       // rows 96 at a time: a multiple of every kernel's tile of rows.
constexpr int64_t FLOATS_PER_PIECE = 8192;  // Widened weights that lie in the first-level cache.
constexpr int64_t NUM_LANES = 64;           // The lane rule: docs/numerics.md section 1.
constexpr int64_t KEYS_PER_BLOCK = 64;
constexpr int64_t KEYS_PER_SEGMENT = 256;
constexpr int QUERIES_PER_TILE = 48;
constexpr int64_t ROWS_PER_BORDER = 64;  // Of DeltaNet's state; its rings hold twice as many rows.
constexpr int32_t NO_CHOICE = -1;        // The count of a row that listed no keys, since a score of its blocks is NaN.
constexpr int64_t DELTANET_COLUMNS = 128;  // The most value columns of one task.

// Consecutive positions of one slot, from `start` on: rows[i] is the row of position start + i.
struct Run {
  const int32_t* rows;
  int64_t num_rows, slot, start;
};

// x holds values already rounded to dtype; k = packed rows; leaf_k = k for a wide linear.
struct LinearArgs {
  DType dtype;
  const float* x;
  int64_t x_stride;
  const void* packed;
  int64_t k;
  int64_t leaf_k;
  int64_t num_columns;
  const float* bias;  // May be null.
  float* out;         // [M, num_columns], or [M, num_leaves, num_columns] when keep_leaves.
  bool keep_leaves;
};

struct TileRange {
  int64_t row_begin, row_end, block_begin, block_end;
};

// One expert's pairs (row, slot) lie side by side in the pair arrays.
struct ExpertGroup {
  int64_t local_index, pair_begin, pair_end;
};

struct ExpertArgs {
  DType dtype;
  const float* x;  // Rounded rows.
  int64_t x_stride;
  int64_t hidden_size;
  int64_t inner_size;
  const void* gate;
  const void* up;
  const void* down;
  const ExpertGroup* groups;
  const int32_t* pair_rows;   // Row of x.
  const int64_t* pair_slots;  // Row of out, seen as [M * S, H].
  const float* pair_weights;
  float* inner;  // [pairs, inner_stride], rounded to dtype.
  int64_t inner_stride;
  float* out;
};

// Row i takes the weights of group i % num_groups.
struct NormArgs {
  const float* x;
  const float* weight;
  float eps;
  bool one_plus_weight;
  int64_t size, num_groups;
  float* out;
};

enum class Gate { silu, sigmoid };

struct GatedNormArgs {
  const float* x;
  const float* gate;
  const float* weight;
  float eps;
  Gate activation;
  int64_t size;
  float* out;
};

struct RotaryArgs {
  const float* x;
  const int32_t* positions;
  const float* frequencies;
  float attention_factor;
  int64_t num_heads, head_dim, num_frequencies;
  float* out;
};

struct RouterArgs {
  const float* logits;
  int64_t num_experts, top_k;
  bool renormalise;
  int32_t* ids;
  float* weights;
};

struct ArgmaxArgs {
  const float* logits;
  int64_t size;
  float* values;
  int32_t* ids;
};

struct NonfiniteArgs {
  const float* x;
  int64_t size;
  bool* out;
};

struct HashArgs {
  const float* x;
  const int32_t* positions;
  int64_t size;
  uint64_t* out;
};

struct StoreArgs {
  DType dtype;
  const float* k;
  const float* v;
  void* key_pages;
  void* value_pages;
  const int32_t* row_pages;
  const int32_t* row_offsets;
  int64_t num_kv_heads, head_dim, page_size;
};

struct AttentionArgs {
  DType dtype;
  const float* q;  // Rounded to dtype, unscaled.
  const void* key_pages;
  const void* value_pages;
  const int32_t* page_table;
  const int32_t* row_num_keys;
  int64_t max_pages, num_heads, num_kv_heads, head_dim, page_size;
  float scale;
  float* out;
};

// Queries of one slot and one KV head: their keys and values are widened once for all of them. With a list, all of them
// see its max_keys positions, else each as many keys as its row does.
struct AttentionTile {
  int32_t slot, kv_head, num_queries, max_keys;
  const int32_t* list;
  int32_t rows[QUERIES_PER_TILE];
  int32_t heads[QUERIES_PER_TILE];
};

struct ConvArgs {
  const float* x;       // [M, num_channels]
  const float* weight;  // [num_taps, num_channels]
  const float* zeros;   // [num_channels]
  const float* ring;    // [slots, ring_rows, num_channels]
  int64_t num_channels, num_taps, dilation, ring_rows;
  float* out;
};

// The rings and states are [slots, ...]; see bind_deltanet.cpp. q and k are [M, num_key_heads, key_dim], normed and
// rounded; beta, and sums of g from the border on, are [M, num_heads]; rates = -exp(A_log).
struct DeltaNetArgs {
  DType dtype;
  const float* qkv;
  int64_t row_size;
  const float* b;
  const float* a;
  const float* rates;
  const float* dt_bias;
  const int32_t* key_index;
  float* states;
  void* keys;
  float* updates;
  float* decays;
  int64_t num_key_heads, num_heads, key_dim, value_dim;
  float scale;
  float* q;
  float* k;
  float* beta;
  float* sums;
  float* out;
};

struct StreamGatesArgs {
  const float* z;  // [M, low_rank + num_inject]
  int64_t num_streams, low_rank, num_inject;
  float* inner;
  float* inject;
};

struct StreamMixArgs {
  const float* y;
  const float* normed;
  int64_t num_streams, size;
  float* out;
};

struct StreamWriteArgs {
  const float* streams;
  const float* y;
  const float* weights;
  int64_t num_streams, size;
  float* out;
};

struct NgramValuesArgs {
  const float* keys;     // Normed, [M, num_streams, size].
  const float* queries;  // Normed, like keys.
  const float* value;    // [M, size]
  float scale;
  int64_t num_streams, size;
  float* out;
};

struct IndexKeyArgs {
  DType dtype;
  const float* raw;
  const float* ring;
  const float* weight;
  float eps;
  bool one_plus_weight;
  const float* frequencies;
  float attention_factor;
  int64_t num_frequencies, size, block_size, ring_rows, blocks_per_page, max_pages;
  void* key_pages;
  const int32_t* page_table;
};

struct IndexScoreArgs {
  DType dtype;
  const float* queries;  // Rounded to dtype.
  const void* key_pages;
  const int32_t* page_table;
  const int32_t* row_slots;
  int64_t num_heads, size, blocks_per_page, max_pages;
  float scale;
};

// The sum of one row and one wanted node as a postfix program over a stack of rows.
enum class TreeOp : int32_t { leaf, given, add };
struct TreeStep {
  TreeOp op;
  int32_t first, count;  // leaf: indices into slot_order; given: index of the given row in first.
};

struct TreeArgs {
  const float* slot_rows;
  const float* given_rows;
  const int32_t* slot_order;  // Slot numbers of the row that are present, ascending id.
  const TreeStep* steps;
  int64_t num_steps;
  int64_t size;  // H
  float* out;
};

constexpr int64_t TREE_COLUMNS_PER_STACK = 256;
constexpr int64_t TREE_STACK_ROWS = 34;  // A tree has at most 2^31 leaves.

struct Kernels {
  const char* name;
  void (*apply)(Function function, const float* x, float* y, int64_t count);
  void (*round_to)(DType dtype, const float* x, float* y, int64_t count);
  void (*narrow)(DType dtype, const float* x, void* y, int64_t count);
  void (*widen)(DType dtype, const void* x, float* y, int64_t count);
  void (*swiglu)(const float* gate, const float* up, float* out, int64_t count);
  void (*linear)(const LinearArgs& args, const TileRange& range, float* scratch);
  void (*expert_inner)(const ExpertArgs& args, int64_t group, int64_t block_begin, int64_t block_end, float* scratch);
  void (*expert_down)(const ExpertArgs& args, int64_t group, int64_t block_begin, int64_t block_end, float* scratch);
  void (*rms_norm)(const NormArgs& args, int64_t row);
  void (*rotary)(const RotaryArgs& args, int64_t row, float* scratch);
  void (*router)(const RouterArgs& args, int64_t row, float* scratch);
  void (*argmax)(const ArgmaxArgs& args, int64_t row);
  void (*nonfinite)(const NonfiniteArgs& args, int64_t row);
  void (*residual_hash)(const HashArgs& args, int64_t row);
  void (*store_kv)(const StoreArgs& args, int64_t row);
  void (*attention)(const AttentionArgs& args, const AttentionTile& tile, float* scratch);
  void (*tree)(const TreeArgs& args, int64_t column_begin, int64_t column_end);
  void (*gated_norm)(const GatedNormArgs& args, int64_t row);
  void (*sigmoid_times)(const float* x, const float* gate, float* out, int64_t count);
  void (*conv)(const ConvArgs& args, const Run& run, int64_t index, int64_t begin, int64_t end);
  void (*deltanet_prepare)(const DeltaNetArgs& args, int64_t row);
  void (*deltanet_sums)(const DeltaNetArgs& args, const Run& run);
  void (*deltanet)(const DeltaNetArgs& args, const Run& run, int64_t head, int64_t column_begin, int64_t num_columns,
                   float* scratch);
  void (*deltanet_keep)(const DeltaNetArgs& args, const Run& run);
  void (*stream_gates)(const StreamGatesArgs& args, int64_t row);
  void (*stream_mix)(const StreamMixArgs& args, int64_t row);
  void (*stream_write)(const StreamWriteArgs& args, int64_t row);
  void (*ngram_values)(const NgramValuesArgs& args, int64_t row);
  void (*index_key)(const IndexKeyArgs& args, const Run& run, int64_t index, float* scratch);
  void (*index_score)(const IndexScoreArgs& args, int64_t row, int64_t num_blocks, float* scores, float* scratch);
};

static constexpr int64_t padded(int64_t size, int64_t multiple) { return (size + multiple - 1) / multiple * multiple; }

// Floats of scratch that one task of a linear or of experts needs: its sums, gate's and up's apart, and a piece.
constexpr int64_t LINEAR_SCRATCH = ROWS_PER_TASK * COLUMNS_PER_TASK + FLOATS_PER_PIECE;
constexpr int64_t EXPERTS_SCRATCH = LINEAR_SCRATCH + ROWS_PER_TASK * COLUMNS_PER_TASK;

// Floats of scratch that one attention task needs: see lay_out in attention.inc.
static constexpr int64_t attention_scratch(int64_t head_dim) {
  return KEYS_PER_BLOCK * ((head_dim > KEYS_PER_BLOCK ? head_dim : KEYS_PER_BLOCK) + head_dim + padded(head_dim, 16)) +
         QUERIES_PER_TILE * (KEYS_PER_BLOCK + NUM_LANES + 2 * padded(head_dim, 16));
}

// Floats of scratch of one DeltaNet task: see lay_out in deltanet.inc.
static constexpr int64_t deltanet_scratch(int64_t key_dim, int64_t num_columns) {
  return 2 * key_dim * (ROWS_PER_BORDER + padded(num_columns, 16)) + 2 * ROWS_PER_BORDER * ROWS_PER_BORDER +
         (3 * ROWS_PER_BORDER + 8) * padded(num_columns, 16);
}

extern const Kernels PLAIN_KERNELS;
#if defined(__x86_64__)
extern const Kernels AVX2_KERNELS;
extern const Kernels AVX512_KERNELS;
#endif

}  // namespace leafsum
