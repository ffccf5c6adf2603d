"""The chain of cells: each position's shard reaches every cell of the prefix, and a dead cell is an
error in time."""

from __future__ import annotations

import time

import pytest

from tests.dist.fault_jobs import TIMEOUT_S, Processes, chain


@pytest.mark.parametrize("kind", ["ipc", "collective", "file"])
def test_every_cell_of_the_chain_holds_the_cores_shard(tmp_path, kind):
    processes = Processes(chain, 6, kind, 3, False, folder=str(tmp_path))
    try:
        answers = [processes.answer(rank, 60) for rank in range(6)]
        # cells 0 and 1; all; 0 and 2: who is left out keeps what it has
        assert answers == [[True, True, True]] * 2 + [[True, True, False]] * 2 + [[False, True, True]] * 2
    finally:
        processes.stop()


def test_neighbours_of_a_dead_cell_stop_in_time(tmp_path):
    processes = Processes(chain, 6, "auto", 3, True, folder=str(tmp_path))
    try:
        start = time.monotonic()
        for rank in (0, 1, 4, 5):
            told = processes.answer(rank, 40)
            assert "chain of cells [0, 1, 2]" in told and "processes [1] did not answer" in told
        assert time.monotonic() - start < 4 * TIMEOUT_S + 15
    finally:
        processes.stop()
