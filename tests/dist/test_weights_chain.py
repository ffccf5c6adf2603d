"""The chain of cells: each position's shard reaches every cell of the prefix, and a dead cell is an
error in time."""

from __future__ import annotations

import time

from tests.dist.fault_jobs import TIMEOUT_S, Processes, chain


def test_every_cell_of_the_prefix_holds_the_cores_shard(tmp_path):
    processes = Processes(chain, 6, 3, False, folder=str(tmp_path))
    try:
        answers = [processes.answer(rank, 40) for rank in range(6)]
        assert answers == [[True, True]] * 4 + [[False, True]] * 2  # the last cell joins with the second prefix
    finally:
        processes.stop()


def test_neighbours_of_a_dead_cell_stop_in_time(tmp_path):
    processes = Processes(chain, 6, 3, True, folder=str(tmp_path))
    try:
        start = time.monotonic()
        for rank in (0, 1, 4, 5):
            assert "chain of cells" in processes.answer(rank, 40)
        assert time.monotonic() - start < 4 * TIMEOUT_S + 15
    finally:
        processes.stop()
