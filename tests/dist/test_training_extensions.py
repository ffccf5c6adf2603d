"""An objective and an attention core of the user's own, at work in the trainer."""

from __future__ import annotations

import functools
from pathlib import Path

import numpy as np
import pytest

from gyre_megatron.config.training import GspoConfig, TrainingConfig
from gyre_megatron.trajectory.packing import pack
from tests.dist.gradients import Canonical, make_trainer, run_batches
from tests.dist.tiny import VOCAB, make_checkpoint
from tests.support import training_extensions
from tests.unit.random_trees import random_tree

MINE = "tests.support.training_extensions"
WIDE = GspoConfig(eps_low=0.9, eps_high=9.0)


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory):
    root = tmp_path_factory.mktemp("extensions")
    return functools.cache(lambda kind: make_checkpoint(kind, root / kind))


def some_bins():
    trees = [random_tree(700 + i, vocab=VOCAB, max_children=3) for i in range(4)]
    return pack(trees, 512, len(trees))


def assert_close(actual: Canonical, expected: Canonical, factor: float, tolerance: float) -> None:
    for name, values in expected.items():
        difference = float((actual[name] - factor * values).norm())
        assert difference <= tolerance * max(float(factor * values.norm()), 1e-6), name


@pytest.mark.parametrize("layout", [{}, {"cp": 2}, {"pp": 2}], ids=["single", "cp2", "pp2"])
def test_an_objective_of_ones_own_trains(layout: dict, ranks, checkpoints) -> None:
    """Ours times an option of 3: three times the loss and the gradients."""
    fields = dict(token_budget=512, gspo=WIDE, **layout)
    ours = TrainingConfig(**fields)
    mine = TrainingConfig(
        objective=f"{MINE}:scaled_gspo", objective_options={"factor": 3.0}, **fields
    )
    pool = ranks(2 if layout else 1)
    expected, _, gradients = pool.run(run_batches, checkpoints("dense"), ours, [some_bins()])[0][0]
    sums, _, scaled = pool.run(run_batches, checkpoints("dense"), mine, [some_bins()])[0][0]
    assert sums["loss"] == pytest.approx(3 * expected["loss"], rel=1e-5)
    assert sums["num_edges"] == expected["num_edges"]
    assert_close(scaled, gradients, 3.0, 1e-5)


def score_and_count(checkpoint: Path, config: TrainingConfig, bins) -> tuple[dict, list, int]:
    training_extensions.calls = 0
    sums, logprobs, _ = run_batches(checkpoint, config, [bins])[0]
    return sums, logprobs, training_extensions.calls


@pytest.mark.parametrize("layout", [{}, {"cp": 2}], ids=["single", "cp2"])
def test_an_attention_core_of_ones_own_is_the_one_that_runs(layout: dict, ranks, checkpoints) -> None:
    pool = ranks(2 if layout else 1)
    fields = dict(token_budget=512, gspo=WIDE, **layout)
    results = {
        name: pool.run(
            score_and_count,
            checkpoints("dense"),
            TrainingConfig(attention=name, **fields),
            some_bins(),
        )[0]
        for name in ("auto", "cpu", f"{MINE}:dense_core")
    }
    expected, logprobs, calls = results.pop("auto")
    assert calls == 0
    sums, named, _ = results["cpu"]
    assert sums == expected
    assert all(np.array_equal(a, b) for a, b in zip(named, logprobs, strict=True))
    sums, mine, calls = results[f"{MINE}:dense_core"]
    assert calls > 0
    assert sums["loss"] == pytest.approx(expected["loss"], rel=1e-5)
    for a, b in zip(mine, logprobs, strict=True):
        np.testing.assert_allclose(a, b, atol=2e-5)


def build(checkpoint: Path, config: TrainingConfig) -> None:
    make_trainer(checkpoint, config)


def test_a_core_that_cannot_run_here_is_refused_by_the_trainer(ranks, checkpoints) -> None:
    with pytest.raises(RuntimeError, match="training.attention=flex on cpu: FlexAttention has no"):
        ranks(1).run(build, checkpoints("dense"), TrainingConfig(attention="flex"))
