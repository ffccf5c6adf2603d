"""Jobs of test_weights_mooncake, run in a network namespace: `-m tests.dist.mooncake_jobs
{swap,chain,dead,pull} FOLDER`."""

from __future__ import annotations

import functools
import json
import multiprocessing
import os
import sys
import time

import torch
import torch.distributed as dist

from gyre_megatron.config.weights import WeightsConfig
from gyre_megatron.errors import TransferError
from gyre_megatron.weights.pull import CoreReader, CoreWeights
from tests.dist import fault_jobs

_started: list = []


def _swap(rank: int, n: int, port: int, folder: str, pipe) -> None:
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    swapper = fault_jobs.Swapper("mooncake", store, rank, n, folder)
    for version in (1, 2):
        swapper.swap(version)
    pipe.send(True)
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


def _cells(dies: bool, folder: str, answering: list[int]) -> list:
    """What the ranks of three cells of one rank say of a chain over Mooncake."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    job = functools.partial(fault_jobs.chain, "mooncake", 3, dies)
    ranks = [_start(job, rank, 3, store.port, folder) for rank in range(3)]
    return [ranks[rank][1].poll(60) and ranks[rank][1].recv() for rank in answering]


def chain(folder: str) -> dict:
    return {"exact": _cells(False, folder, [0, 1, 2])}


def dead(folder: str) -> dict:
    start = time.monotonic()
    told = _cells(True, folder, [0, 2])
    return {"told": told, "seconds": time.monotonic() - start}


def _pull(rank: int, port: int, pipe) -> None:
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    config = WeightsConfig(transport="mooncake", timeout_s=30)
    if rank == 0:
        weights = [torch.arange(100_000, dtype=torch.float32), torch.full((3,), 2.0)]
        core = CoreWeights(weights, config, store, 0, version=5)
        pipe.send(True)
        pipe.recv()  # its Python does nothing meanwhile
        core.begin_writing()
        pipe.send(True)
    else:
        reader = CoreReader.find(config, store, 0)
        taken = [torch.zeros(100_000), torch.zeros(3)]
        reader.pull(taken, version=5)
        pipe.send(torch.equal(taken[0], torch.arange(100_000.0)) and bool((taken[1] == 2).all()))
        pipe.recv()
        try:
            reader.pull(taken, version=5)
            pipe.send("pulled")
        except TransferError as error:
            pipe.send(str(error))
    pipe.recv()
    os._exit(0)


def pull(folder: str) -> dict:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    _, core = _start(_pull, 0, store.port)
    _, joiner = _start(_pull, 1, store.port)
    exact = [pipe.poll(60) and pipe.recv() for pipe in (core, joiner)]
    core.send("write")
    core.recv()
    joiner.send("again")
    return {"exact": exact, "told": joiner.poll(60) and joiner.recv()}


if __name__ == "__main__":
    jobs = {"swap": swap, "chain": chain, "dead": dead, "pull": pull}
    try:
        print(json.dumps(jobs[sys.argv[1]](sys.argv[2])), flush=True)
    finally:
        for child in _started:
            child.kill()
    os._exit(0)
