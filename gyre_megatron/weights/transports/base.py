"""What a transport offers the executor: one ordered, bounded stream of buffers per pair of
processes."""

from __future__ import annotations

import os
import threading
import weakref
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist

from gyre_megatron.errors import TransferError
from gyre_megatron.weights.rendezvous import Rendezvous

_PORTABLE_AND_MAPPED = 3
"""cudaHostRegisterPortable | cudaHostRegisterMapped."""


class Outbox(ABC):
    """The sending end of a stream."""

    @abstractmethod
    def slot(self, nbytes: int) -> torch.Tensor:
        """A uint8 buffer of `nbytes` to fill; waits until one is free."""

    @abstractmethod
    def post(self) -> None:
        """Send the buffer last taken."""

    @abstractmethod
    def flush(self) -> None:
        """Wait until everything posted has left and the buffers may be dropped."""


class Inbox(ABC):
    """The receiving end of a stream."""

    @abstractmethod
    def slot(self, nbytes: int) -> torch.Tensor:
        """The next buffer of `nbytes`, filled; waits until it has arrived."""

    @abstractmethod
    def release(self) -> None:
        """Give the buffer last taken back to the stream."""

    @abstractmethod
    def close(self) -> None:
        """End the stream and drop its buffers."""


class Transport(ABC):
    """Streams between this process and its peers. Every wait ends after `timeout_s` with a
    TransferError.

    Args:
        store: reached by all processes; carries the vote at the end of each swap.
        name: keeps the keys of several transports on one store apart.
        staging_bytes: most staging memory that this process may hold; the same on all processes.
    """

    def __init__(
        self,
        store: dist.Store,
        process: int,
        num_processes: int,
        name: str,
        timeout_s: float,
        staging_bytes: int,
    ) -> None:
        self.process, self.num_processes, self.timeout_s = process, num_processes, timeout_s
        self.store = dist.PrefixStore(name, store)
        self.rendezvous = Rendezvous(self.store, process, num_processes, timeout_s)
        self.swap, self.attempt = 0, 0
        self._staging_bytes = staging_bytes
        self.peak_staging_bytes = 0
        self._held, self._lock = 0, threading.Lock()

    @property
    @abstractmethod
    def bucket_bytes(self) -> int:
        """Size of the largest bucket, chosen so that all buffers stay within the staging limit."""

    @abstractmethod
    def outbox(self, peer: int) -> Outbox:
        """Open the stream to `peer`."""

    @abstractmethod
    def inbox(self, peer: int, sizes: Sequence[int]) -> Inbox:
        """Open the stream from `peer`, which will carry buckets of `sizes` bytes."""

    @abstractmethod
    def break_off(self) -> None:
        """Make every wait of this process and of its peers in the current swap fail soon."""

    def begin(self) -> None:
        """Enter a swap; collective. After a failed one, connections are made afresh."""
        self.swap += 1
        self.rendezvous.start()

    def finish(self, failure: BaseException | None) -> None:
        """Vote on the current swap; collective.

        Raises:
            TransferError: this or another process failed, or did not vote within the timeout.
        """
        try:
            self.rendezvous.agree(failure, f"weight swap {self.swap}")
        except TransferError:
            self.give_up()
            raise

    def give_up(self) -> None:
        """Leave a failed swap behind; the next one starts with new connections."""
        self.attempt += 1
        self.recover()

    def recover(self) -> None:  # noqa: B027 (most transports keep no connections)
        """Forget the connections of a failed swap."""

    def close(self) -> None:  # noqa: B027 (most transports hold nothing)
        """Free what the transport holds."""

    def account(self, nbytes: int) -> None:
        """Note staging memory taken (or, if negative, freed)."""
        with self._lock:
            self._held += nbytes
            self.peak_staging_bytes = max(self.peak_staging_bytes, self._held)


def reserve_file(descriptor: int, size: int) -> None:
    """Take the memory of a file now: a sparse one would fail with a bus error in the middle of a
    swap.

    Raises:
        OSError: the file system is full.
    """
    os.posix_fallocate(descriptor, 0, size)


def map_file(path: Path, size: int) -> torch.Tensor:
    """A uint8 tensor over the first `size` bytes of a shared file.

    Where CUDA exists it is page-locked for its devices as long as the returned object lives (its
    owner keeps it beside any views).

    Raises:
        TransferError: the device refuses to lock the pages.
    """
    tensor = torch.from_file(str(path), shared=True, size=size, dtype=torch.uint8)
    if torch.cuda.is_available():
        runtime = torch.cuda.cudart()
        code = runtime.cudaHostRegister(tensor.data_ptr(), size, _PORTABLE_AND_MAPPED)
        if int(code):
            raise TransferError(
                f"page-locking {size} bytes of {path} failed with CUDA error {int(code)}; raise "
                "memlock limits"
            )
        weakref.finalize(tensor, runtime.cudaHostUnregister, tensor.data_ptr())
    return tensor
