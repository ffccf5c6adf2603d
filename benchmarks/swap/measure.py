"""Timing of our reshard against the raw rate of its own transport."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from gyre_megatron.weights.executor import Resharder
from gyre_megatron.weights.layout import Layout
from gyre_megatron.weights.planner import RankPlan, check_coverage, plan_rank, total_numel
from gyre_megatron.weights.transports.base import Transport
from gyre_megatron.weights.transports.collective import CollectiveTransport
from gyre_megatron.weights.transports.ipc import IpcTransport

_made = 0


def make_transport(kind: str, staging_mib: int) -> Transport:
    """A fresh transport over all ranks."""
    global _made
    _made += 1
    store, rank, size = (
        dist.distributed_c10d._get_default_store(),
        dist.get_rank(),
        dist.get_world_size(),
    )
    cls = {"ipc": IpcTransport, "collective": CollectiveTransport}[kind]
    return cls(
        store, rank, size, name=f"bench{_made}", timeout_s=120, staging_bytes=staging_mib << 20
    )


def slowest(action: Callable[[], Any]) -> float:
    """Seconds of `action`, started together on all ranks, until the slowest has finished."""
    dist.barrier()
    start = time.perf_counter()
    action()
    dist.barrier()
    return time.perf_counter() - start


def median(action: Callable[[], Any], repeats: int) -> float:
    return statistics.median(slowest(action) for _ in range(repeats))


def measure(
    source: Layout,
    sources: dict[str, torch.Tensor],
    target: Layout,
    targets: dict[str, torch.Tensor],
    kind: str,
    staging_mib: int,
    repeats: int,
    verify: bool = False,
) -> dict[str, Any]:
    """Cold and warm seconds of one reshard, its stages on the slowest rank, and the bound."""
    rank, wire = dist.get_rank(), lambda _: torch.bfloat16
    transport = make_transport(kind, staging_mib)
    made: dict[str, Any] = {}

    def cold() -> None:
        start = time.perf_counter()
        made["plan"] = plan_rank(source, target, rank)
        made["resharder"] = Resharder(made["plan"], sources, targets, transport, wire, verify)
        made["plan_seconds"] = time.perf_counter() - start
        made["resharder"].run()

    cold_seconds = slowest(cold)
    plan: RankPlan = made["plan"]
    check_coverage(
        target, rank, [p for parcels in plan.receives.values() for p in parcels] + plan.local
    )
    bound = raw_move(kind, plan, transport)
    stays = torch.zeros(max(1, 2 * total_numel(plan.local)), dtype=torch.uint8)
    moved_here = torch.zeros_like(stays)
    runs, raws, raws_with_local = [], [], []
    for _ in range(repeats):  # in turns, so that a busy moment of the machine weighs on both
        runs.append((slowest(lambda: made.update(times=made["resharder"].run())), made["times"]))
        raws.append(slowest(bound))
        raws_with_local.append(slowest(lambda: (moved_here.copy_(stays), bound())))
    raw, raw_with_local = statistics.median(raws), statistics.median(raws_with_local)
    seconds = statistics.median(run for run, _ in runs)
    times = min(runs, key=lambda run: abs(run[0] - seconds))[1]
    sent = 2 * sum(total_numel(parcels) for parcels in plan.sends.values())
    received = 2 * sum(total_numel(parcels) for parcels in plan.receives.values())
    local = 2 * total_numel(plan.local)
    everyone: list[Any] = [None] * dist.get_world_size()
    mine = dict(
        sent=sent,
        received=received,
        local=local,
        plan=made["plan_seconds"],
        pack=times.pack,
        wire=times.wire + times.wait,
        install=times.install,
        staging=transport.peak_staging_bytes,
    )
    dist.all_gather_object(everyone, mine)
    transport.close()
    worst = {key: max(one[key] for one in everyone) for key in mine}
    moved = sum(one["received"] for one in everyone)
    return dict(
        transport=kind,
        seconds=seconds,
        cold_seconds=cold_seconds,
        bytes_moved=moved,
        bytes_local=sum(one["local"] for one in everyone),
        bytes_in_max=worst["received"],
        bytes_out_max=worst["sent"],
        bound_seconds=raw,
        raw_gb_per_s=moved / raw / 1e9,
        ratio_to_bound=seconds / raw,
        bound_with_local_seconds=raw_with_local,
        ratio_with_local=seconds / raw_with_local,
        plan_seconds=worst["plan"],
        peak_staging_mib=worst["staging"] / 2**20,
        stages={key: worst[key] for key in ("plan", "pack", "wire", "install")},
        min_seconds=min(run for run, _ in runs),
        max_seconds=max(run for run, _ in runs),
    )


def raw_move(kind: str, plan: RankPlan, transport: Transport) -> Callable[[], None]:
    """The bound's work: the same bytes between the same pairs over the same transport, as plain
    contiguous buffers.

    For shared memory that is one copy in and one copy out, through slots of the same size; for the
    process group it is sends and receives straight from and into buffers that are as large as what
    a pair exchanges.
    """
    sends = {
        peer: torch.zeros(2 * total_numel(parcels), dtype=torch.uint8)
        for peer, parcels in plan.sends.items()
    }
    receives = {
        p: torch.zeros(2 * total_numel(parcels), dtype=torch.uint8)
        for p, parcels in plan.receives.items()
    }
    run = _raw_collective if kind == "collective" else _raw_streams
    slowest(lambda: run(transport, sends, receives))
    return lambda: run(transport, sends, receives)


def _order(peers: dict[int, torch.Tensor], transport: Transport, direction: int) -> list[int]:
    n, me = transport.num_processes, transport.process
    return [(me + direction * k) % n for k in range(1, n) if (me + direction * k) % n in peers]


def _raw_collective(
    transport: Transport, sends: dict[int, torch.Tensor], receives: dict[int, torch.Tensor]
) -> None:
    group = transport.group()  # type: ignore[attr-defined]
    works = [group.send([sends[peer]], peer, 0) for peer in _order(sends, transport, 1)]
    works += [group.recv([receives[peer]], peer, 0) for peer in _order(receives, transport, -1)]
    for work in works:
        work.wait()


def _raw_streams(
    transport: Transport, sends: dict[int, torch.Tensor], receives: dict[int, torch.Tensor]
) -> None:
    import threading

    def send() -> None:
        for peer in _order(sends, transport, 1):
            outbox = transport.outbox(peer)
            for chunk in sends[peer].split(transport.bucket_bytes):
                outbox.slot(chunk.numel()).copy_(chunk)
                outbox.post()
            outbox.flush()

    transport.begin()
    thread = threading.Thread(target=send)
    thread.start()
    for peer in _order(receives, transport, -1):
        chunks = receives[peer].split(transport.bucket_bytes)
        inbox = transport.inbox(peer, [chunk.numel() for chunk in chunks])
        for chunk in chunks:
            chunk.copy_(inbox.slot(chunk.numel()))
            inbox.release()
        inbox.close()
    thread.join()
    transport.finish(None)
