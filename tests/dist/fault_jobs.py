"""Processes that swap weights while one of them is killed, stopped or lies. No Megatron here:
layouts are grids."""

from __future__ import annotations

import gc
import multiprocessing
import os
import resource
import signal
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.dist.fork_server import context
from gyre_megatron.errors import TransferError
from gyre_megatron.weights.boxes import LocalTensor, LocalBox, contiguous_strides, grid_cells
from gyre_megatron.weights.executor import Resharder
from gyre_megatron.weights.layout import ListedLayout
from gyre_megatron.weights.planner import plan_rank
from gyre_megatron.weights.rendezvous import Rendezvous
from gyre_megatron.weights.shadow import Shadow, tensor_specs
from gyre_megatron.weights.transports.base import Transport
from gyre_megatron.weights.transports.collective import CollectiveTransport
from gyre_megatron.weights.transports.file import FileTransport
from gyre_megatron.weights.transports.ipc import IpcTransport

TIMEOUT_S = 3.0
SHAPES = {f"w{i}": (256, 512) for i in range(8)}


def _grid(parts: tuple[int, int], n: int) -> ListedLayout:
    ranks: list[list[LocalTensor]] = [[] for _ in range(n)]
    for name, shape in SHAPES.items():
        for rank, box in enumerate(grid_cells(shape, parts)):
            local_box = LocalBox(name, box.start, box.shape, name, 0, contiguous_strides(box.shape))
            ranks[rank].append(LocalTensor(name, box.shape, (local_box,)))
    return ListedLayout(ranks)


def _values(layout: ListedLayout, rank: int, version: int) -> dict[str, torch.Tensor]:
    tensors = {}
    for tensor in layout.tensors(rank):
        local_box = tensor.local_boxes[0]
        whole = torch.arange(256 * 512, dtype=torch.float32).reshape(256, 512) + version
        rows, columns = (slice(s, s + k) for s, k in zip(local_box.start, local_box.shape, strict=True))
        tensors[tensor.key] = whole[rows, columns].contiguous()
    return tensors


def make(kind: str, store: dist.Store, rank: int, n: int, folder: str, name: str = "t") -> Transport:
    common: dict[str, Any] = dict(name=name, timeout_s=TIMEOUT_S, staging_bytes=256 << 10)
    if kind in ("ipc", "windows"):
        return IpcTransport(store, rank, n, **common)
    if kind == "file":
        return FileTransport(store, rank, n, folder, **common)
    if kind == "mooncake":
        from gyre_megatron.weights.transports.mooncake import MooncakeTransport

        return MooncakeTransport(store, rank, n, **{**common, "timeout_s": 30.0})
    return CollectiveTransport(store, rank, n, **common)


class Swapper:
    """One process with a transport and a reshard that it can run for any version."""

    def __init__(self, kind: str, store: dist.Store, rank: int, n: int, folder: str, name: str = "t") -> None:
        self.rank, self.n = rank, n
        self.source, self.target = _grid((n, 1), n), _grid((1, n), n)
        self.transport = make(kind, store, rank, n, folder, name)
        self.have = _values(self.source, rank, 0)
        self.got = {key: torch.zeros_like(t) for key, t in _values(self.target, rank, 0).items()}
        windows = []
        self.compared = None
        if kind == "windows":  # peers write straight into what this process gets
            path = Path(folder) / f"{name}-{rank}"
            shadow = Shadow.create(path, tensor_specs(self.got))
            self.got, windows = shadow.tensors, [shadow.window]
            # Where a publish waits for the engine's commit, this waits for everybody's comparison:
            # the next swap's writes would come into it.
            self.compared = Rendezvous(dist.PrefixStore(f"{name}-compared", store), rank, n, 30.0)
        plan = plan_rank(self.source, self.target, rank)
        self.resharder = Resharder(
            plan, self.have, self.got, self.transport, lambda _: torch.float32, verify=True, windows=windows
        )

    def swap(self, version: int) -> None:
        """Move version `version` and compare every element."""
        for key, tensor in _values(self.source, self.rank, version).items():
            self.have[key].copy_(tensor)
        self.resharder.run()
        for key, tensor in _values(self.target, self.rank, version).items():
            assert torch.equal(self.got[key], tensor), key
        if self.compared is not None:
            self.compared.start()
            self.compared.exchange("comparing")


def _fault_in_window(swapper: Swapper, fault: str) -> None:
    """Arrange for this process to misbehave after it has written into a peer's window."""
    copy = swapper.resharder._copy

    def faulty_copy(copies, times, verify):
        sums = copy(copies, times, verify)
        if verify:
            swapper.resharder._copy = copy  # only once
            if fault == "corrupt":
                index, offset = copies._table[0, 2:4].tolist()
                copies._targets[index].view(-1)[offset] += 1
            else:
                os.kill(os.getpid(), signal.SIGKILL if fault == "kill" else signal.SIGSTOP)
        return sums

    swapper.resharder._copy = faulty_copy


def _fault(swapper: Swapper, fault: str) -> None:
    """Arrange for this process to misbehave in its next swap, in the middle of sending."""
    original, count = swapper.transport.outbox, 0

    def outbox(peer: int):
        box = original(peer)
        post = box.post
        slot_of = box.slot
        last: list[torch.Tensor] = []

        def slot(nbytes: int) -> torch.Tensor:
            last[:] = [slot_of(nbytes)]
            return last[0]

        def faulty_post() -> None:
            nonlocal count
            count += 1
            if count == 2:
                swapper.transport.outbox = original  # only once
                if fault == "kill":
                    os.kill(os.getpid(), signal.SIGKILL)
                elif fault == "hang":
                    os.kill(os.getpid(), signal.SIGSTOP)
                elif fault == "corrupt":
                    last[0][100] ^= 0xFF
            post()

        box.slot, box.post = slot, faulty_post
        return box

    swapper.transport.outbox = outbox


def faulty(kind: str, fault: str, rank: int, n: int, port: int, folder: str, pipe) -> None:
    """A good swap, one in which process 1 misbehaves, and the next one; reports what happened and
    how long it took."""
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    swapper = Swapper(kind, store, rank, n, folder)
    swapper.swap(1)
    if rank == 1:
        (_fault_in_window if kind == "windows" else _fault)(swapper, fault)
    start = time.monotonic()
    try:
        swapper.swap(2)
        outcome = "succeeded"
    except TransferError as error:
        outcome = str(error)
    pipe.send((outcome, time.monotonic() - start))
    pipe.recv()  # everyone is back
    if fault == "kill":  # the others go on without it: a new membership
        members = [0, *range(2, n)]
        swapper = Swapper(kind, store, members.index(rank), n - 1, folder, name="t-next")
    swapper.swap(3)
    pipe.send("next swap exact")
    os._exit(0)


def many(kind: str, swaps: int, rank: int, n: int, port: int, folder: str, pipe) -> None:
    """Many swaps; reports resources after the first tenth and at the end."""
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    swapper = Swapper(kind, store, rank, n, folder)
    usage = []
    for version in range(swaps):
        swapper.swap(version)
        if version in (swaps // 10, swaps - 1):
            gc.collect()
            usage.append(
                dict(
                    descriptors=len(os.listdir("/proc/self/fd")), threads=len(os.listdir("/proc/self/task")),
                    maps=sum("gyre-" in line for line in Path("/proc/self/maps").read_text().splitlines()),
                    resident_mib=int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize() >> 20,
                )
            )
    pipe.send(usage)
    pipe.recv()
    os._exit(0)


class Processes:
    """`n` processes that run a job; always killed in the end."""

    def __init__(self, job, n: int, *args: Any, folder: str) -> None:
        self.store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self.processes, self.pipes = [], []
        for rank in range(n):
            mine, theirs = context.Pipe()
            arguments = (*args, rank, n, self.store.port, folder, theirs)
            process = context.Process(target=job, args=arguments, daemon=True)
            process.start()
            theirs.close()
            self.processes.append(process)
            self.pipes.append(mine)

    def answer(self, rank: int, timeout_s: float) -> Any:
        assert self.pipes[rank].poll(timeout_s), f"process {rank} gave no answer in {timeout_s} s"
        return self.pipes[rank].recv()

    def stop(self) -> None:
        for process in self.processes:
            process.kill()
            process.join()


def chain(kind: str, num_cells: int, dies: bool, rank: int, n: int, port: int, folder: str, pipe) -> None:
    """Weights down a chain of cells, for a full and a shorter prefix, and for one with a gap; or
    with the middle cell dead."""
    from gyre_megatron.config.weights import WeightsConfig
    from gyre_megatron.weights.chain import CellChain
    from gyre_megatron.weights.process_groups import CellTopology

    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    topology = CellTopology(n, num_cells)
    config = WeightsConfig(transport=kind, staging_mib=1, timeout_s=TIMEOUT_S, file_dir=folder)
    cells = CellChain(config, store, topology, rank)
    shapes = [(100, 33), (7,), (1000, 500)]

    def buffers(value: float) -> list[torch.Tensor]:
        return [torch.full(shape, value) + torch.arange(torch.Size(shape).numel()).reshape(shape) for shape in shapes]

    want = buffers(100.0 * topology.position_of(rank) + 1)
    mine = want if cells.cell == 0 else buffers(-5.0)
    if dies:
        if cells.cell == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        try:
            cells.take_core_weights(mine, range(1, num_cells))
            pipe.send("succeeded")
        except TransferError as error:
            pipe.send(str(error))
        os._exit(0)
    exact = []
    for joined in (range(1, num_cells - 1), range(1, num_cells), [num_cells - 1]):
        if cells.cell != 0:
            mine = buffers(-5.0)
        if cells.cell in (0, *joined):
            cells.take_core_weights(mine, joined)
        exact.append(all(torch.equal(a, b) for a, b in zip(mine, want, strict=True)))
    pipe.send(exact)
    pipe.recv()
    os._exit(0)


def chosen(kind: str, rank: int, n: int, port: int, folder: str, pipe) -> None:
    """Open the configured transport and swap over it: float32, float32 to bfloat16, and back."""
    from gyre_megatron.config.weights import WeightsConfig
    from gyre_megatron.weights.transports.choose import open_transport

    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    config = WeightsConfig(transport=kind, staging_mib=1, timeout_s=20, file_dir=folder)
    transport = open_transport(config, store, rank, n)
    source, target = _grid((n, 1), n), _grid((1, n), n)
    got = {key: torch.zeros_like(t) for key, t in _values(target, rank, 0).items()}
    plan = plan_rank(source, target, rank)
    Resharder(plan, _values(source, rank, 3), got, transport, lambda _: torch.float32).run()
    assert all(torch.equal(got[key], t) for key, t in _values(target, rank, 3).items())
    half = {key: torch.zeros_like(t, dtype=torch.bfloat16) for key, t in got.items()}
    Resharder(plan, _values(source, rank, 3), half, transport, lambda _: torch.bfloat16).run()
    assert all(torch.equal(half[key], t.bfloat16()) for key, t in _values(target, rank, 3).items())
    sources = {key: t.bfloat16() for key, t in _values(source, rank, 5).items()}
    Resharder(plan, sources, got, transport, lambda _: torch.bfloat16).run()
    assert all(torch.equal(got[key], t.bfloat16().float()) for key, t in _values(target, rank, 5).items())
    pipe.send((type(transport).__name__, transport.peak_staging_bytes <= 1 << 20))
    pipe.recv()
    os._exit(0)
