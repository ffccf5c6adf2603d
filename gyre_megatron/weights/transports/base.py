"""What a transport offers the executor: one ordered, bounded stream of buffers per pair of
processes."""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec
import torch
import torch.distributed as dist

from gyre_megatron.errors import TransferError
from gyre_megatron.weights.rendezvous import Rendezvous, WaitError
from gyre_megatron.weights.shadow import Shadow, Window
from gyre_megatron.weights.shared_memory import memory_identity

_SHORTEST_PAUSE_S = 1e-4
_LONGEST_PAUSE_S = 2e-3


class Windows(NamedTuple):
    """What goes without a stream."""

    mapped: Mapping[int, list[Shadow]]
    """Peer -> its windows, mapped here: this process writes into them."""
    writers: frozenset[int]
    """Peers that write into this process's own windows."""


class _Offer(msgspec.Struct, array_like=True):
    memory: str
    windows: list[Window]


_decode_offer = msgspec.msgpack.Decoder(_Offer).decode


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
        kv_store: reached by all processes; carries the vote at the end of each swap.
        name: keeps the keys of several transports on one store apart.
        staging_bytes: most staging memory that this process may hold; the same on all processes.
        direct_directory: where the windows lie that peers of one host write into directly, without
            a stream; None for a transport that always uses streams.
    """

    def __init__(
        self,
        kv_store: dist.Store,
        process: int,
        num_processes: int,
        name: str,
        timeout_s: float,
        staging_bytes: int,
        direct_directory: Path | None = None,
    ) -> None:
        self.process = process
        self.num_processes = num_processes
        self.timeout_s = timeout_s
        self.kv_store = dist.PrefixStore(name, kv_store)
        self.rendezvous = Rendezvous(self.kv_store, process, num_processes, timeout_s)
        self.swap = 0
        self.peak_staging_bytes = 0
        self._direct_directory = direct_directory
        self._staging_bytes = staging_bytes
        self._held = 0
        self._lock = threading.Lock()
        self._broken = False

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

    def begin(self, number: int | None = None) -> None:
        """Enter a swap; collective. After a failed one, connections are made afresh.

        Args:
            number: the swap's number where the caller counts; greater than all before.
        """
        self.swap = self.swap + 1 if number is None else number
        self._broken = False
        self.rendezvous.start(self.swap)

    def connect_streams(self) -> None:  # noqa: B027 (some transports need no connections)
        """Make what streams need; collective, inside a swap in which any process has a stream.

        Raises:
            TransferError: a process could not.
        """

    def finish(self, failure: BaseException | None) -> None:
        """Vote on the current swap; collective.

        Raises:
            TransferError: this or another process failed, or did not vote within the timeout.
        """
        try:
            self.rendezvous.agree(failure, f"weight swap {self.swap}")
        except TransferError:
            self.recover()
            raise

    def break_off(self) -> None:
        """Make every wait of this process and of its peers in the current swap fail soon."""
        self._broken = True
        self.kv_store.set(self._cancel_key, "1")

    def recover(self) -> None:  # noqa: B027 (most transports keep no connections)
        """Forget the connections of a failed swap, and buffers that a late peer may write into."""

    def release(self) -> None:  # noqa: B027 (most transports hold nothing between swaps)
        """Free staging memory until the next swap; connections stay."""

    def close(self) -> None:
        """Free all that the transport holds."""
        self.release()

    def open_windows(self, mine: Sequence[Window], senders_to: Iterable[int]) -> Windows:
        """Map the windows that this process may write into directly; collective, inside a swap.

        Args:
            mine: files that hold all of this process's targets; empty if they lie elsewhere.
            senders_to: peers that this process sends to.

        Raises:
            TransferError: a process could not map a peer's window.
        """
        if self._direct_directory is None:
            return Windows({}, frozenset())
        here = memory_identity(self._direct_directory)
        offer = msgspec.msgpack.encode(_Offer(here, list(mine)))
        answers = self.rendezvous.exchange("offering windows", payload=offer)
        offers = [_decode_offer(answer) for answer in answers]
        near = [peer for peer, one in enumerate(offers) if one.memory == here]
        failure: Exception | None = None
        mapped: dict[int, list[Shadow]] = {}
        try:
            for peer in set(senders_to).intersection(near):
                if offers[peer].windows:
                    mapped[peer] = [Shadow.of(window) for window in offers[peer].windows]
        except (OSError, TransferError) as error:
            failure = error
        self.rendezvous.agree(failure, "mapping the windows of peers")
        return Windows(mapped, frozenset(near) if mine else frozenset())

    def wait_key(self, key: str, what: str) -> bytes:
        """The value that a peer sets in the store under `key`, which is then deleted.

        Raises:
            WaitError: it did not come in time, or the swap was broken off.
        """
        deadline = time.monotonic() + self.timeout_s
        pause = _SHORTEST_PAUSE_S
        while not self.kv_store.check([key]):
            # A blocking wait would hold the store against this process's other thread.
            if self._broken or self.kv_store.check([self._cancel_key]):
                raise WaitError(f"{what} was cancelled")
            if time.monotonic() > deadline:
                raise WaitError(f"{what} took longer than {self.timeout_s:g} s")
            time.sleep(pause)
            pause = min(_LONGEST_PAUSE_S, pause * 1.5)
        value = self.kv_store.get(key)
        self.kv_store.delete_key(key)
        return value

    def account(self, nbytes: int) -> None:
        """Note staging memory taken (or, if negative, freed)."""
        with self._lock:
            self._held += nbytes
            self.peak_staging_bytes = max(self.peak_staging_bytes, self._held)

    @property
    def _cancel_key(self) -> str:
        return f"cancel{self.swap}"
