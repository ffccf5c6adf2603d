"""Copy thousands of strided boxes between lists of tensors in one call (csrc: boxes).

A table has one row of int64 per box: `[source index, source offset, target index, target offset, shape x 3,
source strides x 3, target strides x 3]`, offsets and strides in elements, missing leading dimensions of size 1.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

COLUMNS = 13


def copy_boxes_reference(sources: Sequence[torch.Tensor], targets: Sequence[torch.Tensor], table: torch.Tensor) -> None:
    """What `copy_boxes` does, box by box in plain PyTorch."""
    for si, so, ti, to, *rest in table.tolist():
        shape, source_strides, target_strides = rest[:3], rest[3:6], rest[6:9]
        source, target = sources[si], targets[ti]
        view = source.as_strided(shape, source_strides, source.storage_offset() + so)
        target.as_strided(shape, target_strides, target.storage_offset() + to).copy_(view)


copy_boxes = copy_boxes_reference


def box_checksum_reference(tensor: torch.Tensor) -> int:
    """Sum over elements of `bits * (2 * position + 1)`, modulo 2**64, as a signed integer."""
    bits = _bits(tensor.reshape(-1))
    return int((bits * (2 * torch.arange(bits.numel()) + 1)).sum())


def checksum_boxes_reference(
    sources: Sequence[torch.Tensor], dtypes: Sequence[torch.dtype], table: torch.Tensor
) -> list[int]:
    """What each target's `box_checksum` gains from the boxes of `table`, from the sources' values.

    The checksum is a sum over elements, so the sums of disjoint senders add up to the checksum of the whole target.

    Args:
        dtypes: dtype of each target.
    """
    sums = [0] * len(dtypes)
    for si, so, ti, to, *rest in table.tolist():
        shape, source_strides, target_strides = rest[:3], rest[3:6], rest[6:9]
        source = sources[si]
        bits = _bits(source.as_strided(shape, source_strides, source.storage_offset() + so).to(dtypes[ti]))
        position = torch.full((), to)
        for dim, (size, stride) in enumerate(zip(shape, target_strides, strict=True)):
            position = position + (torch.arange(size) * stride).reshape([-1 if d == dim else 1 for d in range(3)])
        sums[ti] = _wrap(sums[ti] + int((bits * (2 * position + 1)).sum()))
    return sums


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """Element bits as non-negative int64 (64-bit elements: as they are)."""
    size = tensor.element_size()
    integer = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[size]
    bits = tensor.contiguous().view(integer).to(torch.int64)
    return bits if size == 8 else bits & ((1 << (8 * size)) - 1)


def _wrap(value: int) -> int:
    return (value + (1 << 63)) % (1 << 64) - (1 << 63)


box_checksum, checksum_boxes = box_checksum_reference, checksum_boxes_reference
