"""A stream of buckets between two processes: how parcels are cut into it, and how damage is found."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from gyre_megatron.errors import TransferError
from gyre_megatron.ops.boxes import box_checksum
from gyre_megatron.weights.planner import Parcel
from gyre_megatron.weights.tables import Bucket, bucketize, pack_rows, table_of, unpack_rows

WireDtype = Callable[[str], torch.dtype]
"""Canonical name -> the dtype in which it travels."""

TRAILER = 16
"""Bytes after each bucket: its checksum and its length."""


@dataclass
class Stream:
    """Buckets to or from one peer with their tables."""

    peer: int
    buckets: list[Bucket]
    tables: list[torch.Tensor] = field(default_factory=list)


class StreamTables:
    """Cuts parcels into buckets, alike on both ends of a stream.

    Args:
        wire_dtype: dtype of each canonical tensor in a bucket.
        bucket_bytes: size of the largest bucket, trailer included.
        source_index, target_index: key of a tensor -> its place in the list of tensors.
    """

    def __init__(
        self,
        wire_dtype: WireDtype,
        bucket_bytes: int,
        source_index: Mapping[str, int],
        target_index: Mapping[str, int],
    ) -> None:
        self._wire_dtype = wire_dtype
        self._bucket_bytes = bucket_bytes
        self._source_index = source_index
        self._target_index = target_index
        self._dtypes: list[torch.dtype] = []

    def sending(self, peer: int, parcels: Sequence[Parcel]) -> Stream:
        """Buckets to `peer`, their tables from sources to a bucket."""
        stream = self._cut(peer, parcels)
        for bucket in stream.buckets:
            stream.tables.append(table_of(pack_rows(bucket, self._source_index, self._place)))
        return stream

    def receiving(self, peer: int, parcels: Sequence[Parcel]) -> Stream:
        """Buckets from `peer`, their tables from a bucket to targets."""
        stream = self._cut(peer, parcels)
        for bucket in stream.buckets:
            stream.tables.append(table_of(unpack_rows(bucket, self._target_index, self._place)))
        return stream

    def views(self, slot: torch.Tensor) -> list[torch.Tensor]:
        """A bucket as one tensor of each dtype on the wire, as the tables number them."""
        return [slot[: slot.numel() // d.itemsize * d.itemsize].view(d) for d in self._dtypes]

    def _cut(self, peer: int, parcels: Sequence[Parcel]) -> Stream:
        return Stream(peer, bucketize(parcels, self._bucket_bytes - TRAILER, self._item_size))

    def _item_size(self, parcel: Parcel) -> int:
        return self._wire_dtype(parcel.source.name).itemsize

    def _place(self, parcel: Parcel, at: int) -> tuple[int, int]:
        dtype = self._wire_dtype(parcel.source.name)
        if dtype not in self._dtypes:
            self._dtypes.append(dtype)
        return self._dtypes.index(dtype), at // dtype.itemsize


def seal(slot: torch.Tensor) -> None:
    """Write the trailer of a filled bucket."""
    body, trailer = _parts(slot)
    trailer.copy_(torch.tensor([box_checksum(body), body.numel()]))


def check(slot: torch.Tensor, peer: int) -> None:
    """Compare a bucket with its trailer.

    Raises:
        TransferError: it arrived damaged.
    """
    body, trailer = _parts(slot)
    if trailer.tolist() != [box_checksum(body), body.numel()]:
        raise TransferError(
            f"a bucket of {body.numel() * 4} bytes from process {peer} arrived damaged"
        )


def _parts(slot: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    body = slot.numel() - TRAILER
    return slot[:body].view(torch.int32), slot[body:].view(torch.int64)
