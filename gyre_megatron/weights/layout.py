"""What a layout answers: which local tensors a rank has, and who holds the parts of a canonical
tensor.

Implemented by `MegatronLayout`, `SglangLayout`, `WholeLayout` (a checkpoint, or one process that
holds everything) and `ListedLayout` (local boxes given rank by rank, e.g. read from an engine's real
modules).
"""

from __future__ import annotations

import hashlib
import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property, lru_cache
from typing import NamedTuple

from gyre_megatron.errors import LayoutError
from gyre_megatron.weights.boxes import Index, LocalBox, LocalTensor, contiguous_strides


class Shard(NamedTuple):
    """Boxes of one canonical tensor that all of `ranks` hold alike (replicas of each other)."""

    local_boxes: tuple[LocalBox, ...]
    ranks: tuple[int, ...]


class Layout(ABC):
    """A division of a model's canonical tensors over numbered ranks."""

    num_ranks: int

    @abstractmethod
    def tensors(self, rank: int) -> Sequence[LocalTensor]:
        """The local tensors of one rank."""

    @abstractmethod
    def shards(self, name: str) -> Sequence[Shard]:
        """Everything that is held of canonical tensor `name`, replicas together; empty if nobody
        holds it."""

    def local_boxes(self, rank: int) -> Iterable[LocalBox]:
        """All local boxes of one rank."""
        return (local_box for tensor in self.tensors(rank) for local_box in tensor.local_boxes)

    def names(self, rank: int) -> list[str]:
        """Canonical tensors of which `rank` holds a part, each once, in local order."""
        return list(dict.fromkeys(local_box.name for local_box in self.local_boxes(rank)))

    def digest(self) -> str:
        """A short hash that changes whenever any rank's tensors or local boxes change."""
        state = hashlib.blake2b(digest_size=16)
        for rank in range(self.num_ranks):
            for tensor in self.tensors(rank):
                state.update(repr((rank, tensor)).encode())
        return state.hexdigest()


class ListedLayout(Layout):
    """A layout given as the list of every rank's local tensors."""

    def __init__(self, tensors: Sequence[Sequence[LocalTensor]]) -> None:
        self._tensors = [tuple(rank) for rank in tensors]
        self.num_ranks = len(self._tensors)

    def tensors(self, rank: int) -> Sequence[LocalTensor]:
        return self._tensors[rank]

    def shards(self, name: str) -> Sequence[Shard]:
        return self._index.get(name, ())

    @cached_property
    def _index(self) -> dict[str, tuple[Shard, ...]]:
        by_name: dict[str, dict[tuple[LocalBox, ...], list[int]]] = {}
        for rank, tensors in enumerate(self._tensors):
            mine: dict[str, list[LocalBox]] = {}
            for local_box in (local_box for tensor in tensors for local_box in tensor.local_boxes):
                mine.setdefault(local_box.name, []).append(local_box)
            for name, local_boxes in mine.items():
                by_name.setdefault(name, {}).setdefault(tuple(local_boxes), []).append(rank)
        return {
            name: tuple(Shard(p, tuple(r)) for p, r in held.items())
            for name, held in by_name.items()
        }


class WholeLayout(ListedLayout):
    """Every tensor whole: on rank `owner` of `num_ranks`. Describes a checkpoint or a gathering
    leader."""

    def __init__(self, tensors: Mapping[str, Index], num_ranks: int = 1, owner: int = 0) -> None:
        local = [whole_tensor(name, shape) for name, shape in tensors.items()]
        super().__init__([local if rank == owner else [] for rank in range(num_ranks)])


class ReplicatedLayout(Layout):
    """Several equal copies of a layout, e.g. the engines of one cell: rank i is rank i % n of copy
    i // n."""

    def __init__(self, base: Layout, copies: int) -> None:
        self._base = base
        self._copies = copies
        self.num_ranks = base.num_ranks * copies

    def tensors(self, rank: int) -> Sequence[LocalTensor]:
        return self._base.tensors(rank % self._base.num_ranks)

    def shards(self, name: str) -> Sequence[Shard]:
        n = self._base.num_ranks
        return [
            Shard(
                local_boxes,
                tuple(copy * n + rank for copy in range(self._copies) for rank in ranks),
            )
            for local_boxes, ranks in self._base.shards(name)
        ]


def whole_tensor(name: str, shape: Index) -> LocalTensor:
    """A local tensor that is a canonical tensor, under the same name."""
    local_box = LocalBox(name, (0,) * len(shape), shape, name, 0, contiguous_strides(shape))
    return LocalTensor(name, shape, (local_box,))


def check_bound(rank: int, expected: Sequence[LocalTensor], found: Mapping[str, Index]) -> None:
    """Compare a layout with the real tensors of a rank.

    Raises:
        LayoutError: a tensor is missing, unknown to the layout, or has another shape.
    """
    shapes = {tensor.key: tensor.shape for tensor in expected}
    missing, unknown = sorted(shapes.keys() - found.keys()), sorted(found.keys() - shapes.keys())
    wrong = [
        f"{k}: {found[k]} instead of {shapes[k]}"
        for k in shapes.keys() & found.keys()
        if found[k] != shapes[k]
    ]
    for what, names in (
        ("missing", missing),
        ("without a place in the layout", unknown),
        ("of another shape", wrong),
    ):
        if names:
            raise LayoutError(
                f"rank {rank}: {len(names)} tensors {what}, first {names[:4]}; the layout's sizes, "
                "naming style or "
                "architecture do not describe this model"
            )


_LAYER = re.compile(r"^model\.layers\.(\d+)\.(?:mlp\.experts\.(\d+)\.)?")


@lru_cache(maxsize=1 << 18)
def place_of(name: str) -> tuple[int | None, int | None]:
    """The layer and the routed expert that a canonical tensor belongs to."""
    match = _LAYER.match(name)
    if match is None:
        return None, None
    return int(match[1]), None if match[2] is None else int(match[2])


def index_by_name(tensors: tuple[LocalTensor, ...]) -> dict[str, tuple[LocalBox, ...]]:
    """Boxes of a rank's tensors by canonical name."""
    index: dict[str, list[LocalBox]] = {}
    for local_box in (local_box for tensor in tensors for local_box in tensor.local_boxes):
        index.setdefault(local_box.name, []).append(local_box)
    return {name: tuple(local_boxes) for name, local_boxes in index.items()}


def merge_replicas(found: Iterable[tuple[tuple[LocalBox, ...], Sequence[int]]]) -> list[Shard]:
    """Join ranks that hold the same local boxes."""
    merged: dict[tuple[LocalBox, ...], list[int]] = {}
    for local_boxes, ranks in found:
        merged.setdefault(local_boxes, []).extend(ranks)
    return [Shard(local_boxes, tuple(ranks)) for local_boxes, ranks in merged.items()]
