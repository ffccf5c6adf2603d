"""The one vocabulary of weight layouts: boxes of canonical tensors and where they lie in local
storage.

A canonical tensor has a Hugging Face name and a global shape. A `LocalBox` says that one box of it
lies in one local tensor, at an element offset, with element strides. Fused, stacked, sharded,
padded and replicated parameters are all lists of local boxes; nothing downstream of this module knows
parameter names. Called by the Megatron and SGLang maps and by the planner
(which intersects them).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise, product
from math import prod
from typing import NamedTuple

from gyre_megatron.errors import LayoutError

Index = tuple[int, ...]


class Box(NamedTuple):
    """The elements `start[d] <= i[d] < start[d] + shape[d]` of a canonical tensor."""

    start: Index
    shape: Index

    @property
    def numel(self) -> int:
        return prod(self.shape)


class LocalBox(NamedTuple):
    """One box of canonical tensor `name`, held in the local tensor `tensor`."""

    name: str
    start: Index
    shape: Index
    tensor: str
    """Key of the local tensor."""
    offset: int
    """Elements from the local tensor's beginning to the box's first element."""
    strides: Index
    """Elements between neighbours along each canonical dimension."""
    source: bool = True
    """False for a copy that must never be read from (a tied or MTP embedding has one owner)."""

    @property
    def box(self) -> Box:
        return Box(self.start, self.shape)

    @property
    def numel(self) -> int:
        return prod(self.shape)

    def offset_of(self, start: Index) -> int:
        """Element offset in the local tensor of canonical index `start`, which lies in this
        local box."""
        return self.offset + sum(
            (s - o) * stride for s, o, stride in zip(start, self.start, self.strides, strict=True)
        )


class Block(NamedTuple):
    """A box that lies contiguously in a local tensor; blocks follow one another. `name` is None for
    padding."""

    name: str | None
    start: Index
    shape: Index


class LocalTensor(NamedTuple):
    """A local parameter or buffer: its shape and the local boxes it holds."""

    key: str
    shape: Index
    local_boxes: tuple[LocalBox, ...]


def contiguous_strides(shape: Sequence[int]) -> Index:
    """Element strides of a row-major tensor."""
    strides, step = [0] * len(shape), 1
    for dim in range(len(shape) - 1, -1, -1):
        strides[dim] = step
        step *= shape[dim]
    return tuple(strides)


def stack(key: str, shape: Index, blocks: Iterable[Block], source: bool = True) -> LocalTensor:
    """A local tensor of `shape` made of blocks one after the other.

    Raises:
        LayoutError: the blocks do not fill the tensor exactly.
    """
    local_boxes, offset = [], 0
    for name, start, size in blocks:
        if name is not None:
            local_boxes.append(
                LocalBox(name, start, size, key, offset, contiguous_strides(size), source)
            )
        offset += prod(size)
    if offset != prod(shape):
        raise LayoutError(
            f"{key}: its parts hold {offset} elements but its shape {shape} holds {prod(shape)}; "
            "the map does not "
            "fit this module"
        )
    return LocalTensor(key, shape, tuple(local_boxes))


def intersect(a: Box, b: Box) -> Box | None:
    """The common part of two boxes of the same canonical tensor, or None."""
    start, shape = [], []
    for a0, an, b0, bn in zip(a.start, a.shape, b.start, b.shape, strict=True):
        low, high = max(a0, b0), min(a0 + an, b0 + bn)
        if low >= high:
            return None
        start.append(low)
        shape.append(high - low)
    return Box(tuple(start), tuple(shape))


def subtract(box: Box, hole: Box) -> list[Box]:
    """Disjoint boxes that make up `box` without `hole` (which lies inside it)."""
    rest: list[Box] = []
    start = list(box.start)
    shape = list(box.shape)
    for dim in range(len(shape)):
        before = hole.start[dim] - start[dim]
        after = start[dim] + shape[dim] - hole.start[dim] - hole.shape[dim]
        if before:
            rest.append(Box(tuple(start), (*shape[:dim], before, *shape[dim + 1 :])))
        if after:
            beyond = (*start[:dim], hole.start[dim] + hole.shape[dim], *start[dim + 1 :])
            rest.append(Box(beyond, (*shape[:dim], after, *shape[dim + 1 :])))
        start[dim], shape[dim] = hole.start[dim], hole.shape[dim]
    return rest


def grid_cells(total: Index, parts: Sequence[int]) -> list[Box]:
    """Cut a tensor into a grid of near-equal boxes (used for whole-tensor layouts and tests)."""
    cuts = [[n * i // p for i in range(p + 1)] for n, p in zip(total, parts, strict=True)]
    ranges = [list(pairwise(c)) for c in cuts]
    return [
        Box(tuple(lo for lo, _ in cell), tuple(hi - lo for lo, hi in cell))
        for cell in product(*ranges)
    ]
