"""Copy or check thousands of strided boxes between lists of tensors in one call (csrc: boxes).

A table has one row of int64 per box: `[source index, source offset, target index, target offset,
shape x 3, source strides x 3, target strides x 3]`, offsets and strides in elements, missing
leading dimensions of size 1.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

import gyre_megatron.ops.library  # noqa: F401  (registers torch.ops.gyre)

COLUMNS = 13
_WEIGHT_MASK = 0x7FFFFFFF


def copy_boxes(
    sources: Sequence[torch.Tensor], targets: Sequence[torch.Tensor], table: torch.Tensor
) -> None:
    """Copy every box of `table` from its source to its target, converting between fp32, bf16 and
    fp16.

    Args:
        sources, targets: tensors on one device; equal dtypes of any kind are copied bit by bit.
        table: int64[boxes, 13] on the CPU.

    Raises:
        RuntimeError: a box leaves its tensor's storage, or a conversion is not supported.
    """
    if len(table):
        torch.ops.gyre.copy_boxes(list(sources), list(targets), table)


def checksum_boxes(
    sources: Sequence[torch.Tensor], targets: Sequence[torch.Tensor], table: torch.Tensor
) -> list[int]:
    """What each target's `box_checksum` gains from the boxes of `table`, from the sources' values.

    The checksum is a sum over elements, so the parts of disjoint senders add up to the checksum of
    the target.

    Args:
        targets: only their dtypes matter; they may be empty.
    """
    if not len(table):
        return [0] * len(targets)
    return torch.ops.gyre.checksum_boxes(list(sources), list(targets), table).tolist()


def copy_boxes_with_checksums(
    sources: Sequence[torch.Tensor], targets: Sequence[torch.Tensor], table: torch.Tensor
) -> list[int]:
    """`copy_boxes` and `checksum_boxes` in one pass over the sources; arguments as for both."""
    if not len(table):
        return [0] * len(targets)
    return torch.ops.gyre.copy_boxes_with_checksums(list(sources), list(targets), table).tolist()


def box_checksum(tensor: torch.Tensor) -> int:
    """Sum over elements of `bits * (2 * (position mod 2**31) + 1)`, modulo 2**64, as a signed
    integer.

    Args:
        tensor: contiguous.
    """
    flat = tensor.view(-1)
    row = [0, 0, 0, 0, 1, 1, flat.numel(), 0, 0, 1, 0, 0, 1]
    return checksum_boxes([flat], [flat], torch.tensor([row]))[0] if flat.numel() else 0


def copy_boxes_reference(
    sources: Sequence[torch.Tensor], targets: Sequence[torch.Tensor], table: torch.Tensor
) -> None:
    """`copy_boxes`, box by box in plain PyTorch."""
    for si, so, ti, to, *rest in table.tolist():
        shape = rest[:3]
        source = sources[si]
        target = targets[ti]
        view = source.as_strided(shape, rest[3:6], source.storage_offset() + so)
        target.as_strided(shape, rest[6:9], target.storage_offset() + to).copy_(view)


def checksum_boxes_reference(
    sources: Sequence[torch.Tensor], targets: Sequence[torch.Tensor], table: torch.Tensor
) -> list[int]:
    """`checksum_boxes`, box by box in plain PyTorch."""
    sums = [0] * len(targets)
    for si, so, ti, to, *rest in table.tolist():
        shape = rest[:3]
        target_strides = rest[6:9]
        source = sources[si]
        view = source.as_strided(shape, rest[3:6], source.storage_offset() + so)
        bits = _bits(view.to(targets[ti].dtype))
        position = torch.full((), to)
        for dim, (size, stride) in enumerate(zip(shape, target_strides, strict=True)):
            position = position + (torch.arange(size) * stride).reshape(
                [-1 if d == dim else 1 for d in range(3)]
            )
        sums[ti] = wrap64(sums[ti] + int((bits * (2 * (position & _WEIGHT_MASK) + 1)).sum()))
    return sums


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """Element bits as non-negative int64."""
    size = tensor.element_size()
    integer = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[size]
    return tensor.contiguous().view(integer).to(torch.int64) & ((1 << (8 * size)) - 1)


def wrap64(value: int) -> int:
    """A number modulo 2**64, as a signed 64-bit integer."""
    return (value + (1 << 63)) % (1 << 64) - (1 << 63)
