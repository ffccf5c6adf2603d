"""The batch of the step in progress: finished groups of a real store into micro-steps."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path

import pytest

from gyre_megatron.config.loader import GyreConfig
from gyre_megatron.observe.batch_record import BatchRecord
from gyre_megatron.runtime.batch import BatchBuilder
from gyre_megatron.runtime.micro_steps import MicroStepQueue
from gyre_megatron.trajectory.packed_bin import PackedBin
from gyre_megatron.trajectory.store import TrajectoryStore
from tests.support.trees import TreeBuilder, open_store


def finish_group(store: TrajectoryStore, name: str, executions: list[tuple[float, int]]) -> None:
    for execution_id, (reward, tokens) in zip(
        store.add_group(name, {}, len(executions), 0), executions, strict=True
    ):
        builder = TreeBuilder(store, execution_id)
        builder.call(builder.context(None, 8), tokens)
        builder.finish(reward)


def admitted(
    store: TrajectoryStore, config: GyreConfig, num_groups: int, linear_cost: int = 1
) -> tuple[BatchRecord, list[PackedBin]]:
    queue = MicroStepQueue()
    builder = BatchBuilder(store, config, queue, 1, linear_cost)
    for _ in range(num_groups):
        asyncio.run(builder.admit_next(3))
    bins = []
    while (claimed := queue.claim(0)) is not None:
        bins += [PackedBin.from_bytes(data) for data in claimed[1]]
    assert builder.record.num_bins == len(bins)
    return builder.next_step(), bins


def configured(**sections) -> GyreConfig:
    scheduler = {"groups_per_step": 2, "executions_per_group": 4}
    return GyreConfig.model_validate({"scheduler": scheduler, **sections})


def test_an_execution_that_fits_no_bin_is_counted_and_the_run_goes_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Its group used to raise in `admit`, and again after every --resume."""
    config = configured(training={"token_budget": 70})
    with open_store(tmp_path) as store, caplog.at_level(logging.WARNING):
        finish_group(store, "a", [(1.0, 61), (1.0, 20), (0.0, 20), (0.5, 61)])
        finish_group(store, "b", [(1.0, 20), (0.0, 20), (0.0, 20), (1.0, 20)])
        record, bins = admitted(store, config, 2)
    assert record.group_ids == ["a", "b"]
    assert record.excluded == {"trajectory_too_long": 2} and record.statuses == {"scored": 8}
    assert record.rewards == [1.0, 0.0, 1.0, 0.0, 0.0, 1.0]
    assert "execution a.00 is excluded" in caplog.text and "token_budget is 70" in caplog.text
    # Both groups weigh one half, though two executions of one of them are missing.
    assert sum(float(b.edge_weights.sum()) for b in bins) == pytest.approx(1.0)


def test_bins_are_levelled_by_what_the_model_costs(tmp_path: Path) -> None:
    """One long trajectory, many short ones, two bins: where attention dominates the long one lies
    almost alone, where matrix products dominate both bins hold as many tokens."""
    config = configured(training={"token_budget": 900})
    group = [(1.0, 590), *[(0.0, 50)] * 12]
    with open_store(tmp_path) as store:
        finish_group(store, "a", group)
        sizes = [
            sorted(b.num_tokens for b in admitted(store, config, 1, linear_cost)[1])
            for linear_cost in (1, 100_000)
        ]
    assert sizes == [[600, 720], [660, 660]]


def test_a_batch_that_is_given_up_is_ready_again(tmp_path: Path) -> None:
    """Its cells had to serve, so its gradients are lost; the groups are trained once more."""
    config = configured(training={"token_budget": 70})
    with open_store(tmp_path) as store:
        finish_group(store, "a", [(1.0, 20), (0.0, 20)])
        builder = BatchBuilder(store, config, MicroStepQueue(), 1, 1)
        asyncio.run(builder.admit_next(0))
        assert builder.num_admitted == 1 and builder.ready_versions == ()
        builder.give_up()
        assert builder.num_admitted == 0 and builder.ready_versions == (0,)
        asyncio.run(builder.admit_next(0))
        assert builder.record.group_ids == ["a"]
