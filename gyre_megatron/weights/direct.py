"""Parcels that go straight to where they belong: into this process's own targets, or into a peer's
window. One read and one write for each byte. And checksums of parcels, on either side."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch

from gyre_megatron.ops.boxes import checksum_boxes, copy_boxes, copy_boxes_with_checksums, wrap64
from gyre_megatron.weights.planner import Parcel
from gyre_megatron.weights.tables import direct_rows, table_of

Sums = dict[str, int]
"""Key of a target -> sum over some of its elements, modulo 2**64; parts add up to the checksum."""


class DirectCopies:
    """Parcels between tensors that this process can reach.

    Args:
        parcels: what to copy.
        source_index: key of a source -> its place in the list that `run` is given.
        targets: key of a target -> the tensor.
    """

    def __init__(
        self,
        parcels: Sequence[Parcel],
        source_index: Mapping[str, int],
        targets: Mapping[str, torch.Tensor],
    ) -> None:
        self._keys, self._table = _keyed_table(parcels, source_index)
        self._targets = [targets[key] for key in self._keys]
        self.nbytes = sum(p.numel * targets[p.target.tensor].element_size() for p in parcels)

    def run(self, sources: Sequence[torch.Tensor], with_sums: bool) -> Sums:
        """Copy, and return what each target's checksum gains, taken of what was read.

        Args:
            with_sums: False leaves the sums out.
        """
        if not self._keys:
            return {}
        if not with_sums:
            copy_boxes(sources, self._targets, self._table)
            return {}
        sums = copy_boxes_with_checksums(sources, self._targets, self._table)
        return dict(zip(self._keys, sums, strict=True))


class SourceSums:
    """What parcels that travel through a stream add to the checksums of their targets.

    Args:
        parcels: what is sent.
        source_index: key of a source -> its place in the list that `of` is given.
        dtypes: key of a target -> its dtype.
    """

    def __init__(
        self,
        parcels: Sequence[Parcel],
        source_index: Mapping[str, int],
        dtypes: Mapping[str, torch.dtype],
    ) -> None:
        self._keys, self._table = _keyed_table(parcels, source_index)
        self._dtypes = [dtypes[key] for key in self._keys]
        self.nbytes = sum(p.numel * dtypes[p.target.tensor].itemsize for p in parcels)

    def of(self, sources: Sequence[torch.Tensor]) -> Sums:
        """Read the sources once."""
        if not self._keys:
            return {}
        like = [torch.empty(0, dtype=dtype, device=sources[0].device) for dtype in self._dtypes]
        return dict(zip(self._keys, checksum_boxes(sources, like, self._table), strict=True))


class ArrivedSums:
    """What lies in this process's own targets where a peer was to write.

    Args:
        parcels: what that peer writes.
        targets: key of a target -> the tensor.
    """

    def __init__(self, parcels: Sequence[Parcel], targets: Mapping[str, torch.Tensor]) -> None:
        self._keys = _target_keys(parcels)
        self._targets = [targets[key] for key in self._keys]
        index = {key: i for i, key in enumerate(self._keys)}
        there = [Parcel(parcel.box, parcel.target, parcel.target) for parcel in parcels]
        self._table = table_of(direct_rows(there, index, index))
        self.nbytes = sum(p.numel * targets[p.target.tensor].element_size() for p in parcels)

    def differing(self, expected: Sums) -> Iterator[str]:
        """Keys of the targets that hold something else than the peer read."""
        found = checksum_boxes(self._targets, self._targets, self._table)
        for key, value in zip(self._keys, found, strict=True):
            if expected.get(key) != value:
                yield key


def add_sums(total: Sums, part: Sums) -> None:
    """Add `part` to `total`."""
    for key, value in part.items():
        total[key] = wrap64(total.get(key, 0) + value)


def _keyed_table(
    parcels: Sequence[Parcel], source_index: Mapping[str, int]
) -> tuple[list[str], torch.Tensor]:
    """Keys of the targets, and the table of boxes in which targets go by their place among them."""
    keys = _target_keys(parcels)
    return keys, table_of(direct_rows(parcels, source_index, {k: i for i, k in enumerate(keys)}))


def _target_keys(parcels: Sequence[Parcel]) -> list[str]:
    return list(dict.fromkeys(parcel.target.tensor for parcel in parcels))
