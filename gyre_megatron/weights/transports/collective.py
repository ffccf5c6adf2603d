"""Buckets over point-to-point sends of a stand-alone process group: gloo on CPU, NCCL on GPU."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from gyre_megatron.errors import TransferError
from gyre_megatron.weights.process_groups import make_group
from gyre_megatron.weights.rendezvous import WaitError
from gyre_megatron.weights.transports.base import Inbox, Outbox, Transport

_WINDOW = 2


class CollectiveTransport(Transport):
    """Sends and receives in a process group of its own, remade after a failed swap."""

    def __init__(
        self,
        kv_store: dist.Store,
        process: int,
        num_processes: int,
        name: str = "gyre/weights/collective",
        timeout_s: float = 60.0,
        staging_bytes: int = 128 << 20,
        device: torch.device | str = "cpu",
        address: str = "127.0.0.1",
        direct_directory: Path | None = None,
    ) -> None:
        super().__init__(
            kv_store, process, num_processes, name, timeout_s, staging_bytes, direct_directory
        )
        self.device = torch.device(device)
        self._address = address
        self._group: dist.ProcessGroup | None = None
        self._buffers: dict[bool, list[torch.Tensor]] = {True: [], False: []}

    @property
    def bucket_bytes(self) -> int:
        return self._staging_bytes // (2 * _WINDOW) // 4096 * 4096

    def buffers(self, outgoing: bool) -> list[torch.Tensor]:
        """The staging buffers of one direction, allocated once: fresh memory costs a page fault per
        page."""
        if not self._buffers[outgoing]:
            self._buffers[outgoing] = [
                torch.empty(self.bucket_bytes, dtype=torch.uint8, device=self.device)
                for _ in range(_WINDOW)
            ]
            self.account(_WINDOW * self.bucket_bytes)
        return list(self._buffers[outgoing])

    def connect_streams(self) -> None:
        if self._group is not None:
            return
        timeout = timedelta(seconds=self.timeout_s)
        try:
            self._group = make_group(
                self.kv_store,
                f"swap{self.swap}",
                self.process,
                self.num_processes,
                timeout,
                self._address,
            )
        except (RuntimeError, ValueError) as error:
            raise TransferError(f"the weight transport could not be joined: {error}") from error

    def outbox(self, peer: int) -> Outbox:
        return _CollectiveOutbox(self, peer)

    def inbox(self, peer: int, sizes: Sequence[int]) -> Inbox:
        return _CollectiveInbox(self, peer, sizes)

    def break_off(self) -> None:
        super().break_off()
        self._group = None  # closes its connections: the peers' waits fail

    def recover(self) -> None:
        self.close()

    def release(self) -> None:
        self.account(-sum(buffer.numel() for side in self._buffers.values() for buffer in side))
        self._buffers = {True: [], False: []}

    def close(self) -> None:
        self._group = None
        self.release()

    def group(self) -> dist.ProcessGroup:
        group = self._group
        if group is None:
            raise WaitError("the swap was given up")
        return group

    def wait(self, work: dist.Work, what: str) -> None:
        try:
            if self.device.type == "cuda":
                work.wait()
            else:
                work.wait(timedelta(seconds=self.timeout_s))
        except RuntimeError as error:
            raise WaitError(f"{what} failed: {error}") from error


class _CollectiveOutbox(Outbox):
    def __init__(self, transport: CollectiveTransport, peer: int) -> None:
        self._transport = transport
        self._peer = peer
        self._free = transport.buffers(outgoing=True)
        self._busy: deque[tuple[dist.Work, torch.Tensor]] = deque()
        self._current = self._free[0], 0

    def slot(self, nbytes: int) -> torch.Tensor:
        if not self._free:
            self._reap()
        buffer = self._free.pop()
        self._current = buffer, nbytes
        return buffer[:nbytes]

    def post(self) -> None:
        buffer, nbytes = self._current
        self._busy.append((self._transport.group().send([buffer[:nbytes]], self._peer, 0), buffer))

    def _reap(self) -> None:
        work, buffer = self._busy.popleft()
        self._transport.wait(work, f"sending to process {self._peer}")
        self._free.append(buffer)

    def flush(self) -> None:
        while self._busy:
            self._reap()


class _CollectiveInbox(Inbox):
    """The next bucket is already on its way into the other buffer while one is installed."""

    def __init__(self, transport: CollectiveTransport, peer: int, sizes: Sequence[int]) -> None:
        self._transport = transport
        self._peer = peer
        self._free = transport.buffers(outgoing=False)
        self._expected = deque(sizes)
        self._arriving: deque[tuple[dist.Work, torch.Tensor, torch.Tensor]] = deque()
        self._taken: torch.Tensor | None = None
        while self._free and self._expected:
            self._ask()

    def _ask(self) -> None:
        buffer = self._free.pop()
        part = buffer[: self._expected.popleft()]
        self._arriving.append((self._transport.group().recv([part], self._peer, 0), part, buffer))

    def slot(self, nbytes: int) -> torch.Tensor:
        work, part, buffer = self._arriving.popleft()
        self._transport.wait(work, f"receiving from process {self._peer}")
        self._taken = buffer
        return part

    def release(self) -> None:
        assert self._taken is not None
        self._free.append(self._taken)
        if self._expected:
            self._ask()

    def close(self) -> None:
        """The buffers belong to the transport."""
