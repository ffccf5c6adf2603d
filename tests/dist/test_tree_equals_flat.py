"""The central claim: tree-packed training equals each trajectory run alone, in every layout."""

from __future__ import annotations

import functools

import numpy as np
import pytest
import torch

from gyre_megatron.config.training import GspoConfig, TrainingConfig
from gyre_megatron.trajectory.packing import pack
from tests.dist import gradients
from tests.dist.flatten import flat_bins, trained_trajectories
from tests.dist.tiny import VOCAB, make_checkpoint
from tests.unit.random_trees import random_tree

TOLERANCE = 1e-5
GSPO = GspoConfig(eps_low=0.5, eps_high=1.0, entropy_coefficient=0.01)
LAYOUTS = {
    "single": dict(),
    "tp2": dict(tp=2, sequence_parallel=False),
    "tp2_sp": dict(tp=2),
    "pp2": dict(pp=2),
    "pp2_vpp2": dict(pp=2, vpp=2),
    "ep2": dict(ep=2, etp=1),
    "etp2": dict(tp=2, etp=2),
    "etp2_of_dp": dict(etp=2),
    "cp2": dict(cp=2),
    "dp2": dict(),
    "tp2_sp_pp2": dict(tp=2, pp=2),
    "cp2_tp2_sp_ep2": dict(cp=2, tp=2, ep=2, etp=1),
    "pp2_cp2_ep2": dict(pp=2, cp=2, ep=2, etp=1),
    "pp2_vpp2_dp2_recompute": dict(pp=2, vpp=2, recompute="full"),
    "ep2_allgather_recompute": dict(ep=2, etp=1, moe_dispatcher="allgather", recompute="attention"),
}
WORLD = {"single": 1, "tp2_sp_pp2": 4, "cp2_tp2_sp_ep2": 4, "pp2_cp2_ep2": 4, "pp2_vpp2_dp2_recompute": 4}
NUM_BATCHES, TREES_PER_BATCH = 8, 13


def not_applicable(kind: str, layout: str) -> str | None:
    if kind == "dense" and ("ep2" in layout.split("_") or "etp2" in layout) and layout != "cp2_tp2_sp_ep2":
        return "a dense model has no experts"
    if kind != "dense" and layout == "tp2":
        return "Megatron refuses experts under tp without sequence parallelism"
    return None


CASES = [(k, name) for k in ("dense", "moe", "hybrid") for name in LAYOUTS if not not_applicable(k, name)]


def config_of(kind: str, layout: str) -> TrainingConfig:
    fields = dict(LAYOUTS[layout])
    if kind == "dense":
        fields |= dict(ep=1, etp=None)
    return TrainingConfig(token_budget=1024, gspo=GSPO, head_chunk=64, **fields)


@functools.cache
def batches_of_trees():
    seeds = range(NUM_BATCHES * TREES_PER_BATCH)
    trees = [random_tree(seed, vocab=VOCAB, max_children=3) for seed in seeds]
    return [trees[i::NUM_BATCHES] for i in range(NUM_BATCHES)]


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory):
    root = tmp_path_factory.mktemp("checkpoints")
    return functools.cache(lambda kind: make_checkpoint(kind, root / kind))


@pytest.fixture(scope="session")
def flat_results(ranks, checkpoints):
    """Per kind: every trajectory of every tree alone, on one rank."""

    @functools.cache
    def results(kind: str):
        flat = [flat_bins(trees) for trees in batches_of_trees()]
        return ranks(1).run(gradients.run_batches, checkpoints(kind), config_of(kind, "single"), flat, timeout=280)[0]

    return results


def by_execution(trees, bins, logprobs, *, flat: bool) -> list[list[np.ndarray]]:
    """Log-probabilities per execution and trained trajectory, in depth-first order."""
    found: list[list[np.ndarray]] = [[] for _ in trees]
    for bin_, values in zip(bins, logprobs, strict=True):
        for j, execution in enumerate(bin_.trajectory_executions.tolist()):
            found[execution].append(values[bin_.edge_trajectories == j])
    for tree, arrays in zip(trees, found, strict=True):
        assert len(arrays) == len(trained_trajectories(tree))
    return found


def relative(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a - b).norm() / b.norm().clamp(min=1e-12))


def assert_same_gradients(actual, expected, batch) -> None:
    assert actual.keys() == expected.keys()
    overall = torch.cat([v.flatten() for v in expected.values()]).norm()
    errors = {
        n: float((actual[n] - e).norm() / max(float(e.norm()), 1e-4 * float(overall))) for n, e in expected.items()
    }
    worst = max(errors, key=errors.__getitem__)
    assert errors[worst] < TOLERANCE, f"batch {batch}: gradient of {worst} is off by {errors[worst]:.1e}"


@pytest.mark.parametrize(("kind", "layout"), CASES, ids=[f"{k}-{n}" for k, n in CASES])
def test_tree_equals_flat(kind: str, layout: str, ranks, checkpoints, flat_results) -> None:
    config = config_of(kind, layout)
    packed = [pack(trees, config.token_budget, len(trees)) for trees in batches_of_trees()]
    assert max(len(b.node_starts) for bins in packed for b in bins) > 10
    results = ranks(WORLD.get(layout, 2)).run(gradients.run_batches, checkpoints(kind), config, packed)
    for i, (trees, bins, (sums, logprobs, grads)) in enumerate(
        zip(batches_of_trees(), packed, results[0], strict=True)
    ):
        flat_sums, flat_logprobs, flat_grads = flat_results(kind)[i]
        assert sums["loss"] == pytest.approx(flat_sums["loss"], rel=TOLERANCE)
        assert sums["num_edges"] == flat_sums["num_edges"]
        assert sums["num_tokens"] < flat_sums["num_tokens"]
        assert 0 < sums["num_clipped"] < sums["num_edges"]
        expected = by_execution(trees, flat_bins(trees), flat_logprobs, flat=True)
        for ours, theirs in zip(by_execution(trees, bins, logprobs, flat=False), expected, strict=True):
            for a, b in zip(ours, theirs, strict=True):
                np.testing.assert_allclose(a, b, rtol=TOLERANCE, atol=TOLERANCE)
        assert_same_gradients(grads, flat_grads, i)
    for other in results[1:]:  # every rank reports the same sums
        assert [r[0] for r in other] == [r[0] for r in results[0]]
