"""Our boxes of Megatron's parameters are Megatron's own: `sharded_state_dict` says the same.

Every element of the model gets a number of its own. Our layout puts them into each rank's
parameters; Megatron then says where in its global tensors each rank's shards belong. Assembled from
all ranks of a layout, they equal those of one rank, which holds everything.
"""

from __future__ import annotations

import os
import subprocess
import sys

NUM_CASES = 11
"""Layouts of dense, tied, mixture-of-experts and Gated DeltaNet models in `main` of the helper."""


def test_shards_in_every_layout_are_megatrons() -> None:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "tests.support.megatron_shards"],
        capture_output=True,
        text=True,
        timeout=240,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    kinds = ("dense ", "tied ", "moe ", "hybrid ")
    lines = [line for line in done.stdout.splitlines() if line.startswith(kinds)]
    assert len(lines) == NUM_CASES
    for line in lines:
        _, _, num_tensors, differing = line.split(" ", 3)
        assert int(num_tensors) >= 10, line
        assert differing == "[]", line
