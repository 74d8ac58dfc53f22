"""Type stubs of leafsum._C, the CPU kernels (csrc/cpu), in the orders of docs/numerics.md.

Arrays are C-contiguous numpy arrays of exactly the dtype named; nothing is converted in silence. A wrong dtype, shape
or layout raises ValueError and names the argument. M = rows, K = reduced axis, N = columns, H = hidden, D = head width.
`dtype` is the compute dtype: "float32", "bfloat16" or "float16". 16-bit storage is uint16 bits.
Every kernel gives the same bits for any number of threads and any instruction set.
"""

import numpy as np
from numpy.typing import NDArray

F32 = NDArray[np.float32]
I32 = NDArray[np.int32]
I64 = NDArray[np.int64]
U16 = NDArray[np.uint16]
U64 = NDArray[np.uint64]
Bool = NDArray[np.bool_]
Storage = F32 | U16

COLUMNS_PER_BLOCK: int
"""Columns in one block of a packed weight (16)."""

# Machine: threads, instruction sets, float environment.
def set_num_threads(num_threads: int) -> None: ...
def num_threads() -> int: ...
def set_min_work(min_work_s: float) -> None:
    """Seconds of work, as estimated, that a call must have for every thread it uses; 75 us at first. 0: any."""

def min_work() -> float: ...
def kernel_cpu_ns() -> int:
    """CPU time in nanoseconds that kernels have used since the process began, on all its threads; no wait is in it.

    Jobs that are expected to take less than 50 us are timed by the wall clock, and count 0.5 ms at most.
    """

def instruction_sets() -> list[str]:
    """Names this machine can run, best first; always ends with "plain"."""

def set_instruction_set(name: str) -> None: ...
def instruction_set() -> str: ...
def subnormals_kept() -> bool:
    """True when neither flush-to-zero nor denormals-are-zero is on in the calling thread and in every kernel thread."""

def set_poison(is_on: bool) -> None:
    """Whether results and scratch of every kernel come filled with NaN bytes before it writes them."""

def poison() -> bool: ...

# Functions of one FP32 argument, correctly rounded; any shape. Every NaN result is 0x7FC00000.
def exp(x: F32) -> F32: ...
def log(x: F32) -> F32: ...
def sin(x: F32) -> F32: ...
def cos(x: F32) -> F32: ...
def sigmoid(x: F32) -> F32: ...
def softplus(x: F32) -> F32: ...

# Rounding to the compute dtype (nearest even, subnormals kept).
def round_to(x: F32, dtype: str) -> F32:
    """FP32 values that hold x rounded to dtype. 16-bit dtypes make any NaN the quiet one without sign and payload."""

def narrow(x: F32, dtype: str) -> Storage:
    """x rounded to dtype, as storage: float32, or uint16 bits."""

def widen(x: Storage, dtype: str) -> F32:
    """The FP32 values of storage of dtype; exact."""

# Linears.
def pack_weight(weight: Storage, dtype: str) -> Storage:
    """[N, K] storage of dtype -> [ceil(N/16), K, 16], columns past N are zero: the K order of the kernels."""

def linear(x: F32, packed: Storage, dtype: str, num_columns: int, leaf_k: int, bias: F32 | None) -> F32:
    """x [M, K], rounded to dtype, times a packed weight -> [M, num_columns].

    leaf_k = 0: wide (k ascending by fma from +0.0 over the whole of K). leaf_k > 0: narrow (leaves of leaf_k elements
    of K, the last one may be short; the first taken as it is, the others added ascending). bias [num_columns] is added
    once, last. num_columns may be 0 (a rank without heads).
    """

def linear_leaves(x: F32, packed: Storage, dtype: str, num_columns: int, leaf_k: int) -> F32:
    """Row-split: raw leaves, unsummed: x [M, L * leaf_k] -> [M, L, num_columns]; each k ascending by fma from +0.0."""

def swiglu(gate: F32, up: F32) -> F32:
    """fl32(silu(gate) * up), silu(g) = fl32(g * sigmoid(g)); same shapes."""

def sigmoid_times(x: F32, gate: F32) -> F32:
    """fl32(x * sigmoid(gate)); same shapes."""

def experts(
    x: F32,
    slot_ids: I32,
    slot_weights: F32,
    gate: Storage,
    up: Storage,
    down: Storage,
    local_index: I32,
    dtype: str,
    out: F32,
) -> None:
    """Slot values of the experts this rank owns: out[m, s] = fl32(w * y) for owned slot_ids[m, s].

    Other rows of out stay untouched; a negative slot id is no slot.

    x [M, H]; slot_ids, slot_weights [M, S]; gate, up [n, ceil(I/16), H, 16] packed; down [n, ceil(H/16), I, 16] packed;
    local_index [E]: the index 0..n-1 of an owned id, -1 elsewhere; out [M, S, H]. I is down's K.
    """

# Rows.
def rms_norm(x: F32, weight: F32, eps: float, one_plus_weight: bool) -> F32:
    """x [..., N], weight [N]; eps is rounded to FP32.

    weight [groups, N]: vector i of x, flattened to [-1, N], takes weight[i % groups].
    """

def gated_norm(x: F32, gate: F32, weight: F32, eps: float, activation: str) -> F32:
    """x, gate [..., N], weight [N]: the RMSNorm of x, each element times activation ("silu" or "sigmoid") of gate."""

def rotary(x: F32, positions: I32, frequencies: F32, attention_factor: float) -> F32:
    """x [M, heads, D], positions [M], frequencies [R/2], R <= D: the first R of D are rotated, x_i with x_(i+R/2)."""

def router(logits: F32, top_k: int, renormalise: bool) -> tuple[I32, F32]:
    """logits [M, E] -> (ids [M, top_k], ascending and distinct even for a row of NaN, their weights [M, top_k])."""

def argmax(logits: F32) -> tuple[F32, I32]:
    """[M, V] -> (value [M], id [M]); ties to the lower id; a NaN loses to every number; a row of NaN gives id 0."""

def nonfinite_rows(x: F32) -> Bool:
    """[M, N] -> [M]: True where a row holds an infinity or a NaN."""

def residual_hash(x: F32, positions: I32) -> U64:
    """[M, H] -> [M]: h(row) = sum over i of splitmix64_finalizer(bits_i + 2^32 * i + (position + 1) * G), mod 2^64.

    G = 0x9E3779B97F4A7C15; bits_i are the FP32 bits of element i, of every NaN 0x7FC00000.
    """

# Attention over paged KV; a page holds page_size positions of every KV head of this rank.
def store_kv(
    k: F32, v: F32, key_pages: Storage, value_pages: Storage, row_pages: I32, row_offsets: I32, dtype: str
) -> None:
    """k, v [M, G, D] rounded to dtype into key_pages [P, G, D, page_size] and value_pages [P, G, page_size, D]."""

def attention(
    q: F32,
    key_pages: Storage,
    value_pages: Storage,
    page_table: I32,
    row_slots: I32,
    row_num_keys: I32,
    kv_index: I32,
    scale: float,
    dtype: str,
    selected: I32 | None = None,
    counts: I32 | None = None,
) -> F32:
    """Row m, head h sees positions 0..row_num_keys[m]-1 of slot row_slots[m], through KV head kv_index[h].

    q [M, Hq, D]; page_table [slots, max_pages]; row_slots, row_num_keys [M]; kv_index [Hq]; -> [M, Hq, D].
    selected [M, W], counts [M]: a row whose count is above zero sees the positions selected[m, :counts[m]] alone; one
    whose count is -1 becomes NaN.
    Segments of 256 keys, blocks of 64, by index: see docs/numerics.md.
    """

# Indexer of sparse attention. Block j of a slot, block_size positions, has its key in page page_table[slot, j // B] at
# j % B, B = blocks_per_page. Runs as below.
def store_index_keys(
    raw: F32,
    ring: F32,
    weight: F32,
    eps: float,
    one_plus_weight: bool,
    frequencies: F32,
    attention_factor: float,
    block_size: int,
    key_pages: Storage,
    page_table: I32,
    row_order: I32,
    run_slots: I32,
    run_starts: I32,
    run_ends: I32,
    dtype: str,
) -> None:
    """Pools the keys of every block that a row completes into key_pages [P, D, B].

    raw [M, D]; ring [slots, ring_rows, D] holds and takes raw keys; weight [D]; frequencies [R/2].
    """

def select_keys(
    q: F32,
    key_pages: Storage,
    page_table: I32,
    row_slots: I32,
    positions: I32,
    block_size: int,
    budget: int,
    scale: float,
    dtype: str,
) -> tuple[I32, I32]:
    """q [M, heads, D], normed and rotated -> (selected [M, budget + block_size - 1], counts [M]).

    counts 0: the row sees every key. Else selected[m, :counts[m]] are the positions of its best blocks and of the
    unfinished one, ascending. counts -1: a score is NaN, and nothing can be chosen.
    """

# Layers with a state. row_order [M] has the rows of one slot after another, positions ascending; run r is
# row_order[run_ends[r - 1]:run_ends[r]], of slot run_slots[r], from position run_starts[r] on. Rings hold the last rows
# by position (p % rows). What lies before position 0 is never read.
def causal_conv(
    x: F32,
    weight: F32,
    dilation: int,
    ring: F32,
    row_order: I32,
    run_slots: I32,
    run_starts: I32,
    run_ends: I32,
) -> F32:
    """x [M, C], weight [taps, C], oldest tap first; ring [slots, ring_rows, C] holds and takes inputs -> [M, C], silu
    included. ring_rows > (taps - 1) * dilation."""

def deltanet(
    qkv: F32,
    b: F32,
    a: F32,
    a_log: F32,
    dt_bias: F32,
    key_index: I32,
    states: F32,
    keys: Storage,
    updates: F32,
    decays: F32,
    row_order: I32,
    run_slots: I32,
    run_starts: I32,
    run_ends: I32,
    scale: float,
    dtype: str,
) -> F32:
    """Gated DeltaNet in border form, before its output norm -> [M, Hv, Dv].

    qkv [M, 2 * Hk * Dk + Hv * Dv] after the convolution; b, a [M, Hv]; a_log, dt_bias [Hv]; key_index [Hv]: the key
    head of a value head. Memory of a slot, all updated: states [slots, 2, Hv, Dk, Dv], the border at 64 j in place
    j % 2; keys [slots, 2, Hk, Dk, 64]; updates [slots, 128, Hv, Dv]; decays [slots, 128, Hv].
    """

# Hyper-connections and n-gram embedding; S streams of H elements side by side.
def hyper_gates(z: F32, num_streams: int, low_rank: int) -> tuple[F32, F32]:
    """z [M, low_rank + n] -> (silu(z / S) [M, low_rank], 2 * sigmoid(z / S) [M, n])."""

def hyper_mix(y: F32, normed: F32, num_streams: int) -> F32:
    """y, normed [M, S * H] -> [M, H]: the mean over streams of sigmoid(y) * normed."""

def hyper_write(streams: F32, y: F32, weights: F32) -> F32:
    """streams [M, S * H], y [M, H], weights [M, S] -> [M, S * H]: each stream plus y times its weight."""

def ngram_values(key_normed: F32, query_normed: F32, value: F32, scale: float) -> F32:
    """key_normed, query_normed [M, S * H], value [M, H] -> [M, S * H]: the value times each stream's gate."""

# The canonical tree: heap numbering, root 1, children of i are 2i and 2i+1, leaf l of P padded leaves is node P + l.
def tree_nodes(
    slot_rows: F32,
    slot_ids: I32,
    num_ids: int,
    ids_per_leaf: int,
    has_shared: bool,
    given_nodes: I32,
    given_rows: F32,
    wanted_nodes: I32,
) -> F32:
    """Values of wanted_nodes [W] -> [M, W, H].

    slot_rows [M, S, H]; slot_ids [M, S], strictly ascending in a row, -1 = no row there (it is never read); with
    has_shared, id num_ids is the shared one and joins the last leaf, last. given_nodes [G] (values in given_rows
    [M, G, H]) are taken as they are instead of being computed; slots under a given node are not read. Empty leaves are
    +0.0 and skipped.
    """

# A barrier of processes in memory that they share: int32 words [1 + ranks, 16], zero at first (bind_meeting.cpp).
MEETING_WAITING: int
MEETING_MET: int
MEETING_BROKEN_OFF: int

def meeting_arrive(words: I32, rank: int) -> None:
    """Count `rank` in at this generation; the last to come ends it and wakes all others."""

def meeting_wait(words: I32, generation: int, until_s: float) -> int:
    """Sleep until generation (mod 2^31) has ended (MEETING_MET) or the meeting was broken off (MEETING_BROKEN_OFF).

    MEETING_WAITING: `until_s` of CLOCK_MONOTONIC has come, or a signal.
    """

def meeting_pass(words: I32, rank: int, generation: int, until_s: float) -> int:
    """meeting_arrive, then meeting_wait."""

def meeting_break_off(words: I32) -> None:
    """Wake all that wait, now and from now on, for a generation that has not ended."""

def copy_pieces(source: int, source_stride: int, target: int, target_stride: int, size: int, num_pieces: int) -> None:
    """num_pieces times `size` bytes between addresses, which the caller keeps valid; they must not overlap."""
