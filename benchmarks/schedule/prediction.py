"""What the simulator says of exactly this run: its rates are taken from the turns of one policy,
and the time of every other policy is predicted.

Nothing is fitted: durations of executions, tokens, training speed and the costs of moves are those
that the calibrating policy's steps recorded.
"""

from __future__ import annotations

import statistics
from typing import Any

import numpy as np

from benchmarks.schedule.analysis import Measured
from benchmarks.schedule.turns import split
from gyre_megatron.config.scheduler import SchedulerConfig
from gyre_megatron.observe.files import RunFiles
from gyre_megatron.simulation.build import Setting
from gyre_megatron.simulation.compare import run_policy
from gyre_megatron.simulation.config import (
    MeasuredRates,
    PoolConfig,
    SimulationConfig,
    TransitionConfig,
)
from gyre_megatron.simulation.serving import LoadServing
from gyre_megatron.simulation.workload import Executions
from gyre_megatron.simulation.world import Costs
from gyre_megatron.trajectory.store import TrajectoryStore

NUM_STEPS = 40
"""Steps that are simulated: enough for the draw of executions not to matter."""


def predict(
    measured: Measured,
    files: RunFiles,
    scheduler: SchedulerConfig,
    token_budget: int,
    calibrate: str,
) -> dict[str, Any]:
    """Seconds a step of every policy.

    Args:
        scheduler: of the run; batch, group size and capacity.
        calibrate: the policy whose steps give the rates.
    """
    setting = _setting(measured, files, scheduler, token_budget, calibrate)
    figures: dict[str, Any] = {"seconds": {}, "error": {}, "calibrated_on": calibrate}
    for name in dict.fromkeys(measured.turns.policies):
        simulated = run_policy(setting, *split(name)).seconds / NUM_STEPS
        real = statistics.median(measured.seconds(name))
        figures["seconds"][name] = simulated
        figures["error"][name] = simulated / real - 1.0
    others = [abs(e) for name, e in figures["error"].items() if name != calibrate]
    figures["max_error"] = max(others, default=0.0)
    return figures


def _setting(
    measured: Measured, files: RunFiles, scheduler: SchedulerConfig, token_budget: int, policy: str
) -> Setting:
    steps = measured.of(policy)
    groups = {group for step in steps for group in step.record["groups"]}
    durations, calls, call_s = _executions(files, groups)
    tokens = sum(step.record["tokens"]["trained"] for step in steps) / len(durations)
    training = [sum(step.record["training_seconds_by_cell"].values()) for step in steps]
    micro_steps = [sum(step.record["micro_steps_by_cell"].values()) for step in steps]
    moves = measured.transition_seconds(policy)
    publish = statistics.fmean(step.record["publish_seconds"] for step in steps)
    transitions = TransitionConfig(
        leave_s=moves["rollout_to_train"]["mean"],
        return_s=moves["train_to_rollout"]["mean"],
        sync_s=0.0,
        publish_s=publish,
        optimizer_s=0.0,
    )
    serving = LoadServing(call_s, 0.0, scheduler.cell_capacity, 0.0)
    costs = Costs(
        serving=serving,
        training_s_per_token=sum(training) / (tokens * len(durations)),
        tokens_per_micro_step=max(1, round(tokens * len(durations) / sum(micro_steps))),
        transitions=transitions,
        move_s=serving.recompute_s,
        streaming=True,
    )
    num = NUM_STEPS * scheduler.groups_per_step * scheduler.executions_per_group
    drawn = np.random.default_rng(0).choice(durations, num)
    executions = Executions(
        calls=np.full(num, calls),
        tool_s=np.maximum(drawn / calls - call_s, 0.0),
        trained_tokens=np.full(num, tokens),
        context_tokens=np.full(num, 0.0),
    )
    config = SimulationConfig(
        run={"num_steps": NUM_STEPS},
        scheduler=scheduler,
        cluster=PoolConfig(
            num_cells=measured.num_cells,
            transitions=transitions,
            measured=MeasuredRates(call_s=call_s, training_us_per_token=1.0),
        ),
        trainer={"token_budget": max(token_budget, 16)},
    )
    return Setting(config, executions, costs, scheduler.cell_capacity)


def _executions(files: RunFiles, groups: set[str]) -> tuple[np.ndarray, float, float]:
    """Seconds of each execution, calls of a mean one, seconds of a mean call."""
    durations: list[float] = []
    num_calls = 0
    call_s = 0.0
    with TrajectoryStore(files.store_file, read_only=True) as store:
        for execution in store.executions():
            if execution.group_id not in groups:
                continue
            durations.append(execution.finished_at - execution.started_at)
            for call in store.calls(execution.execution_id):
                num_calls += 1
                call_s += call.finished_at - call.started_at
    return np.array(durations), num_calls / len(durations), call_s / num_calls
