"""The CPU tree attention kernel against a dense float64 softmax."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from gyre_megatron.ops.tree_attention import (
    tree_attention,
    tree_attention_reference,
    tree_pieces,
    visibility,
)
from gyre_megatron.trajectory.packing import pack
from tests.unit.random_trees import random_tree


def packed(seed: int, count: int = 3):
    return pack([random_tree(100 * seed + i) for i in range(count)], 4096, count)[0]


def run(bin_, dtype, intervals=None, heads=4, groups=2, size=16, seed=0):
    generator = torch.Generator().manual_seed(seed)
    tokens = bin_.num_tokens
    query = torch.randn(heads, tokens, size, generator=generator, dtype=torch.float64)
    key, value = (
        torch.randn(groups, tokens, size, generator=generator, dtype=torch.float64)
        for _ in range(2)
    )
    grad = torch.randn(heads, tokens, size, generator=generator, dtype=torch.float64)
    visible = visibility(bin_.node_starts, bin_.node_ends, bin_.subtree_ends, tokens)
    rows = (
        torch.cat([torch.arange(a, b) for a, b in intervals]) if intervals else torch.arange(tokens)
    )

    expected_in = [x.clone().requires_grad_() for x in (query, key, value)]
    expected = tree_attention_reference(*expected_in, visible)[:, rows]
    expected.backward(grad[:, rows])
    actual_in = [x.to(dtype).requires_grad_() for x in (query[:, rows], key, value)]
    nodes = (bin_.node_starts, bin_.node_ends, bin_.subtree_ends)
    pieces = torch.from_numpy(
        tree_pieces(*nodes, None if intervals is None else np.array(intervals))
    )
    actual = tree_attention(*actual_in, pieces)
    actual.backward(grad[:, rows].to(dtype))
    expected_grads = [expected_in[0].grad[:, rows], expected_in[1].grad, expected_in[2].grad]
    pairs = [(actual, expected), *zip([x.grad for x in actual_in], expected_grads, strict=True)]
    return [((a.double() - e).norm() / e.norm()).item() for a, e in pairs]


@pytest.mark.parametrize("seed", range(30))
def test_equals_dense_softmax(seed):
    assert max(run(packed(seed), torch.float32, seed=seed)) < 2e-6


@pytest.mark.parametrize("seed", range(5))
def test_bf16_is_within_its_rounding(seed):
    assert max(run(packed(seed), torch.bfloat16, seed=seed)) < 2e-2


@pytest.mark.parametrize("seed", range(20))
def test_some_of_the_queries(seed):
    """Context parallelism: a rank holds scattered intervals of queries and all keys."""
    bin_ = packed(seed)
    rng = np.random.default_rng(seed)
    cuts = np.sort(rng.choice(np.arange(1, bin_.num_tokens), 6, replace=False)).tolist()
    intervals = [(cuts[0], cuts[1]), (cuts[2], cuts[3]), (cuts[4], cuts[5])]
    assert max(run(bin_, torch.float32, intervals, seed=seed)) < 2e-6


def test_pieces_cover_each_visible_pair_once():
    for seed in range(30):
        bin_ = packed(seed)
        seen = torch.zeros(bin_.num_tokens, bin_.num_tokens, dtype=torch.int)
        for q, k, queries, keys, causal in tree_pieces(
            bin_.node_starts, bin_.node_ends, bin_.subtree_ends
        ).tolist():
            block = torch.ones(queries, keys, dtype=torch.int)
            seen[q : q + queries, k : k + keys] += block.tril() if causal else block
        visible = visibility(bin_.node_starts, bin_.node_ends, bin_.subtree_ends, bin_.num_tokens)
        assert torch.equal(seen, visible.int())
        assert bin_.num_pairs == int(visible.sum())


def test_a_sibling_cannot_be_seen():
    """Changing one branch leaves the other branch's output bit-equal."""
    starts, ends, subtree = np.array([0, 4, 9]), np.array([4, 9, 15]), np.array([15, 9, 15])
    pieces = torch.from_numpy(tree_pieces(starts, ends, subtree))
    query, key, value = torch.randn(2, 15, 8), torch.randn(1, 15, 8), torch.randn(1, 15, 8)
    before = tree_attention(query, key, value, pieces)
    key[:, 4:9] += 1
    value[:, 4:9] -= 1
    after = tree_attention(query, key, value, pieces)
    assert torch.equal(before[:, 9:], after[:, 9:])
    assert not torch.equal(before[:, 4:9], after[:, 4:9])


def test_a_piece_outside_the_tensors_is_refused():
    q = torch.randn(1, 4, 8)
    with pytest.raises(IndexError, match="does not fit"):
        tree_attention(q, q, q, torch.tensor([[0, 0, 5, 5, 1]]))
    with pytest.raises(ValueError, match="not a multiple"):
        tree_attention(
            torch.randn(3, 4, 8),
            torch.randn(2, 4, 8),
            torch.randn(2, 4, 8),
            torch.tensor([[0, 0, 4, 4, 1]]),
        )
