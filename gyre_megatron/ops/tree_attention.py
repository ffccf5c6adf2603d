"""Attention over a packed tree without a mask: a list of dense pieces, merged by log-sum-exp.

Token k is visible to q exactly when k <= q < subtree_end(node(k)). In DFS order the tokens that see
a node are one
interval, so attention is a sum of two kinds of piece: causal squares along chains of first
children, and full rectangles of one chain's keys under the queries of later siblings. A piece is a
row `(query_start, key_start, queries, keys, causal)`; the rows of a bin are made once and serve
every layer.

Legend: T query tokens, S key tokens, N heads, G key-value heads, D head size.
"""

from __future__ import annotations

import itertools
import math

import numpy as np
import torch

from gyre_megatron.ops import library  # noqa: F401  (registers torch.ops.gyre)


def tree_pieces(
    node_starts: np.ndarray,
    node_ends: np.ndarray,
    subtree_ends: np.ndarray,
    intervals: np.ndarray | None = None,
) -> np.ndarray:
    """Dense pieces of a packed tree's attention.

    Args:
        node_starts, node_ends, subtree_ends: int [M], nodes in DFS order, none empty.
        intervals: int [n, 2]; global [start, end) of the queries held here, ascending; None holds
            all.

    Returns:
        int64 [P, 5]: query_start (local), key_start (global), queries, keys, causal.
    """
    chains = _chains(node_starts, node_ends, subtree_ends)
    num_tokens = int(node_ends[-1]) if len(node_ends) else 0
    spans = (
        np.array([[0, num_tokens]]) if intervals is None else np.asarray(intervals).reshape(-1, 2)
    )
    pieces: list[tuple[int, int, int, int, int]] = []
    offset = 0
    for first, last in spans.tolist():
        for start, end, cuts in chains:
            _chain_pieces(pieces, start, end, cuts, first, last, offset - first)
        offset += last - first
    return np.array(pieces, np.int64).reshape(-1, 5)


def _chains(starts, ends, subtree_ends) -> list[tuple[int, int, list[tuple[int, int, int]]]]:
    """Runs of first children: (start, end, rectangles (key_start, key_end, last_query)) of each, in
    DFS order."""
    starts, ends, subtree_ends = (np.asarray(a).tolist() for a in (starts, ends, subtree_ends))
    chains: list[tuple[int, int, list[tuple[int, int, int]]]] = []
    m = 0
    while m < len(starts):
        first = m
        while subtree_ends[m] > ends[m]:  # has a child, and in DFS order it is the next node
            m += 1
        chain_end = ends[m]
        rectangles: list[tuple[int, int, int]] = []
        for n in range(first, m + 1):
            if subtree_ends[n] > chain_end:
                if rectangles and rectangles[-1][2] == subtree_ends[n]:
                    rectangles[-1] = (rectangles[-1][0], ends[n], subtree_ends[n])
                else:
                    rectangles.append((starts[n], ends[n], subtree_ends[n]))
        chains.append((starts[first], chain_end, rectangles))
        m += 1
    return chains


def _chain_pieces(pieces, start, end, rectangles, first, last, shift) -> None:
    """Pieces of one chain whose queries lie in [first, last)."""
    low = max(start, first)
    high = min(end, last)
    if low < high:
        if low > start:
            pieces.append((low + shift, start, high - low, low - start, 0))
        pieces.append((low + shift, low, high - low, high - low, 1))
    nested = [*rectangles, (end, end, end)]
    # Rectangles shrink along the chain: queries beyond the i-th cut see only the keys of the chain
    # up to it.
    for (_, key_end, until), (_, _, beyond) in itertools.pairwise(nested):
        low = max(beyond, first, end)
        high = min(until, last)
        if low < high:
            pieces.append((low + shift, start, high - low, key_end - start, 0))


class _TreeAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, query, key, value, pieces, scale):
        out, log_sums = torch.ops.gyre.tree_attention_forward(query, key, value, pieces, scale)
        ctx.save_for_backward(query, key, value, out, log_sums, pieces)
        ctx.scale = scale
        return out

    @staticmethod
    def backward(ctx, grad):
        query, key, value, out, log_sums, pieces = ctx.saved_tensors
        grads = torch.ops.gyre.tree_attention_backward(
            grad.contiguous(), query, key, value, out, log_sums, pieces, ctx.scale
        )
        return *grads, None, None


def tree_attention(
    query, key, value, pieces: torch.Tensor, scale: float | None = None
) -> torch.Tensor:
    """Attention of a packed tree on CPU.

    Args:
        query: [N, T, D] fp32 or bf16; key, value: [G, S, D] of the same type; N a multiple of G.
        pieces: int64 [P, 5] from `tree_pieces`.
        scale: factor of the scores; 1 / sqrt(D) by default.

    Returns:
        [N, T, D]; zeros for a query that sees no key.
    """
    return _TreeAttention.apply(
        query, key, value, pieces, scale or 1.0 / math.sqrt(query.shape[-1])
    )


def visibility(node_starts, node_ends, subtree_ends, num_tokens: int) -> torch.Tensor:
    """Dense visibility, bool [T, T]: the definition, for references and pictures only."""
    # A token outside every node sees and is seen by itself alone
    until = torch.arange(1, num_tokens + 1)
    for start, end, last in zip(node_starts, node_ends, subtree_ends, strict=True):
        until[int(start) : int(end)] = int(last)
    q = torch.arange(num_tokens)[:, None]
    k = torch.arange(num_tokens)[None]
    return (k <= q) & (q < until[None])


def tree_attention_reference(
    query, key, value, visible: torch.Tensor, scale: float | None = None
) -> torch.Tensor:
    """The plain form: softmax over a dense mask, in the inputs' type (use float64)."""
    groups = query.shape[0] // key.shape[0]
    key, value = (x.repeat_interleave(groups, dim=0) for x in (key, value))
    scores = query @ key.transpose(-1, -2) * (scale or 1.0 / math.sqrt(query.shape[-1]))
    scores = scores.masked_fill(~visible, float("-inf"))
    return torch.softmax(scores, dim=-1).nan_to_num() @ value
