"""Runs a plan: every process sends and receives at the same time, in buckets or straight into place.

The sender's thread packs the next bucket while the last one is on the wire; the receiver installs
each bucket as it arrives. Where the transport can reach a receiver's targets, nothing is packed:
the sender writes into them. Every process walks its peers in the same rounds (send to p+k, receive
from p-k), so no pair waits on a third. The result does not depend on the size of the buckets.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import msgspec
import torch

from gyre_megatron.errors import GyreError, TransferError
from gyre_megatron.ops.boxes import copy_boxes
from gyre_megatron.weights.direct import ArrivedSums, DirectCopies, SourceSums, Sums, add_sums
from gyre_megatron.weights.planner import RankPlan
from gyre_megatron.weights.shadow import Window
from gyre_megatron.weights.stage_times import StageTimes
from gyre_megatron.weights.streams import TRAILER, Stream, StreamTables, WireDtype, check, seal
from gyre_megatron.weights.transports.base import Transport, Windows

_MIN_BUCKET = 4096
_decode_sums = msgspec.msgpack.Decoder(Sums).decode


@dataclass
class _Routes:
    """How each peer is reached, once windows are mapped."""

    writes: dict[int, DirectCopies] = field(default_factory=dict)
    sends: list[Stream] = field(default_factory=list)
    receives: list[Stream] = field(default_factory=list)
    writers: dict[int, ArrivedSums] = field(default_factory=dict)
    streamed: SourceSums | None = None
    any_streams: bool = False
    """Whether any process has a stream."""


class Resharder:
    """One process's part of a reshard, prepared once and run as often as weights change.

    Args:
        plan: this process's plan.
        sources: key -> live tensor of the source layout (may be empty).
        targets: key -> live tensor of the target layout (may be empty).
        wire_dtype: dtype of each canonical tensor on the wire; must be the same on all processes.
        verify: each receiver compares checksums of what arrived with those of what was read.
            Buckets are refused before they are installed, windows after they were written.
        windows: files that hold `targets`, all of them or none; peers that can map them write into
            them, as soon as they enter the next run: use or copy the targets before.
        sum_dtypes: dtype of every target that this process's parcels go to, its own and its peers',
            by keys that are unique over all processes. Then `run` returns the parcels' checksums
            for whoever reads the targets next, and `verify` may be left off.
    """

    def __init__(
        self,
        plan: RankPlan,
        sources: Mapping[str, torch.Tensor],
        targets: Mapping[str, torch.Tensor],
        transport: Transport,
        wire_dtype: WireDtype,
        verify: bool = False,
        *,
        windows: Sequence[Window] = (),
        sum_dtypes: Mapping[str, torch.dtype] | None = None,
    ) -> None:
        if transport.bucket_bytes < _MIN_BUCKET:
            raise TransferError(
                f"staging memory leaves {transport.bucket_bytes} bytes for a bucket, {_MIN_BUCKET} "
                "are the least; raise weights.staging_mib"
            )
        self._plan = plan
        self._transport = transport
        self._verify = verify
        self._windows = windows
        self._sum_dtypes = sum_dtypes
        self._source_index = {key: i for i, key in enumerate(sources)}
        self._sources = list(sources.values())
        self._target_map = dict(targets)
        self._targets = list(targets.values())
        self._on_device = any(tensor.is_cuda for tensor in (*self._sources, *self._targets))
        self._local = DirectCopies(plan.local, self._source_index, targets)
        self._tables = StreamTables(
            wire_dtype,
            transport.bucket_bytes,
            self._source_index,
            {key: i for i, key in enumerate(targets)},
        )
        self._routes: _Routes | None = None
        self._lock = threading.Lock()
        """Held while either side adds to the sums."""

    def run(
        self, sources: Mapping[str, torch.Tensor] | None = None, number: int | None = None
    ) -> StageTimes:
        """Move the weights once; collective.

        Args:
            sources: the sources where their storage has moved since; same keys, shapes and dtypes.
            number: the swap's number where the caller counts; see `Transport.begin`.

        Raises:
            TransferError: a process failed, hung or sent damaged data; target tensors may be partly
                written. It names the process that failed first.
        """
        if self._routes is None:
            self.connect(None if number is None else number - 1)
        assert self._routes is not None
        if sources is not None:
            self._sources = [sources[key] for key in self._source_index]
        times = StageTimes()
        try:
            self._transport.begin(number)
            if self._routes.any_streams:
                self._transport.connect_streams()
        except TransferError:
            self._transport.recover()
            raise
        failure = self._move(self._routes, times)
        self._transport.finish(failure)
        return times

    def connect(self, number: int | None = None) -> None:
        """Map the peers' windows and make the tables, which the first run does otherwise;
        collective.

        Args:
            number: as for `run`, and below the number of the run that follows.

        Raises:
            TransferError: a process could not.
        """
        self._transport.begin(number)
        try:
            self._routes = self._connect()
        except TransferError:
            self._transport.recover()
            raise

    # -- routes ---------------------------------------------------

    def _connect(self) -> _Routes:
        """Learn who is reached directly, and make the tables of the others' streams; collective."""
        plan, transport = self._plan, self._transport
        windows = transport.open_windows(self._windows, plan.sends)
        routes = _Routes()
        streamed = []
        for peer in self._peers(1, plan.sends):
            if peer in windows.mapped:
                targets = _tensors(windows, peer)
                routes.writes[peer] = DirectCopies(plan.sends[peer], self._source_index, targets)
            else:
                routes.sends.append(self._tables.sending(peer, plan.sends[peer]))
                streamed += plan.sends[peer]
        for peer in self._peers(-1, plan.receives):
            if peer in windows.writers:
                routes.writers[peer] = ArrivedSums(plan.receives[peer], self._target_map)
            else:
                routes.receives.append(self._tables.receiving(peer, plan.receives[peer]))
        if self._sum_dtypes is not None:
            routes.streamed = SourceSums(streamed, self._source_index, self._sum_dtypes)
        has_streams = bytes([bool(routes.sends or routes.receives)])
        routes.any_streams = b"\x01" in transport.rendezvous.exchange(
            "choosing routes", payload=has_streams
        )
        return routes

    def _peers(self, direction: int, planned: Mapping[int, object]) -> Iterator[int]:
        """Planned peers in the order of the rounds."""
        me, n = self._transport.process, self._transport.num_processes
        rounds = ((me + direction * k) % n for k in range(1, n))
        return (peer for peer in rounds if peer in planned)

    # -- one run ---------------------------------------------------

    def _move(self, routes: _Routes, times: StageTimes) -> BaseException | None:
        """Send and receive; returns the first error of either side."""
        failure: list[BaseException] = []
        sender = threading.Thread(
            target=self._guard,
            args=(self._send_all, routes, times, failure),
            name="gyre-weights-send",
        )
        sender.start()
        self._guard(self._receive_all, routes, times, failure)
        sender.join()
        return failure[0] if failure else None

    def _guard(
        self,
        side: Callable[[_Routes, StageTimes], None],
        routes: _Routes,
        times: StageTimes,
        failure: list[BaseException],
    ) -> None:
        """Run one side; its error stops the other side through the transport."""
        try:
            side(routes, times)
        except Exception as error:
            if not isinstance(error, GyreError):
                wrapped = TransferError(f"weight transfer failed: {error}")
                wrapped.__cause__ = error
                error = wrapped
            failure.append(error)
            self._transport.break_off()

    def _send_all(self, routes: _Routes, times: StageTimes) -> None:
        if routes.streamed is not None:
            streamed = routes.streamed.of(self._sources)
            with self._lock:
                add_sums(times.sums, streamed)
            times.bytes_read += routes.streamed.nbytes
        for peer, copies in routes.writes.items():
            sums = self._copy(copies, times, self._verify)
            times.bytes_sent += copies.nbytes
            if self._verify:
                key = f"sums{self._transport.swap}.{self._transport.process}-{peer}"
                self._transport.kv_store.set(key, msgspec.msgpack.encode(sums))  # type: ignore[arg-type]
        for stream in routes.sends:
            outbox = self._transport.outbox(stream.peer)
            for bucket, table in zip(stream.buckets, stream.tables, strict=True):
                start = time.perf_counter()
                slot = outbox.slot(bucket.nbytes + TRAILER)
                waited = time.perf_counter()
                copy_boxes(self._sources, self._tables.views(slot), table)
                self._settle()
                if self._verify:
                    seal(slot)
                packed = time.perf_counter()
                outbox.post()
                times.bytes_sent += bucket.nbytes
                times.bytes_read += bucket.nbytes * (2 if self._verify else 1)
                times.bytes_written += bucket.nbytes
                times.pack += packed - waited
                times.wire += waited - start + time.perf_counter() - packed
            start = time.perf_counter()
            outbox.flush()
            times.wire += time.perf_counter() - start

    def _receive_all(self, routes: _Routes, times: StageTimes) -> None:
        self._copy(self._local, times, False)
        times.bytes_local = self._local.nbytes
        for stream in routes.receives:
            inbox = self._transport.inbox(
                stream.peer, [bucket.nbytes + TRAILER for bucket in stream.buckets]
            )
            for bucket, table in zip(stream.buckets, stream.tables, strict=True):
                start = time.perf_counter()
                slot = inbox.slot(bucket.nbytes + TRAILER)
                arrived = time.perf_counter()
                times.wait += arrived - start
                if self._verify:
                    check(slot, stream.peer)
                copy_boxes(self._tables.views(slot), self._targets, table)
                self._settle()
                inbox.release()
                times.bytes_received += bucket.nbytes
                times.bytes_read += bucket.nbytes * (2 if self._verify else 1)
                times.bytes_written += bucket.nbytes
                times.install += time.perf_counter() - arrived
            inbox.close()
        for peer, arrived_sums in routes.writers.items():
            times.bytes_received += arrived_sums.nbytes
            if self._verify:
                self._check_window(peer, arrived_sums, times)

    def _copy(self, copies: DirectCopies, times: StageTimes, verify: bool) -> Sums:
        start = time.perf_counter()
        sums = copies.run(self._sources, verify or self._sum_dtypes is not None)
        self._settle()
        if self._sum_dtypes is not None:
            with self._lock:
                add_sums(times.sums, sums)
        times.bytes_read += copies.nbytes
        times.bytes_written += copies.nbytes
        times.direct += time.perf_counter() - start
        return sums

    def _check_window(self, peer: int, arrived: ArrivedSums, times: StageTimes) -> None:
        start = time.perf_counter()
        me, swap = self._transport.process, self._transport.swap
        said = self._transport.wait_key(
            f"sums{swap}.{peer}-{me}", f"waiting for process {peer} to write"
        )
        waited = time.perf_counter()
        wrong = list(arrived.differing(_decode_sums(said)))
        times.bytes_read += arrived.nbytes
        times.wait += waited - start
        times.check += time.perf_counter() - waited
        if wrong:
            raise TransferError(
                f"what process {peer} wrote arrived damaged in {len(wrong)} tensors, first "
                f"{wrong[:3]}"
            )

    def _settle(self) -> None:
        """Wait for this thread's copies before telling anyone that a buffer may be read or
        reused."""
        if self._on_device:
            torch.cuda.current_stream().synchronize()


def _tensors(windows: Windows, peer: int) -> dict[str, torch.Tensor]:
    return {key: t for shadow in windows.mapped[peer] for key, t in shadow.tensors.items()}
