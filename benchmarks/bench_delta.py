"""Weights between two hosts over a slow link, whole and as what changed:
`python benchmarks/bench_delta.py --json results.json`.

Two network namespaces stand for hosts, joined by a link of a limited rate; a cell on each, and the
main job's chain of cells over gloo between them, with its verification. Whole weights are held
against the same bytes over one plain TCP connection, deltas against whole weights, in turns. Every
move is compared bit for bit. Needs root, iproute2 and the kernel's tbf queue.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import common
from benchmarks.link.hosts import two_hosts
from benchmarks.link.rank import Task

TIME_LIMIT_S = 900.0


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Run both ends; figures by name."""
    with tempfile.TemporaryDirectory(prefix="gyre-link-") as folder:
        output = Path(folder) / "figures.json"
        task = Task(options.mib, options.densities, options.repeats, str(output))
        with two_hosts(options.mbit) as names:
            command = [sys.executable, "-m", "benchmarks.link.rank"]
            ends = [
                subprocess.Popen(
                    ["ip", "netns", "exec", name, *command, str(cell), json.dumps(asdict(task))],
                    cwd=common.ROOT,
                )
                for cell, name in enumerate(names)
            ]
            try:
                codes = [end.wait(TIME_LIMIT_S) for end in ends]
            finally:
                for end in ends:
                    end.kill()
            if any(codes):
                raise SystemExit(f"error: the cells ended with {codes}")
        found = json.loads(output.read_text())
    total = options.mib << 20
    figures: dict[str, Any] = {
        "link_mbit_per_s": options.mbit,
        "mib": options.mib,
        "hosts": {
            "raw_seconds": common.spread(found["raw"]),
            "whole_seconds": common.spread(found["whole"]),
            "whole_vs_raw": common.ratio(found["whole"], found["raw"]),
        },
        "delta": {},
    }
    for density in options.densities:
        seconds, sizes = found[f"seconds {density}"], found[f"bytes {density}"]
        figures["delta"][f"{density:g}".replace(".", "_")] = {
            "density": density,
            "seconds": common.spread(seconds),
            "bytes_ratio": common.spread(size / total for size in sizes),
            "speedup": common.ratio(found["whole"], seconds),
        }
    return figures


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="where to write the result")
    parser.add_argument("--mib", type=int, default=128, help="of bf16 weights")
    parser.add_argument("--mbit", type=int, default=500, help="rate of the link, Mbit/s")
    parser.add_argument("--densities", type=float, nargs="+", default=[0.01, 0.03, 0.1])
    parser.add_argument("--repeats", type=int, default=7, help="rounds")
    return parser.parse_args()


def main() -> None:
    """Parse, measure, print, write."""
    options = parse()
    record = common.environment()
    figures = measure(options)
    common.show(figures)
    if options.json:
        common.write_results(options.json, record, vars(options), figures)


if __name__ == "__main__":
    main()
