"""The gated delta rule over forests against the plain recurrence, path by path."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from gyre_megatron.training.delta_rule import chunked_delta_rule, forest_delta_rule, plan_forest
from gyre_megatron.training.gated_delta_net import path_convolution
from gyre_megatron.trajectory.packing import pack
from tests.unit.random_trees import random_tree

HEADS, KEY, VALUE = 2, 8, 6


def recurrence(query, key, value, decay, beta, state):
    """S <- exp(g) S; S <- S + k (beta (v - S^T k))^T; out = S^T q / sqrt(K). Inputs [L, N, ...]."""
    out = []
    for q, k, v, g, b in zip(query, key, value, decay, beta, strict=True):
        state = state * g.exp()[:, None, None]
        read = (state * k[..., None]).sum(-2)
        state = state + k[..., None] * (b[:, None] * (v - read))[:, None]
        out.append((state * q[..., None]).sum(-2) * KEY**-0.5)
    return torch.stack(out), state


def inputs(length: int, seed: int):
    generator = torch.Generator().manual_seed(seed)
    rand = lambda *shape: torch.randn(*shape, generator=generator, dtype=torch.float64)  # noqa: E731
    unit = lambda x: x / x.norm(dim=-1, keepdim=True)  # noqa: E731
    query, key = unit(rand(length, HEADS, KEY)), unit(rand(length, HEADS, KEY))
    decay = -rand(length, HEADS).abs() * 3
    return query, key, rand(length, HEADS, VALUE), decay, rand(length, HEADS).sigmoid()


@pytest.mark.parametrize("length", [1, 2, 63, 64, 65, 200])
def test_chunks_equal_the_recurrence(length: int) -> None:
    tensors = [x.requires_grad_() for x in inputs(length, length)]
    state = torch.randn(HEADS, KEY, VALUE, dtype=torch.float64, requires_grad=True)
    expected, final = recurrence(*tensors, state)
    weights = torch.randn_like(expected)
    grads = torch.autograd.grad((expected * weights).sum() + final.sum(), [*tensors, state])
    copies = [x.detach().float()[None].requires_grad_() for x in (*tensors, state)]
    actual, last = chunked_delta_rule(*copies)
    torch.testing.assert_close(actual[0].double(), expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(last[0].double(), final, rtol=1e-4, atol=1e-5)
    own = torch.autograd.grad((actual[0] * weights.float()).sum() + last.sum(), copies)
    for mine, other in zip(own, grads, strict=True):
        assert float((mine[0].double() - other).norm() / other.norm()) < 2e-5


@pytest.mark.parametrize("seed", range(12))
def test_forest_equals_each_path_alone(seed: int) -> None:
    bin_ = pack([random_tree(9 * seed + i, max_length=20) for i in range(3)], 4096, 3)[0]
    plan = plan_forest(bin_.node_starts, bin_.node_ends, bin_.subtree_ends, torch.device("cpu"))
    tensors = inputs(bin_.num_tokens, seed)
    actual = forest_delta_rule(*(x.float() for x in tensors), plan)
    convolved = path_convolution(
        tensors[2].flatten(1), torch.ones(HEADS * VALUE, 4, dtype=torch.float64), plan.previous
    )
    previous = plan.previous.numpy()
    for leaf in (bin_.node_ends[bin_.node_ends == bin_.subtree_ends] - 1).tolist():
        path = [leaf]
        while previous[path[-1]] < bin_.num_tokens:
            path.append(int(previous[path[-1]]))
        path = path[::-1]
        assert bin_.positions[path].tolist() == list(range(len(path)))
        expected, _ = recurrence(*(x[path] for x in tensors), torch.zeros(HEADS, KEY, VALUE, dtype=torch.float64))
        torch.testing.assert_close(actual[path].double(), expected, rtol=1e-4, atol=1e-5)
        values = tensors[2].flatten(1)[path].numpy()
        sums = np.stack([values[max(0, i - 3) : i + 1].sum(0) for i in range(len(path))])
        np.testing.assert_allclose(convolved[path].numpy(), sums, rtol=1e-10, atol=1e-10)


def test_nothing_passes_between_siblings() -> None:
    """Changing one branch leaves the other bit-equal: outputs and gradients."""
    nodes = (np.array([0, 7, 12]), np.array([7, 12, 20]), np.array([20, 12, 20]))
    plan = plan_forest(*nodes, torch.device("cpu"))
    tensors = [x.float() for x in inputs(20, 0)]
    before = forest_delta_rule(*tensors, plan)
    changed = [x.clone() for x in tensors]
    for x in changed:
        x[7:12] *= 0.5
    after = forest_delta_rule(*changed, plan)
    assert torch.equal(before[12:], after[12:]) and torch.equal(before[:7], after[:7])
    assert not torch.equal(before[7:12], after[7:12])
