"""The tree attention kernel against SDPA on the same causal work, and against a dense mask."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from benchmarks import common
from benchmarks.tree.training import BUDGET, MODEL
from benchmarks.tree.workload import coding_execution, nodes_of
from gyre_megatron.ops.tree_attention import tree_attention, tree_pieces, visibility
from gyre_megatron.trajectory.packing import PackedBin, pack

# Multiply-adds of a pair, times two: forward 2 products of a head's width, backward 5.
FLOPS_PER_PAIR = 14 * MODEL.num_attention_heads * MODEL.head_dim


def bench_attention(scale: int, num_runs: int) -> dict[str, Any]:
    """Forward and backward, fp32; SDPA runs a causal sequence with as many pairs as the tree."""
    (bin_,) = pack([coding_execution(scale).build(5)], BUDGET, 1)
    (small,) = pack([coding_execution(max(8, scale // 4)).build(5)], BUDGET, 1)
    same_work = int((2 * bin_.num_pairs) ** 0.5)
    visible = visibility(*nodes_of(small), small.num_tokens)
    actions = {
        "tree": lambda: _seconds(_tree(bin_), bin_.num_tokens),
        "sdpa": lambda: _seconds(_causal, same_work),
        "small_tree": lambda: _seconds(_tree(small), small.num_tokens),
        "small_dense": lambda: _seconds(_dense(visible), small.num_tokens),
    }
    seconds = common.interleaved(actions, num_runs)
    sdpa_pairs = same_work * (same_work + 1) // 2
    tree_rates = [FLOPS_PER_PAIR * bin_.num_pairs / s for s in seconds["tree"]]
    sdpa_rates = [FLOPS_PER_PAIR * sdpa_pairs / s for s in seconds["sdpa"]]
    return {
        "tokens": bin_.num_tokens,
        "pieces": len(tree_pieces(*nodes_of(bin_))),
        "gflops": common.spread(rate / 1e9 for rate in tree_rates),
        "sdpa_gflops": common.spread(rate / 1e9 for rate in sdpa_rates),
        "vs_sdpa": common.ratio(tree_rates, sdpa_rates),
        "dense_mask_tokens": small.num_tokens,
        "vs_dense_mask": common.ratio(seconds["small_dense"], seconds["small_tree"]),
    }


Attention = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def _seconds(attention: Attention, num_tokens: int) -> float:
    """CPU seconds of one forward and backward pass on random heads."""
    heads = (MODEL.num_attention_heads, MODEL.num_key_value_heads, MODEL.num_key_value_heads)
    inputs = [torch.randn(h, num_tokens, MODEL.head_dim, requires_grad=True) for h in heads]
    start = time.process_time()
    attention(*inputs).sum().backward()
    return time.process_time() - start


def _tree(bin_: PackedBin) -> Attention:
    pieces = torch.from_numpy(tree_pieces(*nodes_of(bin_)))
    return lambda query, key, value: tree_attention(query, key, value, pieces)


def _causal(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    return F.scaled_dot_product_attention(
        query[None], key[None], value[None], is_causal=True, enable_gqa=True
    )


def _dense(visible: torch.Tensor) -> Attention:
    return lambda query, key, value: F.scaled_dot_product_attention(
        query[None], key[None], value[None], attn_mask=visible, enable_gqa=True
    )
