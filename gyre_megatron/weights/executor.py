"""Runs a plan: pack -> wire -> install, in buckets, with sending and receiving at the same time.

The sender's thread packs the next bucket while the last one is on the wire; the receiver installs
each bucket as it arrives. Every process walks its peers in the same rounds (send to p+k, receive
from p-k), so no pair waits on a third. The result does not depend on the size of the buckets.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch

from gyre_megatron.errors import GyreError, TransferError
from gyre_megatron.ops.boxes import box_checksum, copy_boxes
from gyre_megatron.weights.planner import Parcel, RankPlan
from gyre_megatron.weights.tables import (
    Bucket,
    bucketize,
    direct_rows,
    pack_rows,
    table_of,
    unpack_rows,
)
from gyre_megatron.weights.transports.base import Transport

WireDtype = Callable[[str], torch.dtype]
"""Canonical name -> the dtype in which it travels."""


_MIN_BUCKET = 4096
_TRAILER = 16
"""Bytes after each bucket: its checksum and its length."""


@dataclass
class StageTimes:
    """Seconds spent in each stage by one process; stages overlap, so they need not add up to the
    whole."""

    pack: float = 0.0
    wire: float = 0.0
    """Sender: handing buckets to the transport, and waiting for free ones."""
    wait: float = 0.0
    """Receiver: waiting for buckets."""
    install: float = 0.0
    bytes_sent: int = 0
    bytes_received: int = 0
    bytes_local: int = 0


@dataclass
class _Stream:
    """Buckets to or from one peer with their tables."""

    peer: int
    buckets: list[Bucket]
    tables: list[torch.Tensor] = field(default_factory=list)


class Resharder:
    """One process's part of a reshard, prepared once and run as often as weights change.

    Args:
        plan: this process's plan.
        sources: key -> live tensor of the source layout (may be empty).
        targets: key -> live tensor of the target layout (may be empty).
        wire_dtype: dtype of each canonical tensor on the wire; must be the same on all processes.
        verify: send a checksum with every bucket and refuse damaged ones before they are installed.
    """

    def __init__(
        self,
        plan: RankPlan,
        sources: Mapping[str, torch.Tensor],
        targets: Mapping[str, torch.Tensor],
        transport: Transport,
        wire_dtype: WireDtype,
        verify: bool = False,
    ) -> None:
        self._transport, self._verify = transport, verify
        if transport.bucket_bytes < _MIN_BUCKET:
            raise TransferError(
                f"staging memory leaves {transport.bucket_bytes} bytes for a bucket, {_MIN_BUCKET} "
                "are the least; "
                "raise weights.staging_mib"
            )
        self._wire_dtype = wire_dtype
        self._source_keys = {key: i for i, key in enumerate(sources)}
        self._target_keys = {key: i for i, key in enumerate(targets)}
        self._sources, self._targets = list(sources.values()), list(targets.values())
        self._dtypes: list[torch.dtype] = []
        self._on_device = any(tensor.is_cuda for tensor in (*self._sources, *self._targets))
        self._local = table_of(direct_rows(plan.local, self._source_keys, self._target_keys))
        self._local_bytes = sum(p.numel * self._item_size(p) for p in plan.local)
        me, n = transport.process, transport.num_processes
        order = range(1, n)
        self._sends = [
            self._stream(plan.sends, (me + k) % n, True)
            for k in order
            if (me + k) % n in plan.sends
        ]
        self._receives = [
            self._stream(plan.receives, (me - k) % n, False)
            for k in order
            if (me - k) % n in plan.receives
        ]

    def run(self) -> StageTimes:
        """Move the weights once.

        Raises:
            TransferError: a peer failed, hung or sent damaged data; target tensors may be partly
            written.
        """
        times = StageTimes(bytes_local=self._local_bytes)
        failure: list[BaseException] = []
        try:
            self._transport.begin()
        except TransferError:
            self._transport.give_up()
            raise
        sender = threading.Thread(
            target=self._guard, args=(self._send_all, times, failure), name="gyre-weights-send"
        )
        sender.start()
        self._guard(self._receive_all, times, failure)
        sender.join()
        self._transport.finish(failure[0] if failure else None)
        return times

    def _guard(
        self, stage: Callable[[StageTimes], None], times: StageTimes, failure: list[BaseException]
    ) -> None:
        """Run one side; its error stops the other side through the transport."""
        try:
            stage(times)
        except Exception as error:
            wrapped = (
                error
                if isinstance(error, GyreError)
                else TransferError(f"weight transfer failed: {error}")
            )
            if wrapped is not error:
                wrapped.__cause__ = error
            failure.append(wrapped)
            self._transport.break_off()

    def _send_all(self, times: StageTimes) -> None:
        for stream in self._sends:
            outbox = self._transport.outbox(stream.peer)
            for bucket, table in zip(stream.buckets, stream.tables, strict=True):
                start = time.perf_counter()
                slot = outbox.slot(bucket.nbytes + _TRAILER)
                waited = time.perf_counter()
                copy_boxes(self._sources, self._views(slot), table)
                self._settle()
                if self._verify:
                    _seal(slot)
                packed = time.perf_counter()
                outbox.post()
                times.bytes_sent += bucket.nbytes
                times.pack += packed - waited
                times.wire += waited - start + time.perf_counter() - packed
            start = time.perf_counter()
            outbox.flush()
            times.wire += time.perf_counter() - start

    def _receive_all(self, times: StageTimes) -> None:
        start = time.perf_counter()
        if len(self._local):
            copy_boxes(self._sources, self._targets, self._local)
            self._settle()
        times.install += time.perf_counter() - start
        for stream in self._receives:
            inbox = self._transport.inbox(
                stream.peer, [bucket.nbytes + _TRAILER for bucket in stream.buckets]
            )
            for bucket, table in zip(stream.buckets, stream.tables, strict=True):
                start = time.perf_counter()
                slot = inbox.slot(bucket.nbytes + _TRAILER)
                arrived = time.perf_counter()
                times.wait += arrived - start
                if self._verify:
                    _check(slot, stream.peer)
                copy_boxes(self._views(slot), self._targets, table)
                self._settle()
                inbox.release()
                times.bytes_received += bucket.nbytes
                times.install += time.perf_counter() - arrived
            inbox.close()

    def _settle(self) -> None:
        """Wait for this thread's copies before telling anyone that a buffer may be read or
        reused."""
        if self._on_device:
            torch.cuda.current_stream().synchronize()

    def _stream(self, parcels: Mapping[int, list[Parcel]], peer: int, sending: bool) -> _Stream:
        stream = _Stream(
            peer, bucketize(parcels[peer], self._transport.bucket_bytes - _TRAILER, self._item_size)
        )
        for bucket in stream.buckets:
            rows = (
                pack_rows(bucket, self._source_keys, self._place)
                if sending
                else unpack_rows(bucket, self._target_keys, self._place)
            )
            stream.tables.append(table_of(rows))
        return stream

    def _item_size(self, parcel: Parcel) -> int:
        return self._wire_dtype(parcel.source.name).itemsize

    def _place(self, parcel: Parcel, at: int) -> tuple[int, int]:
        dtype = self._wire_dtype(parcel.source.name)
        if dtype not in self._dtypes:
            self._dtypes.append(dtype)
        return self._dtypes.index(dtype), at // dtype.itemsize

    def _views(self, slot: torch.Tensor) -> list[torch.Tensor]:
        return [slot[: slot.numel() // d.itemsize * d.itemsize].view(d) for d in self._dtypes]


def _trailer(slot: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    body = slot.numel() - _TRAILER
    return slot[:body].view(torch.int32), slot[body:].view(torch.int64)


def _seal(slot: torch.Tensor) -> None:
    body, trailer = _trailer(slot)
    trailer.copy_(torch.tensor([box_checksum(body), body.numel()]))


def _check(slot: torch.Tensor, peer: int) -> None:
    body, trailer = _trailer(slot)
    if trailer.tolist() != [box_checksum(body), body.numel()]:
        raise TransferError(
            f"a bucket of {body.numel() * 4} bytes from process {peer} arrived damaged"
        )
