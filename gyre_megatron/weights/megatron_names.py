"""One decoder layer of Megatron-Core as stacked blocks: parameter names, fusions and shards.

Facts: QKV is grouped, `[groups, (heads/group + 2) * head_dim, hidden]` (with an output gate `q.. |
gate.. | k | v`); fc1 is per rank `[gate; up]`; Gated DeltaNet's `in_proj` and `conv1d` hold each
component's own shard one after the other; pipeline and expert indices are local. Checked against
real modules in tests/dist.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from gyre_megatron.config.model import Architecture
from gyre_megatron.errors import LayoutError
from gyre_megatron.weights.boxes import Block, Index, LocalBox, LocalTensor, stack
from gyre_megatron.weights.canonical import expert_prefix, layer_prefix, shared_expert_prefix
from gyre_megatron.weights.shards import column_shard, cut, row_shard, whole


@dataclass(frozen=True)
class MegatronStyle:
    """How a build of Megatron-Core names and groups its parameters."""

    experts: Literal["sequential", "te_grouped", "grouped"] = "sequential"
    """SequentialMLP, TEGroupedMLP, or GroupedMLP."""
    fused_norms: bool = False
    """Transformer Engine specs keep the norm's weight in the linear that follows it."""
    sharded_mla_down: bool = False
    """Stock local specs shard MLA's down projections over tensor parallelism."""
    padded_vocab_size: int | None = None
    """Rows of the embedding over all ranks, when padded beyond the vocabulary."""


class LayerBlocks:
    """Builds the local tensors of one decoder layer for one tensor-parallel (or expert) rank."""

    def __init__(
        self, architecture: Architecture, style: MegatronStyle, prefix: str, layer: int
    ) -> None:
        self.arch = architecture
        self.style = style
        self.prefix = prefix
        self.layer = layer
        self.hf = layer_prefix(layer)
        self.is_mtp = layer >= architecture.num_layers

    def dense(self, tp: int, rank: int) -> list[LocalTensor]:
        """Everything but the routed experts."""
        self.tp = tp
        self.rank = rank
        gdn = self.arch.is_gdn_layer(self.layer) and not self.is_mtp
        attention = (
            self._gdn() if gdn else self._mla() if self.arch.mla is not None else self._attention()
        )
        moe = self.arch.is_moe_layer(self.layer)
        mlp = (
            self._moe() if moe else self._mlp("mlp.", self.hf + "mlp.", self.arch.intermediate_size)
        )
        # TE fuses a norm only into a linear that follows it directly; neither MLA's projections nor
        # a router do
        attention_linear = "in_proj" if gdn else "linear_qkv"
        fused_attention = self.style.fused_norms and self.arch.mla is None
        return [
            self._norm(
                f"self_attention.{attention_linear}.layer_norm_weight"
                if fused_attention
                else "input_layernorm.weight",
                "input_layernorm.weight",
            ),
            *attention,
            self._norm(
                "mlp.linear_fc1.layer_norm_weight"
                if self.style.fused_norms and not moe
                else "pre_mlp_layernorm.weight",
                "post_attention_layernorm.weight",
            ),
            *mlp,
        ]

    def experts(self, ep: int, ep_rank: int, etp: int, etp_rank: int) -> list[LocalTensor]:
        """The routed experts of one expert-parallel rank."""
        moe = self.arch.moe
        assert moe is not None
        if moe.num_experts % ep:
            raise LayoutError(
                f"{moe.num_experts} experts do not divide over ep={ep}; choose a divisor"
            )
        per = moe.num_experts // ep
        self.tp = etp
        self.rank = etp_rank
        numbers = range(ep_rank * per, (ep_rank + 1) * per)
        if self.style.experts == "grouped":
            return self._grouped_experts(numbers, moe.intermediate_size)
        name = (
            (lambda fc, i: f"mlp.experts.local_experts.{i}.linear_{fc}.weight")
            if self.style.experts == "sequential"
            else (lambda fc, i: f"mlp.experts.linear_{fc}.weight{i}")
        )
        tensors = []
        for local, expert in enumerate(numbers):
            hf = expert_prefix(self.layer, expert)
            tensors += self._mlp_named(
                name("fc1", local), name("fc2", local), hf, moe.intermediate_size
            )
        return tensors

    # -- shapes of shards ---------------------------------------------------

    def _cut(self, size: int, what: str) -> tuple[int, int]:
        """This rank's (start, length) of a dimension."""
        return cut(size, self.tp, self.rank, f"layer {self.layer}: {what}")

    def _norm(self, key: str, name: str, size: int | None = None) -> LocalTensor:
        size = self.arch.hidden_size if size is None else size
        return whole(self.prefix + key, self.hf + name, (size,))

    def _replicated(self, key: str, name: str, shape: Index) -> LocalTensor:
        return whole(self.prefix + key, name, shape)

    def _column(self, key: str, name: str, size: int, width: int) -> LocalTensor:
        return row_shard(self.prefix + key, [(name, size)], width, self.tp, self.rank)

    def _row(self, key: str, name: str, size: int, width: int) -> LocalTensor:
        return column_shard(self.prefix + key, name, size, width, self.tp, self.rank)

    # -- modules ---------------------------------------------------

    def _mlp(self, key: str, hf: str, width: int) -> list[LocalTensor]:
        return self._mlp_named(f"{key}linear_fc1.weight", f"{key}linear_fc2.weight", hf, width)

    def _mlp_named(self, fc1: str, fc2: str, hf: str, width: int) -> list[LocalTensor]:
        hidden = self.arch.hidden_size
        start, length = self._cut(width, hf + "gate_proj")
        gate_up = [
            Block(f"{hf}{n}.weight", (start, 0), (length, hidden)) for n in ("gate_proj", "up_proj")
        ]
        return [
            stack(self.prefix + fc1, (2 * length, hidden), gate_up),
            self._row(fc2, hf + "down_proj.weight", hidden, width),
        ]

    def _grouped_experts(self, experts: range, width: int) -> list[LocalTensor]:
        """GroupedMLP keeps all experts in two tensors, transposed: [experts, hidden, 2f] and
        [experts, f, hidden]."""
        hidden, count = self.arch.hidden_size, len(experts)
        start, length = self._cut(width, "experts")
        key1, key2 = (f"{self.prefix}mlp.experts.weight{i}" for i in (1, 2))
        first, second = [], []
        for i, expert in enumerate(experts):
            hf, at = expert_prefix(self.layer, expert), i * hidden * 2 * length
            for j, name in enumerate(("gate_proj", "up_proj")):
                strides = (1, 2 * length)
                local_box = LocalBox(
                    f"{hf}{name}.weight",
                    (start, 0),
                    (length, hidden),
                    key1,
                    at + j * length,
                    strides,
                )
                first.append(local_box)
            down = LocalBox(
                f"{hf}down_proj.weight", (0, start), (hidden, length), key2, at // 2, (1, hidden)
            )
            second.append(down)
        return [
            LocalTensor(key1, (hidden, count * 2 * length), tuple(first)),
            LocalTensor(key2, (count * length, hidden), tuple(second)),
        ]

    def _moe(self) -> list[LocalTensor]:
        moe = self.arch.moe
        hidden = self.arch.hidden_size
        hf = self.hf + "mlp."
        assert moe is not None
        tensors = [
            self._replicated("mlp.router.weight", hf + "gate.weight", (moe.num_experts, hidden))
        ]
        if moe.expert_bias:
            bias = hf + "gate.e_score_correction_bias"
            tensors.append(self._replicated("mlp.router.expert_bias", bias, (moe.num_experts,)))
        if moe.shared_expert_gate:
            gate = hf + "shared_expert_gate.weight"
            tensors.append(self._replicated("mlp.shared_experts.gate_weight", gate, (1, hidden)))
        if moe.shared_expert_intermediate_size:
            shared = shared_expert_prefix(self.arch, self.layer)
            tensors += self._mlp("mlp.shared_experts.", shared, moe.shared_expert_intermediate_size)
        return tensors

    def _attention(self) -> list[LocalTensor]:
        arch = self.arch
        hf = self.hf + "self_attn."
        hidden = self.arch.hidden_size
        head = self.arch.head_dim
        per, groups = arch.num_attention_heads // arch.num_key_value_heads, arch.num_key_value_heads
        height = (per * (2 if arch.attention_output_gate else 1) + 2) * head
        # with more ranks than groups, Megatron still cuts the grouped rows evenly (and gathers the
        # activations)
        start, length = self._cut(groups * height, "query, key and value rows")
        blocks: list[Block] = []
        for group in range(start // height, -(-(start + length) // height)):
            whole = self._query_blocks(hf + "q_proj.weight", group)
            whole += [
                Block(f"{hf}{n}_proj.weight", (group * head, 0), (head, hidden)) for n in ("k", "v")
            ]
            blocks += _clip(whole, start - group * height, start + length - group * height)
        height_here = sum(block.shape[0] for block in blocks)
        qkv = self.prefix + "self_attention.linear_qkv.weight"
        tensors = [
            stack(qkv, (height_here, hidden), blocks),
            self._row(
                "self_attention.linear_proj.weight",
                hf + "o_proj.weight",
                hidden,
                arch.num_attention_heads * head,
            ),
        ]
        for name in ("q", "k") if arch.qk_norm else ():
            hf_norm = f"self_attn.{name}_norm.weight"
            tensors.append(self._norm(f"self_attention.{name}_layernorm.weight", hf_norm, head))
        return tensors

    def _query_blocks(self, name: str, group: int) -> list[Block]:
        per = self.arch.num_attention_heads // self.arch.num_key_value_heads
        head = self.arch.head_dim
        hidden = self.arch.hidden_size
        if not self.arch.attention_output_gate:
            return [Block(name, (group * per * head, 0), (per * head, hidden))]
        heads = range(
            group * per, (group + 1) * per
        )  # canonical: [query | gate] per head; here: all queries, all gates
        return [
            Block(name, ((2 * h + gate) * head, 0), (head, hidden))
            for gate in (0, 1)
            for h in heads
        ]

    def _mla(self) -> list[LocalTensor]:
        arch = self.arch
        mla = self.arch.mla
        hf = self.hf + "self_attn."
        hidden = self.arch.hidden_size
        assert mla is not None
        heads, key = arch.num_attention_heads, "self_attention."
        queries = heads * (mla.qk_nope_head_dim + mla.qk_rope_head_dim)
        values = heads * mla.v_head_dim
        down: Callable[..., LocalTensor] = (
            self._column if self.style.sharded_mla_down else self._whole_matrix
        )
        if mla.q_lora_rank is None:
            tensors = [
                self._column(key + "linear_q_proj.weight", hf + "q_proj.weight", queries, hidden)
            ]
        else:
            tensors = [
                down(
                    key + "linear_q_down_proj.weight",
                    hf + "q_a_proj.weight",
                    mla.q_lora_rank,
                    hidden,
                ),
                self._mla_norm("q", "linear_q_up_proj", mla.q_lora_rank),
                self._column(
                    key + "linear_q_up_proj.weight",
                    hf + "q_b_proj.weight",
                    queries,
                    mla.q_lora_rank,
                ),
            ]
        latent = mla.kv_lora_rank + mla.qk_rope_head_dim
        keys_values = heads * (mla.qk_nope_head_dim + mla.v_head_dim)
        return [
            *tensors,
            down(
                key + "linear_kv_down_proj.weight", hf + "kv_a_proj_with_mqa.weight", latent, hidden
            ),
            self._mla_norm("kv", "linear_kv_up_proj", mla.kv_lora_rank),
            self._column(
                key + "linear_kv_up_proj.weight",
                hf + "kv_b_proj.weight",
                keys_values,
                mla.kv_lora_rank,
            ),
            self._row(key + "linear_proj.weight", hf + "o_proj.weight", hidden, values),
        ]

    def _whole_matrix(self, key: str, name: str, rows: int, columns: int) -> LocalTensor:
        return self._replicated(key, name, (rows, columns))

    def _mla_norm(self, name: str, linear: str, size: int) -> LocalTensor:
        fused = f"self_attention.{linear}.layer_norm_weight"
        key = fused if self.style.fused_norms else f"self_attention.{name}_layernorm.weight"
        return self._norm(key, f"self_attn.{name}_a_layernorm.weight", size)

    def _gdn(self) -> list[LocalTensor]:
        gdn = self.arch.gdn
        hf = self.hf + "linear_attn."
        hidden = self.arch.hidden_size
        key = "self_attention."
        assert gdn is not None
        if self.style.fused_norms:
            raise LayoutError(
                f"{self.prefix}{key}out_norm.weight has no plan: Transformer Engine keeps it "
                "zero-centred, which "
                "needs arithmetic on the way; build the Gated DeltaNet layers with a plain output "
                "norm"
            )
        first, count = self._cut(gdn.num_key_heads, "Gated DeltaNet key heads")
        ratio = gdn.num_value_heads // gdn.num_key_heads
        dk, dv = gdn.key_head_dim, ratio * gdn.value_head_dim
        qkvz = hf + "in_proj_qkvz.weight"
        ba = hf + "in_proj_ba.weight"
        group = 2 * (dk + dv)
        parts = [
            (qkvz, group, 0, dk),
            (qkvz, group, dk, dk),
            (qkvz, group, 2 * dk, dv),
            (qkvz, group, 2 * dk + dv, dv),
        ]
        parts += [(ba, 2 * ratio, 0, ratio), (ba, 2 * ratio, ratio, ratio)]
        heads = range(first, first + count)
        rows = [
            Block(n, (h * size + at, 0), (length, hidden))
            for n, size, at, length in parts
            for h in heads
        ]
        keys, values = gdn.num_key_heads * dk, gdn.num_key_heads * dv
        conv = [(0, keys), (keys, keys), (2 * keys, values)]
        conv_blocks = [
            Block(
                hf + "conv1d.weight",
                (base + self.rank * (size // self.tp), 0, 0),
                (size // self.tp, 1, gdn.conv_kernel),
            )
            for base, size in conv
        ]
        vectors = [self._vector(key + n, hf + n, gdn.num_value_heads) for n in ("A_log", "dt_bias")]
        local_conv = sum(block.shape[0] for block in conv_blocks)
        return [
            stack(
                self.prefix + key + "in_proj.weight", (sum(b.shape[0] for b in rows), hidden), rows
            ),
            stack(
                self.prefix + key + "conv1d.weight", (local_conv, 1, gdn.conv_kernel), conv_blocks
            ),
            *vectors,
            self._norm(key + "out_norm.weight", "linear_attn.norm.weight", gdn.value_head_dim),
            self._row(
                key + "out_proj.weight",
                hf + "out_proj.weight",
                hidden,
                gdn.num_value_heads * gdn.value_head_dim,
            ),
        ]

    def _vector(self, key: str, name: str, size: int) -> LocalTensor:
        start, length = self._cut(size, name)
        return stack(self.prefix + key, (length,), [Block(name, (start,), (length,))])


def _clip(blocks: list[Block], first: int, last: int) -> list[Block]:
    """Rows `first` to `last` of stacked matrix blocks."""
    kept, at = [], 0
    for name, start, (rows, columns) in blocks:
        low, high = max(first - at, 0), min(last - at, rows)
        if low < high:
            kept.append(Block(name, (start[0] + low, start[1]), (high - low, columns)))
        at += rows
    return kept
