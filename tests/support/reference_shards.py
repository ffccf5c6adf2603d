"""What every Megatron parameter must hold, from whole checkpoint tensors by plain cat, view and
chunk.

Written apart from the product's boxes, as their oracle. Source of the fusions: Megatron-Core 0.16's
modules.
"""

from __future__ import annotations

import re
import zlib

import torch

from gyre_megatron.config.model import Architecture
from gyre_megatron.weights.canonical import canonical_tensors
from gyre_megatron.weights.parallel import ParallelRank

Tensors = dict[str, torch.Tensor]


def whole_weights(a: Architecture, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensors:
    """Every checkpoint tensor, filled with numbers that depend on its name."""
    weights = {}
    for name, shape in canonical_tensors(a).items():
        generator = torch.Generator().manual_seed(zlib.crc32(name.encode()) + seed)
        weights[name] = torch.randn(shape, generator=generator).to(dtype)
    return weights


def _chunk(tensor: torch.Tensor, size: int, rank: int, dim: int = 0) -> torch.Tensor:
    return tensor.chunk(size, dim)[rank]


def _gate_up(w: Tensors, prefix: str, size: int, rank: int) -> torch.Tensor:
    return torch.cat([_chunk(w[f"{prefix}{n}_proj.weight"], size, rank) for n in ("gate", "up")])


def expected(
    a: Architecture, place: ParallelRank, w: Tensors, name: str, layer: int | None
) -> torch.Tensor:
    """The values of local parameter `name` (without its chunk) of layer `layer`, padding as
    zeros."""
    if layer is None:
        return _outer(a, place, w, name)
    tail = re.sub(r"^(decoder|mtp)\.layers\.\d+\.(transformer_layer\.)?", "", name)
    p = f"model.layers.{layer}."
    if ".experts." in tail:
        return _experts(a, place, w, p, tail)
    simple = {
        "input_layernorm.weight": "input_layernorm.weight",
        "pre_mlp_layernorm.weight": "post_attention_layernorm.weight",
        "self_attention.k_layernorm.weight": "self_attn.k_norm.weight",
        "self_attention.q_layernorm.weight": "self_attn.q_a_layernorm.weight"
        if a.mla
        else "self_attn.q_norm.weight",
        "self_attention.kv_layernorm.weight": "self_attn.kv_a_layernorm.weight",
        "self_attention.linear_q_down_proj.weight": "self_attn.q_a_proj.weight",
        "self_attention.linear_kv_down_proj.weight": "self_attn.kv_a_proj_with_mqa.weight",
        "self_attention.out_norm.weight": "linear_attn.norm.weight",
        "mlp.router.weight": "mlp.gate.weight",
        "mlp.router.expert_bias": "mlp.gate.e_score_correction_bias",
        "mlp.shared_experts.gate_weight": "mlp.shared_expert_gate.weight",
        "enorm.weight": "enorm.weight",
        "hnorm.weight": "hnorm.weight",
        "final_layernorm.weight": "shared_head.norm.weight",
    }
    if tail in simple:
        return w[p + simple[tail]]
    sharded = {
        "self_attention.linear_proj.weight": ("self_attn.o_proj.weight", 1),
        "eh_proj.weight": ("eh_proj.weight", 0),
        "self_attention.linear_q_up_proj.weight": ("self_attn.q_b_proj.weight", 0),
        "self_attention.linear_kv_up_proj.weight": ("self_attn.kv_b_proj.weight", 0),
        "self_attention.A_log": ("linear_attn.A_log", 0),
        "self_attention.dt_bias": ("linear_attn.dt_bias", 0),
        "self_attention.out_proj.weight": ("linear_attn.out_proj.weight", 1),
        "mlp.linear_fc2.weight": ("mlp.down_proj.weight", 1),
    }
    if tail in sharded:
        hf, dim = sharded[tail]
        return _chunk(w[p + hf], place.tp, place.tp_rank, dim)
    if tail == "mlp.linear_fc1.weight":
        return _gate_up(w, p + "mlp.", place.tp, place.tp_rank)
    if tail.startswith("mlp.shared_experts."):
        shared = p + ("mlp.shared_experts." if a.mla else "mlp.shared_expert.")
        if "fc1" in tail:
            return _gate_up(w, shared, place.tp, place.tp_rank)
        return _chunk(w[shared + "down_proj.weight"], place.tp, place.tp_rank, 1)
    if tail == "self_attention.linear_qkv.weight":
        return _chunk(_qkv(a, w, p + "self_attn."), place.tp, place.tp_rank)
    return torch.cat(
        [_chunk(part, place.tp, place.tp_rank) for part in _gdn(a, w, p + "linear_attn.", tail)]
    )


def _qkv(a: Architecture, w: Tensors, p: str) -> torch.Tensor:
    groups, head, hidden = a.num_key_value_heads, a.head_dim, a.hidden_size
    q, k, v = (w[f"{p}{n}_proj.weight"] for n in "qkv")
    parts = [q.view(groups, -1, hidden)]
    if a.attention_output_gate:
        both = q.view(groups, a.num_attention_heads // groups, 2, head, hidden)
        parts = [
            both[:, :, 0].reshape(groups, -1, hidden),
            both[:, :, 1].reshape(groups, -1, hidden),
        ]
    parts += [t.view(groups, head, hidden) for t in (k, v)]
    return torch.cat(parts, 1).reshape(-1, hidden)


def _gdn(a: Architecture, w: Tensors, p: str, tail: str) -> list[torch.Tensor]:
    gdn = a.gdn
    assert gdn is not None
    keys, values = gdn.num_key_heads * gdn.key_head_dim, gdn.num_value_heads * gdn.value_head_dim
    if tail.endswith("conv1d.weight"):
        return list(w[p + "conv1d.weight"].split([keys, keys, values]))
    assert tail.endswith("in_proj.weight"), tail
    ratio = gdn.num_value_heads // gdn.num_key_heads
    sizes = [
        gdn.key_head_dim,
        gdn.key_head_dim,
        ratio * gdn.value_head_dim,
        ratio * gdn.value_head_dim,
    ]
    qkvz = w[p + "in_proj_qkvz.weight"].view(gdn.num_key_heads, sum(sizes), -1).split(sizes, 1)
    ba = w[p + "in_proj_ba.weight"].view(gdn.num_key_heads, 2 * ratio, -1).split([ratio, ratio], 1)
    return [part.reshape(-1, a.hidden_size) for part in (*qkvz, *ba)]


def _experts(a: Architecture, place: ParallelRank, w: Tensors, p: str, tail: str) -> torch.Tensor:
    assert a.moe is not None
    per, etp, rank = a.moe.num_experts // place.ep, place.etp, place.etp_rank
    first = place.ep_rank * per
    fc1 = [_gate_up(w, f"{p}mlp.experts.{first + i}.", etp, rank) for i in range(per)]
    fc2 = [
        _chunk(w[f"{p}mlp.experts.{first + i}.down_proj.weight"], etp, rank, 1) for i in range(per)
    ]
    if tail.endswith("experts.weight1"):
        return torch.stack([t.t() for t in fc1]).reshape(a.hidden_size, -1)
    if tail.endswith("experts.weight2"):
        return torch.cat([t.t() for t in fc2])
    index = int(
        re.search(r"local_experts\.(\d+)\.|weight(\d+)$", tail).group(1)
        or tail.rsplit("weight", 1)[1]
    )
    return fc1[index] if "fc1" in tail else fc2[index]


def _outer(a: Architecture, place: ParallelRank, w: Tensors, name: str) -> torch.Tensor:
    if name == "decoder.final_layernorm.weight":
        return w["model.norm.weight"]
    tied = a.tie_word_embeddings or name.startswith("embedding")
    table = w["model.embed_tokens.weight" if tied else "lm_head.weight"]
    rows = -(-a.vocab_size // place.tp) * place.tp
    padded = torch.cat([table, table.new_zeros(rows - a.vocab_size, a.hidden_size)])
    return _chunk(padded, place.tp, place.tp_rank)
