"""A rank of the run that is measured: enters its cell's control group, then is the main job.

torchrun --nproc-per-node 4 benchmarks/schedule/rank.py --config FILE ...
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.schedule.cell_shares import enter
from gyre_megatron.cli import main

GROUPS = "GYRE_SCHEDULE_GROUPS"
"""Folders of the cells' groups, joined by colons; cells have one rank each."""

if __name__ == "__main__":
    enter(Path(os.environ[GROUPS].split(":")[int(os.environ["RANK"])]))
    sys.exit(main(["train", *sys.argv[1:]]))
