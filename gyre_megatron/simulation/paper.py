"""The published table of QwenGyre beside what this simulator says (`launch/simulate.py --paper`).

Two workloads, one parameter set each (the files of `FILES`). The rows named in `FITTED` were looked
at when those parameters were chosen, at most four numbers a workload; every other row is predicted.
Published figures enter nothing but the column they are printed in.

Source: arXiv 2609.33848.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from gyre_megatron.config.loader import load_section
from gyre_megatron.errors import ConfigError
from gyre_megatron.simulation.build import Setting, build
from gyre_megatron.simulation.compare import PolicyResult, best_split, run_policy
from gyre_megatron.simulation.config import SimulationConfig

LARGE, REPOSITORIES = "qwen_2_4t.yaml", "qwen_122b_repositories.yaml"
FILES = (LARGE, REPOSITORIES)
LARGE_STEPS = 48
"""Optimizer steps of the published run of the large model."""
LONG_QUERY_H = 4.0
ASYNC_TRAINING_CELLS = 5
"""Split of the published async run, an assumption: cells of eight that train."""

Published = float | tuple[float, float]
"""A figure, or the range of several runs."""

PUBLISHED: dict[str, Published] = {
    "2.4T hours, gyre": 75.42,
    "2.4T hours, colocate": 91.47,
    "2.4T hours, async": 134.55,
    "2.4T speed-up over colocate": 1.21,
    "2.4T speed-up over async": 1.78,
    "2.4T share of queries of 4 h and more": 0.611,
    "streaming alone, change of async's time": -0.116,
    "122B mean execution, hours": 1.93,
    "122B mean query, hours": 2.96,
    "122B speed-up over async": (1.42, 1.53),
    "122B speed-up over colocate": (1.36, 1.47),
    "122B four cells for eight, change of time": 0.022,
    "122B slack": 0.2085,
    "122B fine cells over colocate with streaming": 1.19,
}
FITTED = frozenset(
    {
        "2.4T hours, gyre",
        "2.4T hours, colocate",
        "2.4T speed-up over colocate",  # of two fitted rows
        "2.4T share of queries of 4 h and more",
        "122B mean execution, hours",
        "122B mean query, hours",
        "122B speed-up over colocate",
    }
)


def paper_table(folder: Path, steps: int = 12, overrides: tuple[str, ...] = ()) -> dict[str, Any]:
    """Simulate every published row.

    Args:
        folder: holds the files of `FILES`.
        steps: simulated; hours of the large run are scaled to its 48 steps.
        overrides: `a.b=c`, for both workloads.

    Returns:
        `rows` (name, paper, simulated, error, fitted), the largest errors, and the seconds it took.

    Raises:
        ConfigError: a file is missing or wrong.
    """
    started = time.perf_counter()
    load = _loader(folder, (f"run.num_steps={steps}", *overrides))
    simulated = {**_large(load, steps), **_repositories(load)}
    rows = [_row(name, simulated[name]) for name in PUBLISHED]
    return {
        "rows": rows,
        "max_abs_error": max(abs(row["error"]) for row in rows),
        "predicted_max_abs_error": max(abs(row["error"]) for row in rows if not row["fitted"]),
        "steps": steps,
        "seconds": time.perf_counter() - started,
    }


Load = Callable[..., SimulationConfig]


def _loader(folder: Path, always: tuple[str, ...]) -> Load:
    for name in FILES:
        if not (folder / name).exists():
            raise ConfigError(
                f"--paper needs {name} in {folder}; it is in examples/simulation of the repository"
            )
    return lambda name, *changes: load_section(folder / name, SimulationConfig, [*always, *changes])


def _large(load: Load, steps: int) -> dict[str, float]:
    setting = build(load(LARGE))
    blocking = build(load(LARGE, "trainer.streaming=false"))
    gyre, colocate = run_policy(setting, "gyre"), run_policy(setting, "colocate")
    training_cells = min(ASYNC_TRAINING_CELLS, setting.config.cluster.num_cells - 1)
    plain = run_policy(blocking, "async", training_cells)
    streaming = run_policy(setting, "async", training_cells)
    scale = LARGE_STEPS / steps / 3600
    queries = np.asarray(gyre.accounts.group_seconds)
    return {
        "2.4T hours, gyre": gyre.seconds * scale,
        "2.4T hours, colocate": colocate.seconds * scale,
        "2.4T hours, async": plain.seconds * scale,
        "2.4T speed-up over colocate": colocate.seconds / gyre.seconds,
        "2.4T speed-up over async": plain.seconds / gyre.seconds,
        "2.4T share of queries of 4 h and more": float(np.mean(queries >= LONG_QUERY_H * 3600)),
        "streaming alone, change of async's time": streaming.seconds / plain.seconds - 1,
    }


def _repositories(load: Load) -> dict[str, float]:
    setting = build(load(REPOSITORIES))
    gyre, colocate = run_policy(setting, "gyre"), run_policy(setting, "colocate")
    plain = best_split(build(load(REPOSITORIES, "trainer.streaming=false")))
    coarse = run_policy(_with_cells(load, 4), "gyre")
    one_cell = run_policy(_with_cells(load, 1), "gyre")
    return {
        "122B mean execution, hours": float(np.mean(gyre.accounts.execution_seconds)) / 3600,
        "122B mean query, hours": float(np.mean(gyre.accounts.group_seconds)) / 3600,
        "122B speed-up over async": plain.seconds / gyre.seconds,
        "122B speed-up over colocate": colocate.seconds / gyre.seconds,
        "122B four cells for eight, change of time": coarse.seconds / gyre.seconds - 1,
        "122B slack": _idle_share(coarse),
        "122B fine cells over colocate with streaming": one_cell.seconds / gyre.seconds,
    }


def _with_cells(load: Load, num_cells: int) -> Setting:
    """The same devices, slots and micro-steps in fewer, larger cells."""
    whole = load(REPOSITORIES)
    factor = whole.cluster.num_cells // num_cells
    cluster, scheduler = whole.cluster, whole.scheduler
    return build(
        load(
            REPOSITORIES,
            f"cluster.num_cells={num_cells}",
            f"cluster.devices_per_cell={cluster.devices_per_cell * factor}",
            f"cluster.engines_per_cell={cluster.engines_per_cell * factor}",
            f"scheduler.cell_capacity={scheduler.cell_capacity * factor}",
            f"trainer.token_budget={whole.trainer.token_budget * factor}",
        )
    )


def _idle_share(result: PolicyResult) -> float:
    seconds = result.accounts.seconds()
    return seconds["idle"] / sum(seconds.values())


def _row(name: str, simulated: float) -> dict[str, Any]:
    published = PUBLISHED[name]
    low, high = published if isinstance(published, tuple) else (published, published)
    nearest = min(max(simulated, low), high)
    if name.endswith(("change of time", "change of async's time", "slack")):
        error = simulated - nearest  # a share already: in points of the time it is a share of
    else:
        error = simulated / nearest - 1
    return {
        "name": name,
        "paper": published,
        "simulated": simulated,
        "error": error,
        "fitted": name in FITTED,
    }
