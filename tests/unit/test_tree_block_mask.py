"""Block tables from node intervals against the dense mask and FlexAttention's own construction."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from gyre_megatron.ops.tree_attention import tree_attention_reference, visibility
from gyre_megatron.ops.tree_block_mask import (
    subtree_end_of_tokens,
    tree_block_mask,
    tree_block_tables,
    tree_block_tables_reference,
)
from gyre_megatron.trajectory.packing import pack
from tests.unit.random_trees import random_tree


def nodes_of(seed: int, count: int = 4, length: int = 30) -> tuple[torch.Tensor, int]:
    bin_ = pack(
        [random_tree(50 * seed + i, max_length=length) for i in range(count)], 1 << 16, count
    )[0]
    return torch.from_numpy(
        np.stack([bin_.node_starts, bin_.node_ends, bin_.subtree_ends])
    ), bin_.num_tokens


def rows_of(tables) -> list[list[list[int]]]:
    """Index lists of the four tables, cut to their counts."""
    pairs = zip(tables[::2], tables[1::2], strict=True)
    return [
        [row[:n].tolist() for n, row in zip(counts[0, 0], table[0, 0], strict=True)]
        for counts, table in pairs
    ]


@pytest.mark.parametrize("block", [1, 2, 7, 16, 64])
@pytest.mark.parametrize("seed", range(12))
def test_tables_equal_the_dense_mask(seed: int, block: int) -> None:
    nodes, num_tokens = nodes_of(seed)
    if block == 1:
        nodes, num_tokens = nodes_of(seed, count=3, length=4)
    expected = tree_block_tables_reference(nodes.numpy(), num_tokens, block)
    actual = rows_of(tree_block_tables(nodes, num_tokens, block))
    if (
        block == 1
    ):  # the diagonal of single tokens is whole, and counting it as partial is right too
        expected[0] = [sorted([*row, i]) for i, row in enumerate(expected[0])]
        expected[1] = [[j for j in row if j != i] for i, row in enumerate(expected[1])]
        expected[2] = [sorted([*row, i]) for i, row in enumerate(expected[2])]
        expected[3] = [[j for j in row if j != i] for i, row in enumerate(expected[3])]
    assert actual == expected


@pytest.mark.parametrize("seed", range(6))
def test_some_query_blocks(seed: int) -> None:
    """Context parallelism: rows of the held blocks, and the transposed tables in local numbers."""
    nodes, num_tokens = nodes_of(seed)
    block = 8
    num_blocks = -(-num_tokens // block)
    held = np.sort(
        np.random.default_rng(seed).choice(num_blocks, max(1, num_blocks // 2), replace=False)
    )
    actual = rows_of(tree_block_tables(nodes, num_tokens, block, torch.from_numpy(held)))
    assert actual == tree_block_tables_reference(nodes.numpy(), num_tokens, block, held)


@pytest.mark.parametrize("seed", range(3))
def test_equals_flex_attentions_own(seed: int) -> None:
    nodes, num_tokens = nodes_of(seed)
    until = subtree_end_of_tokens(nodes, num_tokens)
    theirs = create_block_mask(
        lambda b, h, q, k: (k <= q) & (q < until[k]),
        None,
        None,
        num_tokens,
        num_tokens,
        device="cpu",
        BLOCK_SIZE=32,
    )
    names = ("kv_num_blocks", "kv_indices", "full_kv_num_blocks", "full_kv_indices")
    names += ("q_num_blocks", "q_indices", "full_q_num_blocks", "full_q_indices")
    ours = rows_of(tree_block_tables(nodes, num_tokens, 32))
    assert ours == [[sorted(r) for r in t] for t in rows_of([getattr(theirs, n) for n in names])]


@pytest.mark.parametrize("part", [False, True])
def test_flex_attention_eager_accepts_the_mask(part: bool) -> None:
    """Mask function and tables through FlexAttention's eager path."""
    nodes, num_tokens = nodes_of(3)
    block = 16
    if num_tokens % block:
        last = num_tokens + -num_tokens % block
        nodes = torch.cat(
            [nodes, torch.tensor([[num_tokens], [last], [last]], dtype=torch.int32)], dim=1
        )
        num_tokens = last
    held = torch.arange(num_tokens // block)[::2] if part else None
    rows = (
        torch.arange(num_tokens)
        if held is None
        else (held[:, None] * block + torch.arange(block)).flatten()
    )
    query, key, value = (torch.randn(1, h, num_tokens, 8) for h in (4, 2, 2))
    mask = tree_block_mask(nodes, num_tokens, block, held)
    actual = flex_attention(query[:, :, rows], key, value, block_mask=mask, enable_gqa=True)
    visible = visibility(*nodes.numpy(), num_tokens)[rows]
    expected = tree_attention_reference(
        query[0][:, rows].double(), key[0].double(), value[0].double(), visible
    )
    torch.testing.assert_close(actual[0].double(), expected, rtol=1e-5, atol=1e-5)


def test_nodes_out_of_order_are_refused() -> None:
    with pytest.raises(ValueError, match="DFS order"):
        tree_block_tables(torch.tensor([[0, 5], [4, 8], [8, 8]], dtype=torch.int32), 8)
    with pytest.raises(ValueError, match="end at token 4 of 9"):
        tree_block_tables(torch.tensor([[0], [4], [4]], dtype=torch.int32), 9)
