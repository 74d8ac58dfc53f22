"""A whole forward of one sequence, wired of the parts of this folder; weights are named as transformers does."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from oracle.config import Config, DeltaNet, Hyper, Indexer, Ngram
from oracle.fl32 import add, f32
from oracle.ngram import table_rows
from oracle.parts import Lists, Parts
from oracle.rotary import frequencies

F32 = NDArray[np.float32]
I32 = NDArray[np.int32]
Weights = Mapping[str, F32]


@dataclass(frozen=True, slots=True)
class Forward:
    """residual [T, streams * H] before the final norm or mixer, logits [T, V]."""

    residual: F32
    logits: F32


class Model:
    """weights: FP32 values as the checkpoint holds them, experts one by one; parts: the arithmetic."""

    def __init__(self, config: Config, weights: Weights, parts: Parts) -> None:
        self._config, self._weights, self._parts = config, weights, parts

    def forward(self, token_ids: Sequence[int]) -> Forward:
        """Rows at positions 0.. of one sequence; row t sees rows 0..t."""
        residual = np.tile(self._weight("model.embed_tokens")[list(token_ids)], (1, self._config.num_streams))
        for layer in range(self._config.num_layers):
            name = f"model.layers.{layer}"
            ngram = self._config.ngram
            if ngram is not None and layer in ngram.layers:
                residual = self._with_ngrams(f"{name}.ple", ngram, ngram.layers.index(layer), residual, token_ids)
            first, second = self._first_block(name, layer), self._second_block(name, layer)
            residual = self._after_block(residual, f"{name}.attn_hyper_connection", f"{name}.input_layernorm", first)
            norm = f"{name}.post_attention_layernorm"
            residual = self._after_block(residual, f"{name}.mlp_hyper_connection", norm, second)
        head = "model.embed_tokens" if self._config.tie_word_embeddings else "lm_head"
        return Forward(residual, self._parts.wide(self._final_row(residual), self._weight(head)))

    def _weight(self, name: str) -> F32:
        return f32(self._weights[f"{name}.weight"])

    def _bias(self, name: str) -> F32 | None:
        return f32(self._weights[f"{name}.bias"]) if f"{name}.bias" in self._weights else None

    def _wide(self, name: str, x: F32) -> F32:
        return self._parts.wide(x, self._weight(name), self._bias(name))

    def _narrow(self, name: str, x: F32) -> F32:
        return self._parts.narrow(x, self._weight(name))

    def _norm(self, name: str, x: F32) -> F32:
        config = self._config
        return self._parts.rms_norm(x, self._weight(name), config.rms_norm_eps, config.offset_norms)

    def _grouped_norm(self, name: str, x: F32) -> F32:
        """x [T, streams * H]."""
        config, num_groups = self._config, self._config.num_streams
        weight, groups = self._weight(name).reshape(num_groups, -1), x.reshape(len(x), num_groups, -1)
        return self._parts.rms_norm(groups, weight, config.rms_norm_eps, config.offset_norms).reshape(x.shape)

    def _after_block(self, residual: F32, mixer: str, norm: str, block: Callable[[F32], F32]) -> F32:
        hyper = self._config.hyper
        if hyper is None:
            return add(residual, block(self._norm(norm, residual)))
        normed = self._grouped_norm(f"{mixer}.hc_norm", residual)
        output = block(self._mixed_row(mixer, hyper, normed))
        z = self._narrow(f"{mixer}.block_inject_weight", normed)
        return self._parts.written_streams(residual, output, self._parts.injection_weights(z, hyper.num_streams))

    def _mixed_row(self, mixer: str, hyper: Hyper, normed: F32) -> F32:
        low = self._parts.mixer_row(self._narrow(f"{mixer}.input_mix_weight_down", normed), hyper.num_streams)
        return self._parts.mixed_row(self._narrow(f"{mixer}.input_mix_weight_up", low), normed, hyper.num_streams)

    def _final_row(self, residual: F32) -> F32:
        hyper, mixer = self._config.hyper, "model.hyper_connection_mixer"
        if hyper is None:
            return self._norm("model.norm", residual)
        return self._mixed_row(mixer, hyper, self._grouped_norm(f"{mixer}.hc_norm", residual))

    def _with_ngrams(self, name: str, ngram: Ngram, layer_index: int, residual: F32, token_ids: Sequence[int]) -> F32:
        table = self._weight(f"{name}.ple_embedding.ngram_embedding")
        vocab_size = len(self._weights["model.embed_tokens.weight"])
        rows = table_rows(
            token_ids,
            ngram.ngram_size,
            ngram.heads_per_ngram,
            layer_index,
            ngram.seed,
            vocab_size,
            ngram.vocab_base,
            ngram.end_id,
        )
        embedding = table[rows].reshape(len(rows), ngram.embed_dim)
        keys = self._grouped_norm(f"{name}.norm_key", self._wide(f"{name}.key_proj", embedding))
        queries = self._grouped_norm(f"{name}.norm_query", residual)
        values = self._parts.stream_values(keys, queries, self._wide(f"{name}.value_proj", embedding))
        taps = self._weight(f"{name}.conv1d").reshape(-1, ngram.num_taps)
        local = self._parts.convolution(self._grouped_norm(f"{name}.norm_conv", values), taps, ngram.ngram_size)
        return add(residual, add(values, local))

    def _first_block(self, name: str, layer: int) -> Callable[[F32], F32]:
        deltanet = self._config.deltanet
        if deltanet is not None and layer in deltanet.layers:
            return lambda x: self._deltanet(f"{name}.linear_attn", deltanet, x)
        return lambda x: self._attention(f"{name}.self_attn", x)

    def _second_block(self, name: str, layer: int) -> Callable[[F32], F32]:
        if self._config.is_sparse(layer):
            return lambda x: self._experts(f"{name}.mlp", x)
        return lambda x: self._mlp(f"{name}.mlp", x)

    def _attention(self, name: str, x: F32) -> F32:
        config = self._config
        q, gate = self._wide(f"{name}.q_proj", x).reshape(len(x), config.num_heads, -1), None
        if config.query_gate:
            q, gate = (np.ascontiguousarray(part) for part in np.split(q, 2, axis=2))
        k, v = (self._wide(f"{name}.{part}_proj", x).reshape(len(x), config.num_kv_heads, -1) for part in "kv")
        q, k = self._norm(f"{name}.q_norm", q), self._norm(f"{name}.k_norm", k)
        lists = self._key_lists(f"{name}.indexer", config.indexer, x)
        outputs = self._parts.attention(self._rotary(q), self._rotary(k), v, lists)
        if gate is not None:
            outputs = self._parts.gated(outputs, gate)
        return self._output_projection(f"{name}.o_proj", outputs.reshape(len(x), -1), config.num_heads)

    def _frequency(self) -> F32:
        return frequencies(self._config.rope_theta, self._config.rotary_dim or self._config.head_dim)

    def _rotary(self, x: F32) -> F32:
        return self._parts.rotary(x, self._frequency())

    def _key_lists(self, name: str, indexer: Indexer | None, x: F32) -> Lists:
        if indexer is None:
            return [None] * len(x)
        heads = self._narrow(f"{name}.index_qk_proj", x).reshape(len(x), indexer.num_heads + 1, -1)
        queries, raw_keys = (np.ascontiguousarray(part) for part in (heads[:, :-1], heads[:, -1]))
        return self._parts.key_lists(
            self._rotary(self._norm(f"{name}.q_layernorm", queries)),
            raw_keys,
            self._weight(f"{name}.k_layernorm"),
            self._config.rms_norm_eps,
            self._frequency(),
            indexer.block_size,
            indexer.budget,
        )

    def _output_projection(self, name: str, x: F32, num_heads: int) -> F32:
        total, bias = self._parts.row_split(x, self._weight(name), num_heads), self._bias(name)
        return total if bias is None else add(total, bias)

    def _deltanet(self, name: str, deltanet: DeltaNet, x: F32) -> F32:
        qkv_weight, z_weight, b_weight, a_weight = self._deltanet_weights(name, deltanet)
        taps = self._weight(f"{name}.conv1d").reshape(-1, deltanet.num_taps)
        qkv = self._parts.convolution(self._parts.wide(x, qkv_weight), taps, 1)
        outputs = self._parts.deltanet(
            qkv,
            self._parts.narrow(x, b_weight),
            self._parts.narrow(x, a_weight),
            f32(self._weights[f"{name}.A_log"]),
            f32(self._weights[f"{name}.dt_bias"]),
            deltanet.num_key_heads,
            deltanet.key_dim,
        )
        z = self._parts.wide(x, z_weight).reshape(outputs.shape)
        norm, eps = self._weight(f"{name}.norm"), self._config.rms_norm_eps
        rows = self._parts.gated_norm(outputs, z, norm, eps, deltanet.output_gate).reshape(len(x), -1)
        return self._output_projection(f"{name}.out_proj", rows, deltanet.num_value_heads)

    def _deltanet_weights(self, name: str, deltanet: DeltaNet) -> list[F32]:
        """Of qkv (q, k, v), z, b and a, heads ascending in each."""
        if not deltanet.fused_projections:
            return [self._weight(f"{name}.in_proj_{part}") for part in ("qkv", "z", "b", "a")]
        key_dim, values_dim = deltanet.key_dim, deltanet.ratio * deltanet.value_dim
        sizes = (key_dim, key_dim, values_dim, values_dim)
        q, k, v, z = self._split_by_key_head(f"{name}.in_proj_qkvz", deltanet.num_key_heads, sizes)
        b, a = self._split_by_key_head(f"{name}.in_proj_ba", deltanet.num_key_heads, (deltanet.ratio, deltanet.ratio))
        return [np.concatenate([q, k, v]), z, b, a]

    def _split_by_key_head(self, name: str, num_key_heads: int, sizes: tuple[int, ...]) -> list[F32]:
        weight = self._weight(name)
        by_head = weight.reshape(num_key_heads, sum(sizes), -1)
        parts = np.split(by_head, np.cumsum(sizes)[:-1], axis=1)
        return [np.ascontiguousarray(part).reshape(-1, weight.shape[1]) for part in parts]

    def _mlp(self, name: str, x: F32) -> F32:
        hidden = self._parts.swiglu(self._wide(f"{name}.gate_proj", x), self._wide(f"{name}.up_proj", x))
        return self._wide(f"{name}.down_proj", hidden)

    def _experts(self, name: str, x: F32) -> F32:
        config = self._config
        ids, slot_weights = self._parts.route(self._narrow(f"{name}.gate", x), config.top_k, config.norm_topk_prob)
        mlps = [self._mlp_weights(f"{name}.experts.{i}") for i in range(config.num_experts)]
        if config.shared_expert:
            shared = self._parts.sigmoid(self._narrow(f"{name}.shared_expert_gate", x))
            slot_weights = np.concatenate([slot_weights, shared], axis=1)
            ids = np.concatenate([ids, np.full((len(x), 1), config.num_experts, dtype=np.int32)], axis=1)
            mlps.append(self._mlp_weights(f"{name}.shared_expert"))
        return self._parts.experts(x, ids, slot_weights, mlps, config.num_experts)

    def _mlp_weights(self, name: str) -> tuple[F32, F32, F32]:
        return self._weight(f"{name}.gate_proj"), self._weight(f"{name}.up_proj"), self._weight(f"{name}.down_proj")
