"""A joiner reads the core's weights while the core does nothing for it, and notices weights that
are not the version that it was promised."""

from __future__ import annotations

import os
import signal
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from gyre_megatron.config.weights import WeightsConfig
from gyre_megatron.errors import TransferError
from gyre_megatron.weights.pull import CoreReader, CoreWeights
from tests.dist.ranks import RankPool

CONFIG = WeightsConfig(timeout_s=20)


@pytest.fixture(scope="module")
def two():
    pool = RankPool(2)
    yield pool
    pool.close()


def buffers(value: float) -> list[torch.Tensor]:
    """Some in one storage, as Megatron's parameter buffers are, of two types."""
    storage = torch.full((5000,), value)
    return [storage[:3000], storage[3000:], torch.full((17,), value, dtype=torch.bfloat16)]


def kv_store(name: str) -> dist.Store:
    return dist.PrefixStore(name, dist.distributed_c10d._get_default_store())


def core_stopped(name: str) -> bool:
    """Rank 0 is the core. It is stopped by a signal while rank 1 pulls."""
    store = kv_store(name)
    if dist.get_rank() == 0:
        mine = buffers(1.0)
        view = mine[0].view(60, 50)  # what the model computes with
        core = CoreWeights(mine, CONFIG, store, 0, version=3)
        view += 1
        mine[2].add_(1)
        mine[1].add_(1)
        store.set("pid", str(os.getpid()))
        store.wait(["pulled"], timedelta(seconds=60))
        core.begin_writing()
        view += 1
        store.set("writing", "1")
        store.wait(["refused"], timedelta(seconds=60))
        core.settle(4)
        store.set("settled", "1")
        store.wait(["end"], timedelta(seconds=60))
        return True
    pid = int(store.get("pid"))
    reader = CoreReader.find(CONFIG, store, 0)
    assert reader is not None
    os.kill(pid, signal.SIGSTOP)
    try:
        taken = buffers(0.0)
        assert reader.pull(taken, version=3) == 5000 * 4 + 17 * 2
        exact = all(torch.equal(t, torch.full_like(t, 2.0)) for t in taken)
    finally:
        os.kill(pid, signal.SIGCONT)
    with pytest.raises(TransferError, match="before the read they are of version 3"):
        reader.pull(buffers(0.0), version=4)
    store.set("pulled", "1")
    store.wait(["writing"], timedelta(seconds=60))
    with pytest.raises(TransferError, match="being written"):
        reader.pull(buffers(0.0), version=3)
    store.set("refused", "1")
    store.wait(["settled"], timedelta(seconds=60))
    reader.pull(taken, version=4)
    store.set("end", "1")
    return exact and bool((taken[0] == 3.0).all()) and bool((taken[1] == 2.0).all())


def test_the_core_does_nothing_for_it(two: RankPool):
    start = time.monotonic()
    assert two.run(core_stopped, "stopped") == [True, True]
    assert time.monotonic() - start < 60


def other_shapes(name: str) -> str:
    store = kv_store(name)
    if dist.get_rank() == 0:
        core = CoreWeights(buffers(1.0), CONFIG, store, 0, version=0)
        store.wait(["end"], timedelta(seconds=60))
        core.settle(1)
        return ""
    reader = CoreReader.find(CONFIG, store, 0)
    try:
        reader.pull(buffers(0.0)[:2], version=0)
        return "pulled"
    except TransferError as error:
        return str(error)
    finally:
        store.set("end", "1")


def test_another_layout_is_refused(two: RankPool):
    assert "cells share one training layout" in two.run(other_shapes, "shapes")[1]


def unreachable(name: str) -> bool:
    """What the core offers is another process's: here, a descriptor that was closed since."""
    store = kv_store(name)
    if dist.get_rank() == 0:
        mine = buffers(1.0)
        CoreWeights(mine, CONFIG, store, 0, version=0)
        del mine  # the memory goes, and its descriptor with it
        store.set("gone", "1")
        store.wait(["end"], timedelta(seconds=60))
        return True
    store.wait(["gone"], timedelta(seconds=60))
    found = CoreReader.find(CONFIG, store, 0)
    store.set("end", "1")
    return found is None


def test_weights_that_cannot_be_reached_are_left_to_the_chain(two: RankPool):
    assert two.run(unreachable, "unreachable") == [True, True]


def moved(name: str) -> str:
    mine = buffers(1.0)
    core = CoreWeights(mine, CONFIG, kv_store(f"{name}{dist.get_rank()}"), 0, version=0)
    mine[0].data = torch.zeros(3000)
    try:
        core.settle(1)
        return "settled"
    except TransferError as error:
        return str(error)


def test_weights_that_moved_are_an_error(two: RankPool):
    assert all("have moved in memory" in told for told in two.run(moved, "moved"))


def test_a_core_that_says_nothing(two: RankPool):
    config = WeightsConfig(timeout_s=0.5)
    with pytest.raises(TransferError, match="did not offer its weights"):
        CoreReader.find(config, dist.HashStore(), 0)
