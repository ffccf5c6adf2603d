"""One reshard over one transport, as the main job runs it, and the raw rate of the same transport."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec
import torch
import torch.distributed as dist

from gyre_megatron.config.weights import WeightsConfig
from gyre_megatron.weights.direct import Sums, add_sums
from gyre_megatron.weights.executor import Resharder
from gyre_megatron.weights.layout import Layout
from gyre_megatron.weights.planner import RankPlan, plan_rank, total_numel
from gyre_megatron.weights.shadow import Shadow, Window, checksums, tensor_specs
from gyre_megatron.weights.transports.base import Transport
from gyre_megatron.weights.transports.choose import open_transport

WIRE = torch.bfloat16
_decode_sums = msgspec.msgpack.Decoder(Sums).decode
_made = 0


def make_transport(kind: str, staging_mib: int) -> Transport:
    """A fresh transport over all ranks, made as the main job makes it."""
    global _made
    _made += 1
    config = WeightsConfig(transport=kind, staging_mib=staging_mib)
    store = dist.distributed_c10d._get_default_store()
    return open_transport(config, store, dist.get_rank(), dist.get_world_size(), f"bench{_made}")


def slowest(action: Callable[[], Any]) -> float:
    """Seconds of `action`, started together on all ranks, until the slowest has finished."""
    dist.barrier()
    start = time.perf_counter()
    action()
    dist.barrier()
    return time.perf_counter() - start


def cpu_seconds(action: Callable[[], Any]) -> float:
    """CPU seconds of `action`, of all threads of all ranks."""
    dist.barrier()
    start = time.process_time()
    action()
    used = torch.tensor([time.process_time() - start], dtype=torch.float64)
    dist.all_reduce(used)
    return float(used)


def total(value: float) -> float:
    """Sum over the ranks."""
    one = torch.tensor([value], dtype=torch.float64)
    dist.all_reduce(one)
    return float(one)


def shadow_like(layout: Layout) -> Shadow:
    """The next version of this rank's engine rank, in shared memory, as the loader makes it."""
    local = layout.tensors(dist.get_rank())
    specs = tensor_specs({t.key: torch.empty(t.shape, dtype=WIRE, device="meta") for t in local})
    specs = [spec._replace(key=f"{dist.get_rank()}/{spec.key}") for spec in specs]
    with tempfile.NamedTemporaryFile(prefix="gyre-bench-", dir="/dev/shm") as file:
        file.close()
        return Shadow.create(Path(file.name), specs)


class Publish:
    """A publish without the engine: the reshard into shadows with its sums, and the comparison that
    the engine's ranks make before they commit."""

    def __init__(
        self,
        source: Layout,
        sources: Mapping[str, torch.Tensor],
        target: Layout,
        shadow: Shadow,
        transport: Transport,
    ) -> None:
        self._transport = transport
        self._shadow = shadow
        self.plan = plan_rank(source, target, dist.get_rank())
        everyone: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, list(shadow.tensors))
        dtypes = {key: WIRE for keys in everyone for key in keys}
        self._resharder = Resharder(
            self.plan,
            sources,
            shadow.tensors,
            transport,
            lambda _: WIRE,
            windows=[shadow.window],
            sum_dtypes=dtypes,
        )
        self._resharder.connect()
        self.passes = 0
        """Bytes that this rank reads and writes in a run, those of the comparison included."""

    def run(self) -> None:
        """Move, add up everybody's sums, compare."""
        times = self._resharder.run()
        said = msgspec.msgpack.encode(times.sums)
        added: Sums = {}
        for sums in self._transport.rendezvous.exchange("adding up checksums", payload=said):
            add_sums(added, _decode_sums(sums))
        found = checksums(self._shadow.tensors)
        if any(added[key] != value for key, value in found.items()):
            raise RuntimeError("a tensor arrived damaged")
        self.passes = times.bytes_read + times.bytes_written + self._shadow.nbytes


def raw_move(kind: str, plan: RankPlan, transport: Transport) -> Callable[[], None]:
    """The bound's work: the same bytes to the same ranks, plain and contiguous.

    Over shared memory one memcpy into the receiver's memory; over a process group sends and
    receives straight from and into buffers as large as what a pair exchanges. What stays on a rank
    is one memcpy.
    """
    sends = {peer: _bytes_of(parcels) for peer, parcels in plan.sends.items()}
    stays = _bytes_of(plan.local)
    kept = torch.zeros_like(stays)
    if kind == "ipc":
        windows = _raw_windows(plan, transport)
        pairs = [*((windows[peer], data) for peer, data in sends.items()), (kept, stays)]
        return lambda: _copy_all(pairs)
    receives = {peer: _bytes_of(parcels) for peer, parcels in plan.receives.items()}
    transport.begin()
    transport.connect_streams()

    def run() -> None:
        group = transport.group()  # type: ignore[attr-defined]
        works = [group.send([sends[peer]], peer, 0) for peer in sends]
        works += [group.recv([receives[peer]], peer, 0) for peer in receives]
        kept.copy_(stays)
        for work in works:
            work.wait()

    return run


def _bytes_of(parcels) -> torch.Tensor:
    return torch.zeros(max(1, WIRE.itemsize * total_numel(parcels)), dtype=torch.uint8)


def _raw_windows(plan: RankPlan, transport: Transport) -> dict[int, torch.Tensor]:
    """For each peer that this rank sends to, as many bytes of shared memory as it sends."""
    mine: list[Window] = []
    made: list[Shadow] = []
    with tempfile.TemporaryDirectory(prefix="gyre-bench-", dir="/dev/shm") as folder:
        for peer, parcels in plan.receives.items():
            specs = tensor_specs({f"{peer}": _bytes_of(parcels)})
            made.append(Shadow.create(Path(folder) / f"{peer}", specs))
            mine.append(made[-1].window)
        transport.begin()
        windows = transport.open_windows(mine, plan.sends)
    me = str(transport.process)
    return {
        peer: next(shadow.tensors[me] for shadow in shadows if me in shadow.tensors)
        for peer, shadows in windows.mapped.items()
    }


def _copy_all(pairs: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
    for target, source in pairs:
        target.copy_(source)
