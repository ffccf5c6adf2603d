"""SGLang's serving layout written down, for planning where no engine runs.

A live engine's geometry is probed instead (`engines.probe`); tests hold this map against the
probe of SGLang 0.5.23's own modules for every family. Facts: q, k and v are fused per rank and
key/value heads are replicated where there are more ranks than heads; gate and up are fused; experts
are stacked per rank, expert-parallel groups being consecutive ranks; with attention data
parallelism the embedding follows the attention ranks and the output layer all ranks; vocabulary
rows are padded to a multiple of 64 (or of the ranks, if larger).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from math import lcm

from gyre_megatron.config.model import Architecture
from gyre_megatron.errors import LayoutError
from gyre_megatron.weights.boxes import Block, LocalTensor, stack
from gyre_megatron.weights.canonical import (
    EMBEDDING,
    FINAL_NORM,
    OUTPUT,
    expert_prefix,
    layer_prefix,
    shared_expert_prefix,
)
from gyre_megatron.weights.layout import Layout, Shard, index_by_name, merge_replicas, place_of
from gyre_megatron.weights.shards import column_shard, cut, row_shard, vocabulary, whole

_VOCAB_PADDING = 64


class SglangLayout(Layout):
    """One SGLang server.

    Args:
        tp: tensor-parallel ranks.
        ep: expert-parallel ranks among them.
        attention_dp: groups of ranks that each serve their own requests' attention.
    """

    def __init__(
        self, architecture: Architecture, tp: int, ep: int = 1, attention_dp: int = 1
    ) -> None:
        if tp % ep or tp % attention_dp:
            raise LayoutError(f"ep={ep} and attention_dp={attention_dp} must divide tp={tp}")
        self.architecture = architecture
        self.tp = tp
        self.ep = ep
        self.attention_tp = tp // attention_dp
        self.num_ranks = tp
        self._dense = lru_cache(None)(self._build_dense)
        self._experts = lru_cache(None)(self._build_experts)
        self._outer = lru_cache(None)(self._build_outer)
        self._by_name = lru_cache(None)(index_by_name)

    def tensors(self, rank: int) -> Sequence[LocalTensor]:
        tensors = list(self._outer(rank))
        for layer in range(self.architecture.num_layers):
            tensors += self._dense(layer, rank)
            if self.architecture.is_moe_layer(layer):
                tensors += self._experts(layer, rank)
        return tensors

    def shards(self, name: str) -> Sequence[Shard]:
        layer, expert = place_of(name)
        if layer is None:
            found = [(self._by_name(self._outer(r)).get(name), [r]) for r in range(self.tp)]
        elif layer >= self.architecture.num_layers:
            return ()  # the multi-token-prediction layer is served by a draft model of its own
        elif expert is None:
            found = [(self._by_name(self._dense(layer, r)).get(name), [r]) for r in range(self.tp)]
        else:
            assert self.architecture.moe is not None
            ranks = self._expert_ranks(expert // (self.architecture.moe.num_experts // self.ep))
            found = [(self._by_name(self._experts(layer, r)).get(name), [r]) for r in ranks]
        return merge_replicas((local_boxes, ranks) for local_boxes, ranks in found if local_boxes)

    def _expert_ranks(self, group: int) -> range:
        size = self.tp // self.ep
        return range(group * size, (group + 1) * size)

    # -- modules ---------------------------------------------------

    def _build_outer(self, rank: int) -> tuple[LocalTensor, ...]:
        arch = self.architecture
        tensors = [
            self._vocab(
                "model.embed_tokens.weight", EMBEDDING, self.attention_tp, rank % self.attention_tp
            ),
            whole("model.norm.weight", FINAL_NORM, (arch.hidden_size,)),
        ]
        if not arch.tie_word_embeddings:
            tensors.append(self._vocab("lm_head.weight", OUTPUT, self.tp, rank))
        return tuple(tensors)

    def _vocab(self, key: str, name: str, ranks: int, rank: int) -> LocalTensor:
        vocab = self.architecture.vocab_size
        step = lcm(_VOCAB_PADDING, ranks)
        per_rank = -(-vocab // step) * step // ranks
        return vocabulary(key, name, (vocab, self.architecture.hidden_size), per_rank, rank)

    def _build_dense(self, layer: int, rank: int) -> tuple[LocalTensor, ...]:
        arch, hf = self.architecture, layer_prefix(layer)
        norms = [
            whole(hf + n, hf + n, (arch.hidden_size,))
            for n in ("input_layernorm.weight", "post_attention_layernorm.weight")
        ]
        if arch.is_gdn_layer(layer):
            attention = self._gdn(hf + "linear_attn.", rank % self.attention_tp)
        elif arch.mla is not None:
            attention = self._mla(hf + "self_attn.", rank % self.attention_tp)
        else:
            key = (
                hf if arch.gdn is not None else hf + "self_attn."
            )  # Qwen3-Next names it without the module
            attention = self._attention(key, hf + "self_attn.", rank % self.attention_tp)
        if arch.is_moe_layer(layer):
            return (*norms, *attention, *self._moe(layer, rank))
        return (*norms, *attention, *self._mlp(hf + "mlp.", arch.intermediate_size, rank))

    def _mlp(self, hf: str, width: int, rank: int) -> list[LocalTensor]:
        hidden = self.architecture.hidden_size
        parts = [(f"{hf}{n}_proj.weight", width) for n in ("gate", "up")]
        return [
            row_shard(hf + "gate_up_proj.weight", parts, hidden, self.tp, rank),
            column_shard(
                hf + "down_proj.weight", hf + "down_proj.weight", hidden, width, self.tp, rank
            ),
        ]

    def _attention(self, key: str, hf: str, rank: int) -> list[LocalTensor]:
        arch = self.architecture
        hidden = self.architecture.hidden_size
        head = self.architecture.head_dim
        tp = self.attention_tp
        heads = arch.num_attention_heads
        groups = arch.num_key_value_heads
        queries = heads * head * (2 if arch.attention_output_gate else 1)
        start, length = cut(queries, tp, rank, hf + "q_proj")
        replicas = max(1, tp // groups)
        first, count = cut(groups, min(tp, groups), rank // replicas, hf + "k_proj")
        blocks = [Block(hf + "q_proj.weight", (start, 0), (length, hidden))]
        blocks += [
            Block(f"{hf}{n}_proj.weight", (first * head, 0), (count * head, hidden))
            for n in ("k", "v")
        ]
        tensors = [
            stack(key + "qkv_proj.weight", (length + 2 * count * head, hidden), blocks),
            column_shard(
                key + "o_proj.weight", hf + "o_proj.weight", hidden, heads * head, tp, rank
            ),
        ]
        if arch.qk_norm:
            tensors += [
                whole(f"{key}{n}_norm.weight", f"{hf}{n}_norm.weight", (head,)) for n in ("q", "k")
            ]
        return tensors

    def _mla(self, hf: str, rank: int) -> list[LocalTensor]:
        arch = self.architecture
        mla = arch.mla
        hidden = arch.hidden_size
        assert mla is not None
        tp = self.attention_tp
        heads = arch.num_attention_heads
        latent = mla.kv_lora_rank + mla.qk_rope_head_dim
        queries = heads * (mla.qk_nope_head_dim + mla.qk_rope_head_dim)
        down = [(hf + "kv_a_proj_with_mqa.weight", latent)]
        if mla.q_lora_rank is None:
            tensors = [
                row_shard(
                    hf + "q_proj.weight", [(hf + "q_proj.weight", queries)], hidden, tp, rank
                ),
                row_shard(hf + "kv_a_proj_with_mqa.weight", down, hidden, 1, 0),
            ]
        else:
            fused = [(hf + "q_a_proj.weight", mla.q_lora_rank), *down]
            q_b = [(hf + "q_b_proj.weight", queries)]
            tensors = [
                row_shard(hf + "fused_qkv_a_proj_with_mqa.weight", fused, hidden, 1, 0),
                whole(hf + "q_a_layernorm.weight", hf + "q_a_layernorm.weight", (mla.q_lora_rank,)),
                row_shard(hf + "q_b_proj.weight", q_b, mla.q_lora_rank, tp, rank),
            ]
        kv_b = [(hf + "kv_b_proj.weight", heads * (mla.qk_nope_head_dim + mla.v_head_dim))]
        return [
            *tensors,
            whole(hf + "kv_a_layernorm.weight", hf + "kv_a_layernorm.weight", (mla.kv_lora_rank,)),
            row_shard(hf + "kv_b_proj.weight", kv_b, mla.kv_lora_rank, tp, rank),
            column_shard(
                hf + "o_proj.weight", hf + "o_proj.weight", hidden, heads * mla.v_head_dim, tp, rank
            ),
        ]

    def _gdn(self, hf: str, rank: int) -> list[LocalTensor]:
        gdn = self.architecture.gdn
        hidden = self.architecture.hidden_size
        tp = self.attention_tp
        assert gdn is not None
        keys = gdn.num_key_heads * gdn.key_head_dim
        values = gdn.num_value_heads * gdn.value_head_dim
        conv = []
        for base, size in ((0, keys), (keys, keys), (2 * keys, values)):
            start, length = cut(size, tp, rank, hf + "conv1d")
            conv.append(
                Block(hf + "conv1d.weight", (base + start, 0, 0), (length, 1, gdn.conv_kernel))
            )
        first, heads = cut(gdn.num_value_heads, tp, rank, hf + "value heads")
        vectors = [
            stack(hf + n, (heads,), [Block(hf + n, (first,), (heads,))])
            for n in ("A_log", "dt_bias")
        ]
        qkvz = [(hf + "in_proj_qkvz.weight", 2 * (keys + values))]
        ba = [(hf + "in_proj_ba.weight", 2 * gdn.num_value_heads)]
        return [
            row_shard(hf + "in_proj_qkvz.weight", qkvz, hidden, tp, rank),
            row_shard(hf + "in_proj_ba.weight", ba, hidden, tp, rank),
            stack(hf + "conv1d.weight", (sum(b.shape[0] for b in conv), 1, gdn.conv_kernel), conv),
            *vectors,
            whole(hf + "norm.weight", hf + "norm.weight", (gdn.value_head_dim,)),
            column_shard(hf + "out_proj.weight", hf + "out_proj.weight", hidden, values, tp, rank),
        ]

    def _moe(self, layer: int, rank: int) -> list[LocalTensor]:
        arch = self.architecture
        moe = arch.moe
        hf = layer_prefix(layer) + "mlp."
        assert moe is not None
        tensors = [
            whole(hf + "gate.weight", hf + "gate.weight", (moe.num_experts, arch.hidden_size))
        ]
        if moe.expert_bias:
            bias = hf + "gate.e_score_correction_bias"
            tensors.append(whole(bias, bias, (moe.num_experts,)))
        if moe.shared_expert_gate:
            gate = hf + "shared_expert_gate.weight"
            tensors.append(whole(gate, gate, (1, arch.hidden_size)))
        if moe.shared_expert_intermediate_size:
            tensors += self._mlp(
                shared_expert_prefix(arch, layer), moe.shared_expert_intermediate_size, rank
            )
        return tensors

    def _build_experts(self, layer: int, rank: int) -> tuple[LocalTensor, ...]:
        moe = self.architecture.moe
        hidden = self.architecture.hidden_size
        key = layer_prefix(layer) + "mlp.experts."
        assert moe is not None
        size = self.tp // self.ep
        first, count = cut(moe.num_experts, self.ep, rank // size, "experts")
        start, length = cut(moe.intermediate_size, size, rank % size, "an expert's width")
        w13, w2 = [], []
        for expert in range(first, first + count):
            hf = expert_prefix(layer, expert)
            w13 += [
                Block(f"{hf}{n}_proj.weight", (start, 0), (length, hidden)) for n in ("gate", "up")
            ]
            w2.append(Block(f"{hf}down_proj.weight", (0, start), (hidden, length)))
        return (
            stack(key + "w13_weight", (count, 2 * length, hidden), w13),
            stack(key + "w2_weight", (count, hidden, length), w2),
        )
