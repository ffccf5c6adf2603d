"""Pools of gloo ranks for tests: Megatron is put on the CPU once, ranks are forked, every call has a
hard timeout."""

from __future__ import annotations

import multiprocessing.connection
import os
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from tests.dist.fork_server import context

MAX_THREADS = 120
"""A rank with more is replaced: gloo keeps the threads of every group that Megatron ever made in
it."""


def _serve(rank: int, size: int, store: str, environment: dict[str, str], connection) -> None:
    os.environ.update(environment)  # the fork server keeps that of its own start
    import torch
    import torch.distributed as dist

    import tests.dist.megatron_on_cpu  # noqa: F401  the server has it, or it is imported here

    torch.set_num_threads(1)
    file_store = dist.FileStore(store, size)
    dist.init_process_group("gloo", store=file_store, rank=rank, world_size=size, timeout=timedelta(seconds=120))
    while True:
        try:
            function, args = connection.recv()
        except EOFError:  # the tests are gone
            return
        try:
            connection.send((None, function(*args)))
        except BaseException:
            connection.send((traceback.format_exc(), None))


class RankPool:
    """`size` processes in one process group; `run` calls a function on all of them at once."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._processes: list[Any] = []
        self._pipes: list[multiprocessing.connection.Connection] = []

    def _start(self) -> None:
        os.environ["OMP_NUM_THREADS"] = "1"
        store = os.path.join(tempfile.mkdtemp(prefix="ranks-"), "store")
        for rank in range(self.size):
            mine, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(rank, self.size, store, dict(os.environ), theirs))
            process.start()
            self._processes.append(process)
            self._pipes.append(mine)

    def run(self, function: Callable, *args, timeout: float = 120) -> list[Any]:
        """Results of `function(*args)` by rank; kills the pool if a rank fails or time runs out."""
        if not self._processes:
            self._start()
        for pipe in self._pipes:
            pipe.send((function, args))
        deadline, results = time.monotonic() + timeout, []
        for rank, pipe in enumerate(self._pipes):
            if not pipe.poll(max(0.0, deadline - time.monotonic())):
                self.close()
                raise TimeoutError(f"rank {rank} of {self.size} gave no answer in {timeout} s")
            error, value = pipe.recv()
            if error:
                self.close()
                raise RuntimeError(f"rank {rank} of {self.size} failed:\n{error}")
            results.append(value)
        if self._num_threads() > MAX_THREADS:
            self.close()
        return results

    def _num_threads(self) -> int:
        return max(len(os.listdir(f"/proc/{process.pid}/task")) for process in self._processes)

    def close(self) -> None:
        """Kill the ranks; the next `run` starts new ones."""
        for process in self._processes:
            process.kill()
            process.join()
        self._processes, self._pipes = [], []
