"""Tree attention and block tables on a GPU. Run with `pytest -m gpu tests/gpu`."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from gyre_megatron.ops.tree_attention import tree_attention_reference, visibility
from gyre_megatron.ops.tree_block_mask import tree_block_tables
from gyre_megatron.trajectory.packing import pack
from tests.unit.random_trees import random_tree

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def packed_nodes(seed: int, multiple: int) -> tuple[torch.Tensor, int]:
    """int32 [3, M] and the number of tokens, padded by one root node."""
    bin_ = pack([random_tree(50 * seed + i, max_length=90) for i in range(6)], 1 << 16, 6)[0]
    nodes = np.stack([bin_.node_starts, bin_.node_ends, bin_.subtree_ends])
    last = -(-bin_.num_tokens // multiple) * multiple
    if last > bin_.num_tokens:
        nodes = np.concatenate([nodes, [[bin_.num_tokens], [last], [last]]], axis=1)
    return torch.from_numpy(nodes.astype(np.int32)), last


@pytest.mark.parametrize("part", [False, True])
@pytest.mark.parametrize("seed", range(8))
def test_block_tables_equal_the_cpu_path(seed: int, part: bool) -> None:
    nodes, num_tokens = packed_nodes(seed, 128)
    held = torch.arange(num_tokens // 128)[::2].int() if part else None
    expected = tree_block_tables(nodes, num_tokens, 128, held)
    actual = tree_block_tables(nodes.cuda(), num_tokens, 128, None if held is None else held.cuda())
    for counts, table, other_counts, other in zip(
        actual[::2], actual[1::2], expected[::2], expected[1::2], strict=True
    ):
        assert torch.equal(counts.cpu(), other_counts)
        valid = torch.arange(other.shape[-1]) < other_counts[..., None]
        assert torch.equal(table.cpu()[valid], other[valid])


@pytest.mark.parametrize("seed", range(3))
def test_flex_attention_equals_dense_softmax(seed: int) -> None:
    from gyre_megatron.training.flex import flex_tree_attention
    from gyre_megatron.training.tree_batch import TreeParams

    nodes, num_tokens = packed_nodes(seed, 128)
    params = TreeParams(nodes=tuple(nodes.numpy()), intervals=np.array([[0, num_tokens]]), cache={})
    tensors = [torch.randn(h, num_tokens, 64, device="cuda", requires_grad=True) for h in (4, 2, 2)]
    exact = [x.detach().double().requires_grad_() for x in tensors]
    visible = visibility(*nodes.numpy(), num_tokens).cuda()
    expected = tree_attention_reference(*exact, visible)
    actual = flex_tree_attention(*tensors, params, 64**-0.5)
    grad = torch.randn_like(actual)
    actual.backward(grad)
    expected.backward(grad.double())
    for mine, other in (
        (actual, expected),
        *((a.grad, b.grad) for a, b in zip(tensors, exact, strict=True)),
    ):
        assert float((mine.double() - other).norm() / other.norm()) < 5e-3
