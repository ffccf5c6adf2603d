"""Buckets over point-to-point sends of a stand-alone process group: gloo on CPU, NCCL on GPU."""

from __future__ import annotations

from collections import deque
from datetime import timedelta

import torch
import torch.distributed as dist

from gyre_megatron.errors import TransferError
from gyre_megatron.weights.process_groups import make_group
from gyre_megatron.weights.transports.base import Inbox, Outbox, Transport

_WINDOW = 2


class CollectiveTransport(Transport):
    """Sends and receives in a process group of its own, remade after a failed swap."""

    def __init__(
        self, store: dist.Store, process: int, num_processes: int, name: str = "gyre/weights/collective",
        timeout_s: float = 60.0, staging_bytes: int = 128 << 20, device: torch.device | str = "cpu",
    ) -> None:  # fmt: skip
        super().__init__(store, process, num_processes, name, timeout_s, staging_bytes)
        self.device = torch.device(device)
        self._group: dist.ProcessGroup | None = None

    @property
    def bucket_bytes(self) -> int:
        return self._staging_bytes // (_WINDOW + 1) // 4096 * 4096

    def begin(self) -> None:
        super().begin()
        if self._group is not None:
            return
        name = f"attempt{self.attempt}"
        try:
            timeout = timedelta(seconds=self.timeout_s)
            self._group = make_group(self.store, name, self.process, self.num_processes, timeout)
        except (RuntimeError, ValueError) as error:
            raise TransferError(f"process {self.process} could not join the weight transport: {error}") from error

    def outbox(self, peer: int) -> Outbox:
        return _CollectiveOutbox(self, peer)

    def inbox(self, peer: int) -> Inbox:
        return _CollectiveInbox(self, peer)

    def break_off(self) -> None:
        self._group = None  # closes its connections: the peers' waits fail

    def recover(self) -> None:
        self._group = None

    def close(self) -> None:
        self._group = None

    def group(self) -> dist.ProcessGroup:
        group = self._group
        if group is None:
            raise TransferError(f"process {self.process}: the swap was given up")
        return group

    def wait(self, work: dist.Work, what: str) -> None:
        try:
            if self.device.type == "cuda":
                work.wait()
            else:
                work.wait(timedelta(seconds=self.timeout_s))
        except RuntimeError as error:
            raise TransferError(f"process {self.process}: {what} failed: {error}") from error


class _CollectiveOutbox(Outbox):
    def __init__(self, transport: CollectiveTransport, peer: int) -> None:
        bucket_bytes = transport.bucket_bytes
        self._transport, self._peer, self._bytes = transport, peer, bucket_bytes
        self._free = [torch.empty(bucket_bytes, dtype=torch.uint8, device=transport.device) for _ in range(_WINDOW)]
        transport.account(_WINDOW * bucket_bytes)
        self._busy: deque[tuple[dist.Work, torch.Tensor]] = deque()
        self._current: tuple[torch.Tensor, int] | None = None

    def slot(self, nbytes: int) -> torch.Tensor:
        if not self._free:
            self._reap()
        buffer = self._free.pop()
        self._current = buffer, nbytes
        return buffer[:nbytes]

    def post(self) -> None:
        assert self._current is not None
        buffer, nbytes = self._current
        self._busy.append((self._transport.group().send([buffer[:nbytes]], self._peer, 0), buffer))

    def _reap(self) -> None:
        work, buffer = self._busy.popleft()
        self._transport.wait(work, f"sending to process {self._peer}")
        self._free.append(buffer)

    def flush(self) -> None:
        while self._busy:
            self._reap()
        self._free.clear()
        self._transport.account(-_WINDOW * self._bytes)


class _CollectiveInbox(Inbox):
    def __init__(self, transport: CollectiveTransport, peer: int) -> None:
        bucket_bytes = transport.bucket_bytes
        self._transport, self._peer = transport, peer
        self._bytes = bucket_bytes
        self._buffer = torch.empty(bucket_bytes, dtype=torch.uint8, device=transport.device)
        transport.account(bucket_bytes)

    def slot(self, nbytes: int) -> torch.Tensor:
        part = self._buffer[:nbytes]
        work = self._transport.group().recv([part], self._peer, 0)
        self._transport.wait(work, f"receiving from process {self._peer}")
        return part

    def release(self) -> None:
        pass

    def close(self) -> None:
        self._transport.account(-self._bytes)
