"""FlexAttention's BlockMask of a packed tree, straight from node intervals.

Nothing of size tokens x tokens or blocks x blocks is ever tested or stored: tables report the width
that FlexAttention expects and hold as much as their longest row.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch.nn.attention.flex_attention import BlockMask

from gyre_megatron.ops import library  # noqa: F401  (registers torch.ops.gyre)
from gyre_megatron.ops.tree_attention import visibility

_FIELDS = (
    *("kv_num_blocks", "kv_indices", "full_kv_num_blocks", "full_kv_indices"),
    *("q_num_blocks", "q_indices", "full_q_num_blocks", "full_q_indices"),
)

Tables = tuple[torch.Tensor, ...]
"""Counts and indices of kv, of full kv, then the same four of queries; int32 [1, 1, rows(,
width)]."""


def tree_block_tables(
    nodes: torch.Tensor,
    num_tokens: int,
    block: int = 128,
    query_blocks: torch.Tensor | None = None,
    scratch: torch.Tensor | None = None,
) -> Tables:
    """Block tables of a packed tree, on the device of `nodes`.

    Args:
        nodes: int32 [3, M]: starts, ends, subtree_ends in DFS order, covering all tokens.
        query_blocks: int [R]; ascending numbers of the query blocks held here (context
            parallelism); None holds all.
        scratch: int32 [n] on CPU; memory for the tables, whose earlier tables are no longer needed:
            fresh pages cost more than the work. What does not fit is allocated.

    Raises:
        ValueError: nodes do not cover the tokens in DFS order (checked on CPU).
    """
    return torch.ops.gyre.tree_block_mask(
        *nodes.contiguous().unbind(0), num_tokens, block, query_blocks, scratch
    )


def tree_block_mask(
    nodes: torch.Tensor, num_tokens: int, block: int = 128, query_blocks: torch.Tensor | None = None
) -> BlockMask:
    """BlockMask for `flex_attention(query of the blocks held here, all keys)`.

    See `tree_block_tables` for the arguments; with `query_blocks`, num_tokens must be a multiple of
    `block`.
    """
    tables = tree_block_tables(nodes, num_tokens, block, query_blocks)
    until = subtree_end_of_tokens(nodes, num_tokens)
    if query_blocks is None:
        rows = num_tokens

        def visible(b, h, q, k):
            return (k <= q) & (q < until[k])
    else:
        rows = len(query_blocks) * block
        offsets = torch.arange(block, device=nodes.device, dtype=torch.int32)
        position = (query_blocks.to(torch.int32)[:, None] * block + offsets).flatten()

        def visible(b, h, q, k):
            return (k <= position[q]) & (position[q] < until[k])

    fields: dict[str, Any] = dict(zip(_FIELDS, tables, strict=True))
    return BlockMask((rows, num_tokens), **fields, BLOCK_SIZE=(block, block), mask_mod=visible)


def subtree_end_of_tokens(nodes: torch.Tensor, num_tokens: int) -> torch.Tensor:
    """int32 [num_tokens]: the end of the interval of queries that see each token."""
    starts, ends, until = nodes
    return torch.repeat_interleave(until, (ends - starts).long(), output_size=num_tokens)


def tree_block_tables_reference(
    nodes: np.ndarray, num_tokens: int, block: int = 128, query_blocks: np.ndarray | None = None
) -> list[list[list[int]]]:
    """The plain form, from the dense mask: rows of kv, full kv, q and full q indices."""
    padded = -(-num_tokens // block) * block
    dense = torch.zeros(padded, padded, dtype=torch.bool)
    dense[:num_tokens, :num_tokens] = visibility(nodes[0], nodes[1], nodes[2], num_tokens)
    tiles = dense.unflatten(1, (-1, block)).unflatten(0, (-1, block)).transpose(1, 2)
    some = tiles.any(dim=(-1, -2))
    every = tiles.all(dim=(-1, -2))
    if query_blocks is not None:
        some = some[query_blocks]
        every = every[query_blocks]
    return [
        [torch.nonzero(row)[:, 0].tolist() for row in table]
        for table in (some & ~every, every, (some & ~every).T, every.T)
    ]
