"""One of two cells on two hosts: `python -m benchmarks.link.rank CELL JSON`, started by bench_delta.

The core (cell 0) measures; both do the same moves in the same order.
"""

from __future__ import annotations

import json
import socket
import sys
import time
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from benchmarks.link.hosts import ADDRESSES
from gyre_megatron.config.weights import WeightsConfig
from gyre_megatron.weights.chain import CellChain
from gyre_megatron.weights.delta import checksum
from gyre_megatron.weights.delta_chain import Versions
from gyre_megatron.weights.process_groups import CellTopology

STORE_PORT = 29531
RAW_PORT = 29532


@dataclass(frozen=True)
class Task:
    """What is moved."""

    mib: int
    densities: list[float]
    rounds: int
    output: str


class Cell:
    """One end."""

    def __init__(self, cell: int, task: Task) -> None:
        self.cell = cell
        self.kv_store = dist.TCPStore(
            ADDRESSES[0], STORE_PORT, 2, is_master=cell == 0, timeout=timedelta(seconds=120)
        )
        config = WeightsConfig(transport="collective", delta=True)
        self.chain = CellChain(config, self.kv_store, CellTopology(2, 2), cell)
        generator = torch.Generator().manual_seed(0)
        num = task.mib * (1 << 20) // 2
        self.weights = torch.randn(num, generator=generator).bfloat16()
        self.version = 0
        self.moves = 0
        self._raw: socket.socket | None = None

    def raw(self) -> float:
        """Seconds of the same bytes over one plain TCP connection, acknowledged at the end."""
        data = memoryview(self.weights.view(torch.uint8).numpy())
        connection = self._connection()
        start = time.perf_counter()
        if self.cell == 0:
            connection.sendall(data)
            connection.recv(1)
        else:
            left = len(data)
            buffer = bytearray(1 << 20)
            while left:
                left -= connection.recv_into(buffer, min(left, len(buffer)))
            connection.sendall(b"!")
        return time.perf_counter() - start

    def _connection(self) -> socket.socket:
        if self._raw is None and self.cell == 1:
            with socket.create_server((ADDRESSES[1], RAW_PORT)) as server:
                self.kv_store.set("listening", "1")
                self._raw, _ = server.accept()
        elif self._raw is None:
            self.kv_store.wait(["listening"])
            self._raw = socket.create_connection((ADDRESSES[1], RAW_PORT))
        return self._raw

    def move(self, density: float, whole: bool) -> tuple[float, int]:
        """Change about `density` of the core's elements, bring them to the other cell; seconds and
        bytes. A whole move changes nothing, so that the next delta knows its base."""
        self.moves += 1
        if not whole:
            self.version += 1
        if self.cell == 0 and not whole:
            bits = self.weights.view(torch.int16)
            generator = torch.Generator().manual_seed(self.version)
            chosen = torch.rand(len(bits), generator=generator) < density
            bits[chosen] ^= 1
        held = self.version - (self.cell == 1)
        versions = None if whole else Versions(held, self.version)
        self._meet()
        start = time.perf_counter()
        num_bytes = self.chain.take_core_weights([self.weights], (1,), versions)
        seconds = time.perf_counter() - start
        self._compare()
        return seconds, num_bytes

    def _meet(self) -> None:
        self.kv_store.set(f"ready{self.moves}-{self.cell}", "1")
        self.kv_store.wait([f"ready{self.moves}-{1 - self.cell}"])

    def _compare(self) -> None:
        mine = str(checksum(self.weights.view(torch.uint8)))
        self.kv_store.set(f"sum{self.moves}-{self.cell}", mine)
        other = self.kv_store.get(f"sum{self.moves}-{1 - self.cell}").decode()
        assert mine == other, f"move {self.moves} arrived damaged"


def run(cell: int, task: Task) -> None:
    """Rounds of every kind of move."""
    torch.set_num_threads(1)
    end = Cell(cell, task)
    end.move(0.5, whole=False)  # the delta chain now knows what the other cell holds
    figures: dict[str, list[float]] = {"raw": [], "whole": []}
    for round_ in range(task.rounds + 1):  # the first is a warm-up
        found: dict[str, float] = {"raw": end.raw()}
        for density in task.densities:
            seconds, num_bytes = end.move(density, whole=False)
            found |= {f"seconds {density}": seconds, f"bytes {density}": num_bytes}
        found["whole"], _ = end.move(0.0, whole=True)
        if round_:
            for name, value in found.items():
                figures.setdefault(name, []).append(value)
    if cell == 0:
        Path(task.output).write_text(json.dumps(figures))


if __name__ == "__main__":
    run(int(sys.argv[1]), Task(**json.loads(sys.argv[2])))
