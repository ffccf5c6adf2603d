"""`gyre simulate FILE`: the policies side by side on one workload and one cluster."""

from __future__ import annotations

import argparse
import itertools
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from gyre_megatron.config.loader import load_section
from gyre_megatron.errors import ConfigError
from gyre_megatron.simulation.build import build
from gyre_megatron.simulation.compare import compare, comparison, run_policy
from gyre_megatron.simulation.config import SimulationConfig
from gyre_megatron.simulation.paper import paper_table
from gyre_megatron.simulation.pictures import draw_front, draw_gantt, pareto_front

SWEEPS = {
    "cells": "cluster.num_cells",
    "phi": "scheduler.max_lag_steps",
    "mu": "scheduler.steps_per_burst",
    "capacity": "scheduler.cell_capacity",
}
"""Short names of --sweep; any other name is a dotted key."""


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="gyre simulate", description=__doc__)
    parser.add_argument(
        "file",
        nargs="?",
        help="simulation in YAML, for example examples/simulation/small.yaml; with --paper the "
        "folder of the published workloads' files",
    )
    parser.add_argument(
        "--paper", action="store_true", help="QwenGyre's published table beside what is simulated"
    )
    parser.add_argument(
        "--steps", type=int, default=12, help="optimizer steps of each run of --paper"
    )
    parser.add_argument("--set", action="append", default=[], dest="overrides", metavar="a.b=c")
    parser.add_argument(
        "--sweep",
        nargs="+",
        default=[],
        metavar="name=v1,v2",
        help=f"policy gyre over every combination; names: {', '.join(SWEEPS)}, or dotted keys",
    )
    parser.add_argument("--pictures", type=Path, metavar="FOLDER", help="write PNG pictures here")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the result here")
    options = parser.parse_args(arguments)
    if options.pictures is not None:
        options.pictures.mkdir(parents=True, exist_ok=True)
    if options.paper:
        folder = Path(options.file or "examples/simulation")
        result = _paper(folder, options.steps, options.overrides)
    elif options.file is None:
        parser.error(
            "the file of a simulation is missing, for example examples/simulation/small.yaml"
        )
    elif options.sweep:
        result = _sweep(options.file, options.overrides, options.sweep, options.pictures)
    else:
        config = load_section(options.file, SimulationConfig, options.overrides)
        result = _compare(config, options.pictures)
    if options.json is not None:
        options.json.write_text(json.dumps(result, indent=1))
    return 0


def _paper(folder: Path, steps: int, overrides: Sequence[str]) -> dict[str, Any]:
    result = paper_table(folder, steps, tuple(overrides))
    table = Table(title="QwenGyre, arXiv 2609.33848")
    for name in ("row", "paper", "simulated", "error", "fitted"):
        table.add_column(name, justify="left" if name == "row" else "right")
    for row in result["rows"]:
        published = row["paper"]
        if isinstance(published, tuple):
            published = f"{published[0]:g} to {published[1]:g}"
        fitted = "yes" if row["fitted"] else ""
        simulated = f"{row['simulated']:.3f}"
        table.add_row(row["name"], str(published), simulated, f"{row['error']:+.1%}", fitted)
    Console().print(table)
    print(
        f"largest error {result['max_abs_error']:.1%}, of rows that were not fitted "
        f"{result['predicted_max_abs_error']:.1%}; {steps} steps a run"
    )
    return result


def _compare(config: SimulationConfig, pictures: Path | None) -> dict[str, Any]:
    results = compare(config)
    result = comparison(results)
    table = Table(title=config.run.name)
    shares = list(result["policies"][0]["share"])
    for name in ("policy", "hours", *shares, "staleness", "moved"):
        table.add_column(name, justify="right")
    for policy in result["policies"]:
        table.add_row(
            policy["policy"],
            f"{policy['hours']:.2f}",
            *(f"{policy['share'][share]:.1%}" for share in shares),
            f"{policy['staleness_mean']:.1f}, {policy['staleness_max']}",
            str(policy["moved_executions"]),
        )
    Console().print(table)
    print(
        f"gyre is {result['speedup_vs_colocate']:.2f}x as fast as colocate and "
        f"{result['speedup_vs_async']:.2f}x as fast as async at its best split"
    )
    if pictures is not None:
        for name, run in results.items():
            draw_gantt(run.accounts, f"{config.run.name}: {run.name}", pictures / f"{name}.png")
    return result


def _sweep(
    file: str, overrides: Sequence[str], sweep: Sequence[str], pictures: Path | None
) -> dict[str, Any]:
    points = []
    table = Table(title="policy gyre")
    for column in ("point", "hours", "mean staleness", "idle"):
        table.add_column(column, justify="right")
    for name, chosen in _points(sweep):
        config = load_section(file, SimulationConfig, [*overrides, *chosen])
        summary = run_policy(build(config), "gyre").summary()
        points.append({"name": name, **summary})
        table.add_row(
            name,
            f"{summary['hours']:.2f}",
            f"{summary['staleness_mean']:.2f}",
            f"{summary['share']['idle']:.1%}",
        )
    Console().print(table)
    front = [point["name"] for point in pareto_front(points)]
    print(f"nothing is better in both time and staleness than: {'; '.join(front)}")
    if pictures is not None:
        draw_front(points, pictures / "front.png")
    return {"points": points, "front": front}


def _points(sweep: Sequence[str]) -> Iterator[tuple[str, list[str]]]:
    """Every combination: its name and its overrides."""
    choices = []
    for item in sweep:
        name, separator, values = item.partition("=")
        if not separator or not values:
            raise ConfigError(f"--sweep {item!r} is not of the form name=value,value")
        key = SWEEPS.get(name, name)
        choices.append([(f"{name}={value}", f"{key}={value}") for value in values.split(",")])
    for combination in itertools.product(*choices):
        yield " ".join(name for name, _ in combination), [word for _, word in combination]
