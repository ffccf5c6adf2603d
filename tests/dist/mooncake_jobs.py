"""Jobs of test_weights_mooncake, run in a network namespace: `-m tests.dist.mooncake_jobs
{swap,join,dead} FOLDER`."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import sys
import time

import torch
import torch.distributed as dist

from gyre_megatron.errors import TransferError
from gyre_megatron.weights.transports.mooncake import Endpoint, Exporter, pull
from tests.dist.fault_jobs import Swapper

_started: list = []
SIZES = [(1000, 300), (7,), (256, 513)]


def _buffers(fill: float) -> list[torch.Tensor]:
    return [torch.arange(torch.Size(s).numel(), dtype=torch.float32).reshape(s) * fill for s in SIZES]


def _swap(rank: int, n: int, port: int, folder: str, pipe) -> None:
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    swapper = Swapper("mooncake", store, rank, n, folder)
    for version in (1, 2):
        swapper.swap(version)
    pipe.send(True)
    pipe.recv()
    os._exit(0)


def _export(pipe) -> None:
    buffers = _buffers(3.0)
    exporter = Exporter(Endpoint(), buffers)
    pipe.send(exporter.describe(version=5))
    pipe.recv()
    os._exit(0)


def _start(function, *arguments):
    mine, theirs = multiprocessing.get_context("fork").Pipe()
    process = multiprocessing.get_context("fork").Process(target=function, args=(*arguments, theirs), daemon=True)
    process.start()
    _started.append(process)
    return process, mine


def swap(folder: str) -> dict:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    ranks = [_start(_swap, rank, 3, store.port, folder) for rank in range(3)]
    exact = [pipe.poll(60) and pipe.recv() for _, pipe in ranks]
    return {"exact": exact}


def join(folder: str) -> dict:
    _, pipe = _start(_export)
    source = pipe.recv()
    endpoint, mine = Endpoint(), _buffers(0.0)
    moved = pull(endpoint, source, mine, version=5, chunk_bytes=100_000)
    try:
        pull(endpoint, source, mine, version=6)
        wrong = ""
    except TransferError as error:
        wrong = str(error)
    want = _buffers(3.0)
    exact = all(torch.equal(a, b) for a, b in zip(mine, want, strict=True))
    return {"exact": exact, "bytes": moved, "expected_bytes": sum(4 * b.numel() for b in want), "wrong_version": wrong}


def dead(folder: str) -> dict:
    process, pipe = _start(_export)
    source = pipe.recv()
    endpoint = Endpoint()
    os.kill(process.pid, signal.SIGKILL)
    process.join()
    start = time.monotonic()
    try:
        pull(endpoint, source, _buffers(0.0), version=5, timeout_s=40)
        error = ""
    except TransferError as failure:
        error = str(failure)
    return {"error": error, "seconds": time.monotonic() - start}


if __name__ == "__main__":
    try:
        print(json.dumps({"swap": swap, "join": join, "dead": dead}[sys.argv[1]](sys.argv[2])), flush=True)
    finally:
        for child in _started:
            child.kill()
    os._exit(0)
