"""Elastic cells against a joint switch and a fixed split, on real engines and trainers:
`python benchmarks/bench_schedule.py --json results.json`.

One run of the main job with four cells, in which policies take turns of a few steps, so that all of
them meet the same processes and the same moments of the machine. Each cell is held to the same share
of the cores by a control group. Tool times have a long tail. The first step of a turn does not count.
Beside it stands what the simulator says of this very configuration, calibrated on one of the policies.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import common
from benchmarks.schedule.analysis import Measured
from benchmarks.schedule.job import Job
from benchmarks.schedule.prediction import predict
from benchmarks.schedule.turns import Turns
from gyre_megatron.config.loader import load_config


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="where to write the result")
    parser.add_argument("--policies", nargs="+", default=["gyre", "colocate", "async1", "async2"])
    parser.add_argument("--laps", type=int, default=5, help="turns of each policy")
    parser.add_argument("--steps", type=int, default=3, help="of a turn; the first does not count")
    parser.add_argument("--cells", type=int, default=4)
    parser.add_argument("--cores-per-cell", type=float, default=0.4)
    parser.add_argument("--groups", type=int, default=4, help="B, groups of a step")
    parser.add_argument("--executions", type=int, default=8, help="N, executions of a group")
    parser.add_argument("--capacity", type=int, default=8, help="C_e, executions of a cell")
    parser.add_argument("--tool-delay", type=float, default=1.0, help="seconds, shortest")
    parser.add_argument("--files", type=int, default=5, help="calls and tools of an execution")
    parser.add_argument("--set", action="append", default=[], metavar="a.b=c")
    parser.add_argument("--calibrate", default="colocate", help="policy that gives the rates")
    parser.add_argument("--time-limit", type=float, default=5400.0, help="seconds")
    parser.add_argument("--keep", type=Path, help="keep tasks and run in this new directory")
    options = parser.parse_args()
    if options.steps < 2:
        parser.error("--steps must be at least 2: the first step of a turn does not count")
    if options.calibrate not in options.policies or "gyre" not in options.policies:
        parser.error("--policies must hold gyre and the policy of --calibrate")
    return options


def measure(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Run, read the records, predict."""
    turns = Turns(tuple(options.policies), options.steps)
    job = Job(
        folder=folder,
        turns=turns,
        num_laps=options.laps,
        num_cells=options.cells,
        groups_per_step=options.groups,
        executions_per_group=options.executions,
        cell_capacity=options.capacity,
        cores_per_cell=options.cores_per_cell,
        tool_delay_s=options.tool_delay,
        num_files=options.files,
        settings=options.set,
    )
    job.run(options.time_limit)
    measured = Measured(job.files, turns, options.cells)
    figures = measured.figures()
    config = load_config(common.ROOT / "configs/demo_cpu.yaml", job.overrides()).config
    predicted = predict(
        measured, job.files, config.scheduler, config.training.token_budget, options.calibrate
    )
    return {**figures, "predicted": predicted, "prediction_error": predicted["max_error"]}


def main() -> None:
    """Parse, measure, print, write."""
    options = parse()
    record = common.environment()
    with tempfile.TemporaryDirectory(prefix="gyre-schedule-") as temporary:
        figures = measure(options, options.keep or Path(temporary))
    common.show(figures)
    if options.json:
        common.write_results(options.json, record, vars(options), figures)


if __name__ == "__main__":
    main()
