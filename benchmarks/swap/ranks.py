"""Forked ranks for benchmarks: everything is imported once, every run has a hard limit."""

from __future__ import annotations

import multiprocessing
import os
import traceback
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from gyre_megatron.cpu import enable_cpu


def _enter(function: Callable, rank: int, size: int, port: int, pipe, args: tuple) -> None:
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    dist.init_process_group(
        "gloo", store=store, rank=rank, world_size=size, timeout=timedelta(seconds=300)
    )
    try:
        pipe.send((None, function(*args)))
    except BaseException:
        pipe.send((traceback.format_exc(), None))
    pipe.close()
    os._exit(0)


def run_ranks(function: Callable, size: int, *args: Any, timeout_s: float = 540) -> list[Any]:
    """Results of `function(*args)` on `size` forked ranks of one gloo world.

    Raises:
        RuntimeError: a rank failed or did not answer in time; all are killed.
    """
    if not torch.cuda.is_available():
        enable_cpu()
    context = multiprocessing.get_context("fork")
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    ranks = []
    for rank in range(size):
        mine, theirs = context.Pipe()
        process = context.Process(
            target=_enter, args=(function, rank, size, server.port, theirs, args)
        )
        process.start()
        theirs.close()
        ranks.append((process, mine))
    try:
        return [_answer(rank, pipe, timeout_s) for rank, (_, pipe) in enumerate(ranks)]
    finally:
        for process, _ in ranks:
            process.join(5)
            process.kill()


def _answer(rank: int, pipe, timeout_s: float) -> Any:
    if not pipe.poll(timeout_s):
        raise RuntimeError(f"rank {rank} gave no answer in {timeout_s} s")
    error, result = pipe.recv()
    if error:
        raise RuntimeError(f"rank {rank} failed:\n{error}")
    return result
