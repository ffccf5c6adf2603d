"""Parcels become tables of boxes for `ops.boxes`: bucketed for the wire, merged, local offsets
resolved.

Invariant: splitting depends only on box shapes, so sender and receiver cut the same stream at the
same places.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod

import torch

from gyre_megatron.ops.boxes import COLUMNS
from gyre_megatron.weights.boxes import Box, LocalBox, contiguous_strides
from gyre_megatron.weights.planner import Parcel

ItemSize = Callable[[Parcel], int]


@dataclass(frozen=True)
class Bucket:
    """Part of a stream that fits one staging buffer. `offsets[i]` is the byte at which parcel i
    begins."""

    parcels: tuple[Parcel, ...]
    offsets: tuple[int, ...]
    nbytes: int


def split_rows(parcel: Parcel, limit: int) -> Iterator[Parcel]:
    """Cut a parcel into parts of at most `limit` elements, along its first dimensions."""
    start, shape = parcel.box
    if parcel.numel <= limit:
        yield parcel
        return
    dim = next(d for d in range(len(shape)) if prod(shape[d + 1 :]) <= limit or d == len(shape) - 1)
    for outer in _indices(shape[:dim]):
        step = max(1, limit // prod(shape[dim + 1 :]))
        for at in range(0, shape[dim], step):
            size = min(step, shape[dim] - at)
            lead = tuple(s + o for s, o in zip(start[:dim], outer, strict=True))
            box = Box(
                (*lead, start[dim] + at, *start[dim + 1 :]),
                ((1,) * dim + (size,) + shape[dim + 1 :]),
            )
            yield Parcel(box, parcel.source, parcel.target)


def _indices(shape: Sequence[int]) -> Iterator[tuple[int, ...]]:
    if not shape:
        yield ()
        return
    for first in range(shape[0]):
        for rest in _indices(shape[1:]):
            yield (first, *rest)


def bucketize(
    parcels: Iterable[Parcel], bucket_bytes: int, item_size: ItemSize, align: int = 16
) -> list[Bucket]:
    """Cut a stream of parcels into buckets of at most `bucket_bytes`; every parcel begins at a
    multiple of `align`."""
    buckets: list[Bucket] = []
    held: list[Parcel] = []
    offsets: list[int] = []
    used = 0
    for whole in parcels:
        size = item_size(whole)
        for parcel in split_rows(whole, max(1, bucket_bytes // size)):
            nbytes = -(-parcel.numel * size // align) * align
            if held and used + nbytes > bucket_bytes:
                buckets.append(Bucket(tuple(held), tuple(offsets), used))
                held, offsets, used = [], [], 0
            held.append(parcel)
            offsets.append(used)
            used += nbytes
    if held:
        buckets.append(Bucket(tuple(held), tuple(offsets), used))
    return buckets


Row = tuple[int, int, tuple[int, ...], int, int, tuple[int, ...], tuple[int, ...]]


def table_of(rows: Iterable[Row]) -> torch.Tensor:
    """Rows `(source index, offset, strides, target index, offset, strides, shape)` as an int64
    table, runs merged."""
    flat: list[list[int]] = []
    for si, so, ss, ti, to, ts, shape in rows:
        pad = 3 - len(shape)
        row = [si, so, ti, to, *(1,) * pad, *shape, *(0,) * pad, *ss, *(0,) * pad, *ts]
        if not (flat and _extend(flat[-1], row)):
            flat.append(row)
    return torch.tensor(flat, dtype=torch.int64).reshape(-1, COLUMNS)


def _extend(last: list[int], row: list[int]) -> bool:
    """Grow `last` by `row` where the two are neighbours along one dimension on both sides."""
    if last[0] != row[0] or last[2] != row[2] or last[7:] != row[7:]:
        return False
    for dim in (4, 5, 6):
        if last[4:dim] + last[dim + 1 : 7] != row[4:dim] + row[dim + 1 : 7] or any(
            n != 1 for n in last[4:dim]
        ):
            continue
        ahead_source = last[dim] * last[dim + 3]
        ahead_target = last[dim] * last[dim + 6]
        if ahead_source and row[1] - last[1] == ahead_source and row[3] - last[3] == ahead_target:
            last[dim] += row[dim]
            return True
    return False


def side(local_box: LocalBox, box: Box) -> tuple[int, tuple[int, ...]]:
    """Offset and strides of `box` in the local tensor that holds the local box."""
    return local_box.offset_of(box.start), local_box.strides


def direct_rows(
    parcels: Iterable[Parcel], source_index: Mapping[str, int], target_index: Mapping[str, int]
) -> Iterator[Row]:
    """Rows that copy parcels from parameters to parameters."""
    for box, source, target in parcels:
        so, ss = side(source, box)
        to, ts = side(target, box)
        yield source_index[source.tensor], so, ss, target_index[target.tensor], to, ts, box.shape


def pack_rows(
    bucket: Bucket, index: Mapping[str, int], staging: Callable[[Parcel, int], tuple[int, int]]
) -> Iterator[Row]:
    """Rows that copy a bucket's parcels from parameters to staging.

    Args:
        index: key of a local tensor -> its place in the list of sources.
        staging: (parcel, byte offset in the bucket) -> (index of the typed staging view, element
            offset).
    """
    for parcel, at in zip(bucket.parcels, bucket.offsets, strict=True):
        so, ss = side(parcel.source, parcel.box)
        view, to = staging(parcel, at)
        yield (
            index[parcel.source.tensor],
            so,
            ss,
            view,
            to,
            contiguous_strides(parcel.box.shape),
            parcel.box.shape,
        )


def unpack_rows(
    bucket: Bucket, index: Mapping[str, int], staging: Callable[[Parcel, int], tuple[int, int]]
) -> Iterator[Row]:
    """Rows that copy a bucket's parcels from staging to parameters; arguments as in `pack_rows`."""
    for parcel, at in zip(bucket.parcels, bucket.offsets, strict=True):
        view, so = staging(parcel, at)
        to, ts = side(parcel.target, parcel.box)
        yield (
            view,
            so,
            contiguous_strides(parcel.box.shape),
            index[parcel.target.tensor],
            to,
            ts,
            parcel.box.shape,
        )
