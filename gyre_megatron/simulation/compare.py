"""Runs the policies of one simulation side by side and says where the time went."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import numpy as np

from gyre_megatron.simulation.accounts import Accounts
from gyre_megatron.simulation.build import Setting, build
from gyre_megatron.simulation.config import SimulationConfig
from gyre_megatron.simulation.residents import NEVER


@dataclass(frozen=True)
class PolicyResult:
    """One policy's run.

    Attributes:
        name: of the policy; async names its split.
        seconds: virtual time to the end of the last step.
        accounts: its history.
        computing_s: real time that the simulation took.
    """

    name: str
    seconds: float
    accounts: Accounts
    computing_s: float

    def summary(self) -> dict[str, Any]:
        """What the table and the JSON show."""
        accounts = self.accounts
        shares = accounts.seconds()
        total = sum(shares.values())
        return {
            "policy": self.name,
            "hours": self.seconds / 3600,
            "share": {name: value / total for name, value in shares.items()},
            "staleness_mean": float(np.mean(accounts.staleness)),
            "staleness_max": int(max(accounts.staleness)),
            "leaves": accounts.leaves,
            "returns": accounts.returns,
            "useless_trips": accounts.useless_trips,
            "moved_executions": accounts.moved_executions,
            "query_over_execution": accounts.longest_over_mean(),
            "mean_execution_hours": float(np.mean(accounts.execution_seconds)) / 3600,
            "mean_query_hours": float(np.mean(accounts.group_seconds)) / 3600,
        }


def run_policy(
    setting: Setting, policy: str, training_cells: int = 1, until_s: float = NEVER
) -> PolicyResult:
    """Simulate one policy; a run that takes longer than `until_s` is left and takes for ever."""
    started = time.perf_counter()
    world = setting.world(policy, training_cells)
    accounts = world.run(until_s)
    seconds = accounts.step_ends[-1] if world.is_over else NEVER
    name = policy
    if policy == "async":
        name = f"async {training_cells}+{world.num_cells - training_cells}"
    return PolicyResult(name, seconds, accounts, time.perf_counter() - started)


def best_split(setting: Setting) -> PolicyResult:
    """The policy async at the split that its user would have found: the fastest of all."""
    cluster = setting.config.cluster
    highest = cluster.num_cells if cluster.standalone_cells else cluster.num_cells - 1
    results = [run_policy(setting, "async", cells) for cells in range(1, highest + 1)]
    if not results:  # one cell cannot be split
        return run_policy(setting, "colocate")
    return min(results, key=lambda result: result.seconds)


def compare(config: SimulationConfig) -> dict[str, PolicyResult]:
    """gyre, colocate, and async at its best split, on the same executions."""
    setting = build(config)
    return {
        "gyre": run_policy(setting, "gyre"),
        "colocate": run_policy(setting, "colocate"),
        "async": best_split(setting),
    }


def comparison(results: dict[str, PolicyResult]) -> dict[str, Any]:
    """The comparison as plain values."""
    gyre = results["gyre"].seconds
    return {
        "policies": [result.summary() for result in results.values()],
        "speedup_vs_colocate": results["colocate"].seconds / gyre,
        "speedup_vs_async": results["async"].seconds / gyre,
        "computing_seconds": sum(result.computing_s for result in results.values()),
    }
