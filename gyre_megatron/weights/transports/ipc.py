"""Memory shared by the processes of one host.

Where the receiver's tensors lie in windows, senders write straight into them: one read, one write.
Tensors in private memory take buckets: the receiver installs straight from the sender's slot. For
these every process owns one ring of slots and a page of counters, mapped by all others. The files are
unlinked as soon as everyone has mapped them, so nothing outlives the processes, however they end.
With CUDA the slots are page-locked host memory, which devices read and write directly.
"""

from __future__ import annotations

import tempfile
from collections import deque
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist

from gyre_megatron.errors import TransferError
from gyre_megatron.ops.flags import flag_set, flag_wait
from gyre_megatron.weights.rendezvous import WaitError
from gyre_megatron.weights.shared_memory import map_file, reserve_file
from gyre_megatron.weights.transports.base import Inbox, Outbox, Transport

SLOTS = 4
_POSTED, _BASE, _TAKEN, _PER_PEER = 0, 1, 2, 8
_CANCEL = 0
"""Counter 0 of every page cancels; peer p's counters begin at 8 * (p + 1)."""


class _Ring:
    """One process's slots and counters."""

    def __init__(self, path: Path, num_processes: int, bucket_bytes: int) -> None:
        header = 8 * _PER_PEER * (num_processes + 1)
        self._memory = whole = map_file(path, header + SLOTS * bucket_bytes)
        self.flags = whole[:header].view(torch.int64)
        self.slots = whole[header:].view(SLOTS, bucket_bytes)

    @staticmethod
    def size(num_processes: int, bucket_bytes: int) -> int:
        return 8 * _PER_PEER * (num_processes + 1) + SLOTS * bucket_bytes


def _counter(peer: int, which: int) -> int:
    return _PER_PEER * (peer + 1) + which


class IpcTransport(Transport):
    """Windows, and rings in shared memory. All processes must be on one host."""

    def __init__(
        self,
        kv_store: dist.Store,
        process: int,
        num_processes: int,
        name: str = "gyre/weights/ipc",
        timeout_s: float = 60.0,
        staging_bytes: int = 128 << 20,
        directory: str | Path = "/dev/shm",
    ) -> None:
        super().__init__(
            kv_store, process, num_processes, name, timeout_s, staging_bytes, Path(directory)
        )
        self._directory = directory
        self._rings: list[_Ring] = []
        self._outstanding: deque[tuple[int, int]] = deque()
        self._sequence = 0

    @property
    def bucket_bytes(self) -> int:
        return self._staging_bytes // SLOTS // 4096 * 4096

    def connect_streams(self) -> None:
        if not self._rings:
            self._open()
        for peer in range(self.num_processes):  # counters of this swap start at zero
            for which in (_POSTED, _TAKEN):
                flag_set(self._rings[self.process].flags, _counter(peer, which), 0)
        self._outstanding.clear()
        self._sequence = 0
        self.rendezvous.agree(None, f"entering weight swap {self.swap}")

    def _open(self) -> None:
        """Make this process's ring and map everyone's; collective."""
        failure: TransferError | None = None
        rings: list[_Ring] = []
        with tempfile.NamedTemporaryFile(prefix="gyre-ring-", dir=self._directory) as file:
            try:
                reserve_file(file.fileno(), _Ring.size(self.num_processes, self.bucket_bytes))
            except OSError as error:
                failure = TransferError(
                    f"{self._directory} cannot hold {SLOTS} slots of {self.bucket_bytes} bytes "
                    f"({error}); lower "
                    "weights.staging_mib"
                )
            answers = self.rendezvous.exchange("making shared memory", failure, file.name.encode())
            try:
                rings = [
                    _Ring(Path(path.decode()), self.num_processes, self.bucket_bytes)
                    for path in answers
                ]
            except (OSError, RuntimeError) as error:  # another host, or a device that refuses
                failure = TransferError(f"a peer's shared memory cannot be mapped: {error}")
            self.rendezvous.agree(failure, "mapping shared memory")
        self._rings = rings
        self.account(SLOTS * self.bucket_bytes)

    def outbox(self, peer: int) -> Outbox:
        return _IpcOutbox(self, peer)

    def inbox(self, peer: int, sizes: Sequence[int]) -> Inbox:
        return _IpcInbox(self, peer)

    def break_off(self) -> None:
        super().break_off()
        for ring in self._rings:
            flag_set(ring.flags, _CANCEL, 1)

    def recover(self) -> None:
        """New rings: a process that wakes up late writes where nobody reads."""
        if self._rings:
            self.account(-SLOTS * self.bucket_bytes)
        self._rings = []

    def release(self) -> None:
        self.recover()

    def wait(self, ring: _Ring, index: int, value: int, what: str) -> None:
        outcome = flag_wait(ring.flags, index, value, _CANCEL, self.timeout_s)
        if outcome != 1:
            why = f"took longer than {self.timeout_s:g} s" if outcome == 0 else "was cancelled"
            raise WaitError(f"{what} {why}")


class _IpcOutbox(Outbox):
    def __init__(self, transport: IpcTransport, peer: int) -> None:
        self._transport = transport
        self._peer = peer
        self._posted = 0
        self._ring = transport._rings[transport.process]
        flag_set(self._ring.flags, _counter(peer, _BASE), transport._sequence)

    def slot(self, nbytes: int) -> torch.Tensor:
        transport = self._transport
        if len(transport._outstanding) == SLOTS:
            peer, count = transport._outstanding.popleft()
            what = f"waiting for process {peer} to take a bucket"
            transport.wait(self._ring, _counter(peer, _TAKEN), count, what)
        return self._ring.slots[transport._sequence % SLOTS, :nbytes]

    def post(self) -> None:
        self._posted += 1
        self._transport._sequence += 1
        self._transport._outstanding.append((self._peer, self._posted))
        flag_set(self._ring.flags, _counter(self._peer, _POSTED), self._posted)

    def flush(self) -> None:
        """Nothing to wait for: the slots outlive the stream, and the vote at the end waits for the
        receivers."""


class _IpcInbox(Inbox):
    def __init__(self, transport: IpcTransport, peer: int) -> None:
        self._transport = transport
        self._peer = peer
        self._count = 0
        self._ring = transport._rings[peer]

    def slot(self, nbytes: int) -> torch.Tensor:
        me = self._transport.process
        what = f"waiting for a bucket of process {self._peer}"
        self._transport.wait(self._ring, _counter(me, _POSTED), self._count + 1, what)
        base = int(self._ring.flags[_counter(me, _BASE)])
        return self._ring.slots[(base + self._count) % SLOTS, :nbytes]

    def release(self) -> None:
        self._count += 1
        flag_set(self._ring.flags, _counter(self._transport.process, _TAKEN), self._count)

    def close(self) -> None:
        """The slots belong to the sender."""
