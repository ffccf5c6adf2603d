"""Random systems driven to their end by the real scheduler, each policy on the same executions.

    python -m gyre_megatron.simulation.fuzz --systems 1000 --first 0 --json fuzz.json

A system is its number: `--first 17 --systems 1` runs number 17 alone and shows what it is. Reported
are runs of the policy gyre that end in an error or get stuck, samples that are too old, moves that
served nothing, and how its time compares with the better of colocate and async at its best split.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import random
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from gyre_megatron.config.scheduler import SchedulerConfig
from gyre_megatron.errors import GyreError, StalledError
from gyre_megatron.simulation.build import Setting, build
from gyre_megatron.simulation.compare import run_policy
from gyre_megatron.simulation.config import (
    CapacityLoss,
    MeasuredRates,
    PoolConfig,
    SimulatedRun,
    SimulationConfig,
    TrainerConfig,
    TransitionConfig,
)
from gyre_megatron.simulation.residents import NEVER
from gyre_megatron.simulation.workload import WorkloadConfig

TOLERATED = 1.02
"""A run of gyre may take so many times as long as the better baseline."""
REPORT_EVERY = 1000
SHOWN = 10
"""Slow systems that are listed."""


class Outcome(NamedTuple):
    """One system under all policies.

    Attributes:
        number: of the system.
        error: what ended the run of gyre, empty after a run that went well.
        stuck: whether that was for nothing could happen any more.
        gyre_s, colocate_s, async_s: virtual seconds; infinite where a run did not end, and for async
            where no split beats colocate.
        stale: groups of gyre's run that were trained later than the bound allows.
        useless_trips: moves of gyre's run that served and trained nothing.
    """

    number: int
    error: str
    stuck: bool
    gyre_s: float
    colocate_s: float
    async_s: float
    stale: int
    useless_trips: int

    @property
    def ratio(self) -> float:
        """Gyre's time over that of the better baseline."""
        return self.gyre_s / min(self.colocate_s, self.async_s)


# Systems ------------------------------


def random_system(number: int) -> SimulationConfig:
    """System `number`: cells, groups, lag, capacity, tails, deaths, prices of moves."""
    rng = random.Random(number)
    num_cells = rng.randint(2, 6)
    standalone = rng.choice((0, 0, 0, 1))
    groups = rng.randint(1, 4)
    executions = rng.choice((1, 2, 4, 8))
    burst = rng.choice((1, 1, 2, 3))
    lag = rng.choice((0, 0, 1, 2))
    num_steps = max(rng.choice((3, 4, 6, 8)), burst)
    while num_steps * groups * executions > 128:
        num_steps, groups = max(num_steps - 1, 3, burst), max(groups - 1, 1)
    at_once = groups * executions * (burst + lag)
    room = rng.choice((0.3, 0.6, 1.0, 1.5, 2.0))
    capacity = max(1, round(at_once / (num_cells + standalone) * room))
    return SimulationConfig(
        run=SimulatedRun(name=f"system {number}", num_steps=num_steps, seed=number),
        scheduler=SchedulerConfig(
            groups_per_step=groups,
            executions_per_group=executions,
            steps_per_burst=burst,
            max_lag_steps=lag,
            max_staleness_steps=rng.choice((None, None, lag + burst - 1, lag + burst + 2)),
            cell_capacity=capacity,
        ),
        workload=WorkloadConfig(
            mean_calls=100.0,
            sigma_task=rng.choice((0.0, 0.3, 0.6)),
            sigma_execution=rng.choice((0.1, 0.25, 0.5)),
            tool_s=rng.choice((2.0, 10.0, 30.0)),
            death_share=rng.choice((0.0, 0.0, 0.05, 0.2)),
        ),
        cluster=PoolConfig(
            num_cells=num_cells,
            standalone_cells=standalone,
            measured=MeasuredRates(
                call_s=rng.choice((3.0, 10.0, 20.0)),
                slowdown=rng.choice((0.0, 0.5, 2.0)),
                recompute_us_per_token=rng.choice((0.0, 20.0, 100.0)),
                training_us_per_token=rng.choice((300.0, 1500.0, 6000.0)),
            ),
            transitions=TransitionConfig(leave_s=rng.choice((2.0, 8.5, 30.0))),
            losses=_random_losses(rng, num_cells + standalone),
        ),
        trainer=TrainerConfig(token_budget=131_072),
    )


def _random_losses(rng: random.Random, num_cells: int) -> tuple[CapacityLoss, ...]:
    """Mostly none. At least one cell keeps its engines, or no run could end."""
    number = rng.choice((0, 0, 0, 1, 2))
    losses = []
    for cell in rng.sample(range(num_cells), min(number, num_cells - 1)):
        at_s = rng.uniform(60.0, 10_000.0)
        until_s = at_s + rng.uniform(60.0, 3_600.0) if rng.random() < 0.7 else None
        share_left = rng.choice((0.0, 0.0, 0.5))
        losses.append(CapacityLoss(cell=cell, at_s=at_s, until_s=until_s, share_left=share_left))
    return tuple(losses)


# Runs ------------------------------


def run_system(number: int) -> Outcome:
    """Drive one system under every policy."""
    setting = build(random_system(number))
    error, stuck, stale, useless, gyre_s = "", False, 0, 0, NEVER
    try:
        result = run_policy(setting, "gyre")
    except Exception as failure:  # whatever it is, the fuzz counts it and goes on
        error = f"{type(failure).__name__}: {failure}"
        stuck = isinstance(failure, StalledError)
    else:
        gyre_s = result.seconds
        bound = setting.config.scheduler.staleness_bound
        stale = sum(staleness > bound for staleness in result.accounts.staleness)
        useless = result.accounts.useless_trips
    colocate_s = _baseline_s(setting, "colocate", 1, NEVER)
    cluster = setting.config.cluster
    splits = cluster.num_cells if cluster.standalone_cells else cluster.num_cells - 1
    best_s, async_s = colocate_s, NEVER
    for training_cells in range(1, splits + 1):
        async_s = min(async_s, _baseline_s(setting, "async", training_cells, best_s))
        best_s = min(best_s, async_s)
    return Outcome(number, error, stuck, gyre_s, colocate_s, async_s, stale, useless)


def _baseline_s(setting: Setting, policy: str, training_cells: int, until_s: float) -> float:
    """A baseline that cannot go on with the engines that are left is no baseline."""
    try:
        return run_policy(setting, policy, training_cells, until_s).seconds
    except GyreError:
        return NEVER


def summary(outcomes: Sequence[Outcome], seconds: float, processes: int) -> dict[str, Any]:
    """What the fuzz found, as plain values."""
    compared = [o for o in outcomes if not o.error]
    ratios = np.array([o.ratio for o in compared] or [NEVER])
    slow = sorted((o for o in compared if o.ratio > TOLERATED), key=lambda o: -o.ratio)
    quantiles = (0.01, 0.05, 0.25, 0.5, 0.75, 0.95, 0.99, 0.999)
    return {
        "systems": len(outcomes),
        "errors": [o.number for o in outcomes if o.error and not o.stuck],
        "deadlocks": [o.number for o in outcomes if o.stuck],
        "stale_samples": sum(o.stale for o in outcomes),
        "useless_trips": sum(o.useless_trips for o in outcomes),
        "with_useless_trips": [o.number for o in outcomes if o.useless_trips],
        "ratio": {
            "mean": float(ratios.mean()),
            "worst": float(ratios.max()),
            **{f"p{100 * q:g}": float(np.quantile(ratios, q)) for q in quantiles},
        },
        "faster_than_both": float(np.mean(ratios < 1.0)),
        "slower_than_tolerated": len(slow) / len(outcomes),
        "slowest": [{"number": o.number, "ratio": o.ratio} for o in slow[:SHOWN]],
        "seconds": seconds,
        "processes": processes,
    }


# Command ------------------------------


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="gyre_megatron.simulation.fuzz", description=__doc__)
    parser.add_argument("--systems", type=int, default=1000, metavar="N")
    parser.add_argument("--first", type=int, default=0, metavar="NUMBER", help="of the systems")
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=NEVER, help="begin no system after that")
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args(arguments)
    started = time.perf_counter()
    numbers = range(options.first, options.first + options.systems)
    outcomes = []
    for outcome in _run_all(numbers, options.processes):
        outcomes.append(outcome)
        if len(outcomes) % REPORT_EVERY == 0:
            print(f"{len(outcomes)} of {len(numbers)}", file=sys.stderr)
        if time.perf_counter() - started > options.seconds:
            break
    result = summary(outcomes, time.perf_counter() - started, options.processes)
    if options.systems == 1:
        print(random_system(options.first).model_dump_json(indent=1, exclude_defaults=True))
        print(outcomes[0])
    for outcome in outcomes:
        if outcome.error:
            print(f"system {outcome.number}: {outcome.error}")
    print(json.dumps(result, indent=1))
    if options.json is not None:
        options.json.write_text(json.dumps(result, indent=1))
    return 0


def _run_all(numbers: range, processes: int) -> Iterable[Outcome]:
    if processes == 1:
        yield from map(run_system, numbers)
        return
    with multiprocessing.get_context("spawn").Pool(processes) as pool:
        yield from pool.imap(run_system, numbers, chunksize=20)


if __name__ == "__main__":
    sys.exit(main())
