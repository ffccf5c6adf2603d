"""The whole control plane against cells that hold no model: what cells are ordered, what is
recorded, and what a killed run goes on with."""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path

import pytest

from gyre_megatron.config.loader import load_config
from gyre_megatron.harness.extensions import load_extensions as load_harness_extensions
from gyre_megatron.observe.timeline import TOTALS
from gyre_megatron.runtime.run_directory import RunDirectory
from gyre_megatron.runtime.service import ServiceSpec, _compose
from gyre_megatron.scheduler import decide
from gyre_megatron.scheduler.orders import (
    Checkpoint,
    Dispatch,
    FinishStep,
    MicroStep,
    Publish,
    Start,
    Sync,
)
from gyre_megatron.text.renderer import Renderer
from tests.support.scripted_cluster import ScriptedCluster, scripted_cluster

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(180)]

SMALL = {
    "run.num_steps": 3,
    "scheduler.groups_per_step": 2,
    "scheduler.executions_per_group": 4,
    "scheduler.cell_capacity": 4,
}


def check_gradients(cluster: ScriptedCluster) -> None:
    """Every micro-step that was trained is in its step's reduction, once."""
    records = cluster.lines("metrics.jsonl")
    for record in records:
        trained = sum(record["micro_steps_by_cell"].values())
        assert cluster.reduced[record["step"]] == trained == record["train/loss"] > 0
    claimed = sum(len(cluster.orders(cell, MicroStep)) for cell in range(cluster.num_cells))
    assert claimed == sum(cluster.reduced.values())


def test_a_run_from_start_to_end(tmp_path: Path):
    settings = {**SMALL, "run.checkpoint_interval": 2}
    with scripted_cluster(tmp_path, 2, settings) as cluster:
        cluster.start()
        assert cluster.wait() == 0, cluster.output
        assert [cell.reason for cell in cluster.cells] == ["", ""]
        check_gradients(cluster)
        records = cluster.lines("metrics.jsonl")
        assert [record["step"] for record in records] == [1, 2, 3]
        assert cluster.orders(0, Checkpoint) == [Checkpoint(2), Checkpoint(3)]
        assert not cluster.orders(1, Checkpoint)
        assert [order.version for order in cluster.orders(1, Publish)] == [1, 2, 3]
        assert not cluster.orders(0, Sync), "with one step in a burst everybody is up to date"
        # The engine that took part in no publication installs when it comes back.
        assert [record["publish_seconds"] for record in records] == [0.0, 0.75, 0.75]
        assert records[-1]["harness_errors"] == 3 * 2, "one execution of each group ends with 1"
        assert records[-1]["lost_calls"] == 0
        levels = [e["waterlevel"] for e in cluster.lines("timeline.jsonl") if "waterlevel" in e]
        assert max(levels) == 2 * 4 and levels.count(2 * 4) == 3, "all that was dispatched counts"
        assert levels[-1] == 0
    assert RunDirectory(cluster.directory).latest_checkpoint().step == 3


@pytest.mark.parametrize(("lag", "pulls"), [(0, False), (1, False), (0, True)])
def test_cells_that_join_a_burst_take_no_gradient_away(tmp_path: Path, lag: int, pulls: bool):
    """Executions end one by one, so that cells join while others train, also in the second step of
    a burst, in which they do not hold the step's weights yet. The core is asked for its help by
    those alone that need it."""
    settings = {
        **SMALL,
        "run.num_steps": 6,
        "scheduler.groups_per_step": 1,
        "scheduler.steps_per_burst": 2,
        "scheduler.max_lag_steps": lag,
        "rollout.harness.environment": {"TOOL_DELAY_S": "0.15"},
    }
    with scripted_cluster(tmp_path, 3, settings) as cluster:
        cluster.micro_step_s = 0.15
        cluster.pulls = pulls
        cluster.start()
        assert cluster.wait() == 0, cluster.output
        check_gradients(cluster)
        assert [record["step"] for record in cluster.lines("metrics.jsonl")] == [1, 2, 3, 4, 5, 6]
        assert any(order.prefix > 1 for order in cluster.orders(0, FinishStep))
        if pulls:
            assert not cluster.orders(0, Sync)
            assert cluster.orders(1, Sync)
            return
        joined = {order.cells for order in cluster.orders(0, Sync)}
        assert joined and all(0 not in cells for cells in joined)
        if lag == 0:
            # The core was ordered to send to the satellites that needed weights, and only those.
            given = [c for order in cluster.orders(0, Sync) for c in order.cells]
            taken = [c for c in (1, 2) for _ in cluster.orders(c, Sync)]
            assert sorted(given) == sorted(taken)


def totals(values: dict) -> dict[str, int]:
    return {name: values[name] for name in TOTALS}


def test_a_killed_run_goes_on_with_its_totals(tmp_path: Path):
    settings = {
        **SMALL,
        "run.num_steps": 4,
        "run.checkpoint_interval": 1,
        "rollout.harness.environment": {"TOOL_DELAY_S": "0.1"},
    }
    with scripted_cluster(tmp_path, 2, settings) as cluster:
        cluster.start()
        cluster.wait_until(lambda status: status["step"] == 2 and "train" not in status["roles"])
        before = totals(cluster.status())
        cluster.kill()
        assert before["role_switches"] >= 4 and before["harness_errors"] >= 3

        latest = RunDirectory(cluster.directory).latest_checkpoint().step
        cluster.start("--resume", start_step=latest)
        resumed = totals(cluster.wait_until(lambda status: status["roles"]))
        assert all(resumed[name] >= before[name] for name in TOTALS)
        assert cluster.wait() == 0, cluster.output
        records = cluster.lines("metrics.jsonl")
        assert [record["step"] for record in records] == [1, 2, 3, 4]
        for name in TOTALS:
            assert [r[name] for r in records] == sorted(r[name] for r in records)
        end = RunDirectory(cluster.directory).summary_file.read_text()

        # A finished run, resumed: nothing happens, and it says what it said.
        cluster.start("--resume", start_step=4)
        assert cluster.wait() == 0, cluster.output
        assert RunDirectory(cluster.directory).summary_file.read_text() == end


def test_a_run_with_another_group_size_is_refused_before_it_starts(tmp_path: Path):
    settings = {**SMALL, "rollout.harness.environment": {"TOOL_DELAY_S": "5"}}
    with scripted_cluster(tmp_path, 2, settings) as cluster:
        cluster.start()
        cluster.wait_until(lambda status: status["dispatched"] == 8)
        cluster.kill()
        cluster.launch("--resume", "--set", "scheduler.executions_per_group=5")
        assert cluster.wait(120) == 1
        assert "no multiple of scheduler.executions_per_group=5" in cluster.output


def test_no_event_costs_a_query(tmp_path: Path):
    """The state of a decision, the status page and the queue are answered from memory."""
    settings = {**SMALL, "rollout.harness.environment": {"TOOL_DELAY_S": "5"}}

    async def scenario(spec: ServiceSpec) -> None:
        directory = RunDirectory(tmp_path / "run")
        directory.open(resume=False)
        tasks = load_harness_extensions(spec.config.rollout.harness).tasks
        renderer = Renderer.from_checkpoint(spec.checkpoint, spec.config.rollout.proxy)
        async with contextlib.AsyncExitStack() as closing:
            url = "http://127.0.0.1:9"
            control, _ = _compose(spec, tasks, renderer, directory, url, closing)
            control.actions.dispatch(Dispatch(2))
            control.parts.store._reader.close()
            assert control.state().waterlevel == control.status()["dispatched"] == 8
            assert control.state().ready_groups == 0
            assert decide(control.state(), spec.config.scheduler) == (Start(8),)
            control.executions.start(8)
            assert control.state().num_running == 8 and control.state().num_waiting == 0
            await control.stop("")

    with scripted_cluster(tmp_path, 2, settings) as cluster:
        config = load_config(cluster.config_file).config
        asyncio.run(scenario(ServiceSpec(config, cluster.checkpoint, 1, resume=False)))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--set", "rollout.harness.tasks=/nowhere"], "no task in /nowhere"),
        (["--set", "scheduler.policy=gyr"], "did you mean gyre"),
        (["--set", "scheduler.policy=no.such.module:policy"], "cannot be imported"),
    ],
)
def test_a_mistake_is_refused_before_anything_is_left_behind(tmp_path: Path, words, message):
    with scripted_cluster(tmp_path, 2, SMALL) as cluster:
        cluster.launch(*words)
        assert cluster.wait(120) == 1
        assert message in cluster.output and "Traceback" not in cluster.output
        cluster.start()  # the same command, mended
        cluster.wait_until(lambda status: status["dispatched"] > 0)
