"""Tree attention on GPU: FlexAttention, compiled once, with our BlockMask.

Written for CUDA; the block tables and the mask function are tested on CPU through FlexAttention's
eager path.
"""

from __future__ import annotations

import functools

import numpy as np
import torch
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from gyre_megatron.ops.tree_block_mask import tree_block_mask
from gyre_megatron.training.tree_batch import FLEX_BLOCK, TreeParams


@functools.cache
def _compiled():
    """Dynamic shapes: bins differ in length, and one kernel serves all of them."""
    return torch.compile(flex_attention, dynamic=True)


def block_mask_of(params: TreeParams, device: torch.device) -> BlockMask:
    """The bin's BlockMask, made once per micro-step and shared by all layers."""
    if "block_mask" not in params.cache:
        nodes = torch.from_numpy(np.stack(params.nodes).astype(np.int32)).to(device)
        held = None
        if params.order is not None:
            blocks = [
                np.arange(first // FLEX_BLOCK, last // FLEX_BLOCK)
                for first, last in params.intervals.tolist()
            ]
            held = torch.from_numpy(np.concatenate(blocks)).to(device)
        params.cache["block_mask"] = tree_block_mask(
            nodes, int(params.nodes[1][-1]), FLEX_BLOCK, held
        )
    return params.cache["block_mask"]


def flex_tree_attention(query, key, value, params: TreeParams, scale: float) -> torch.Tensor:
    """query [N, T, D], key and value [G, S, D] -> [N, T, D]."""
    out = _compiled()(
        query[None],
        key[None],
        value[None],
        block_mask=block_mask_of(params, query.device),
        scale=scale,
        enable_gqa=query.shape[0] != key.shape[0],
    )
    return out[0]
