"""What packing trees gains: training time and memory against flattened trajectories, mask and
attention rates.

    python benchmarks/bench_tree.py --json out.json

One thread, fp32, all sides of a comparison in turns in one process. `seconds` are CPU seconds of
that thread: on a quiet machine they equal the wall clock (reported beside them), on a shared one
they do not count the waiting.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch

from benchmarks import common
from benchmarks.tree.attention import bench_attention
from benchmarks.tree.mask import bench_mask
from benchmarks.tree.training import bench_caps, bench_training

MIN_RUNS = 5  # below this a range says little


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, help="write the results here")
    parser.add_argument(
        "--scale",
        type=int,
        default=330,
        help="tokens of a tool result; 330 gives 20K unique tokens",
    )
    parser.add_argument(
        "--repeats", type=int, default=MIN_RUNS, help=f"rounds; figures need {MIN_RUNS}"
    )
    parser.add_argument("--parts", nargs="+", default=["training", "caps", "attention", "mask"])
    parser.add_argument(
        "--no-flex",
        action="store_true",
        help="skip create_block_mask at 32K (about 11 GB of memory)",
    )
    return parser.parse_args()


def main() -> int:
    """Parse, measure, print, write."""
    options = parse()
    torch.set_num_threads(1)
    record = common.environment()
    parts: dict[str, Callable[[], dict[str, Any]]] = {
        "training": lambda: bench_training(options.scale, options.repeats),
        "caps": lambda: bench_caps(options.scale // 3, options.repeats),
        "attention": lambda: bench_attention(options.scale, options.repeats),
        "mask": lambda: bench_mask(options.repeats, with_flex=not options.no_flex),
    }
    figures: dict[str, Any] = {}
    for name in options.parts:
        figures[name] = parts[name]()
    common.show(figures)
    if options.json:
        common.write_results(options.json, record, vars(options), figures)
    return 0


if __name__ == "__main__":
    sys.exit(main())
