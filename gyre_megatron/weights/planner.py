"""Who sends which box to whom: pure intersection of two layouts, local to one rank, without
communication.

Invariant: every element of every destination local_box is written exactly once, or the plan is refused
by name. Both ends of a pair compute the same list of parcels in the same order, so a packed stream
needs no headers.
"""

from __future__ import annotations

import hashlib
import re
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import NamedTuple

from gyre_megatron.errors import PlanError
from gyre_megatron.weights.boxes import Box, LocalBox, intersect, subtract
from gyre_megatron.weights.layout import Layout, Shard

_NUMBER = re.compile(r"\d+")


class Parcel(NamedTuple):
    """One box on its way: read it from `source` (a local_box of the sending rank), write it to
    `target`."""

    box: Box
    source: LocalBox
    target: LocalBox

    @property
    def numel(self) -> int:
        return self.box.numel


@dataclass(frozen=True)
class RankPlan:
    """What one rank does in a reshard: it sends, receives and copies locally, each list in stream
    order."""

    rank: int
    sends: dict[int, list[Parcel]] = field(default_factory=dict)
    receives: dict[int, list[Parcel]] = field(default_factory=dict)
    local: list[Parcel] = field(default_factory=list)


@dataclass(frozen=True)
class World:
    """How the two layouts' ranks map to processes.

    Source rank i is process `sources[i]`, destination rank i is process `targets[i]`. A process
    that is both keeps its own boxes by a local copy.
    """

    sources: tuple[int, ...]
    targets: tuple[int, ...]

    @classmethod
    def colocated(cls, source: Layout, target: Layout) -> World:
        """Both layouts number the same processes from 0."""
        return cls(tuple(range(source.num_ranks)), tuple(range(target.num_ranks)))


def plan_rank(
    source: Layout,
    target: Layout,
    process: int,
    world: World | None = None,
    names: Iterable[str] | None = None,
) -> RankPlan:
    """Plan one process's part of moving `target`'s tensors out of `source`.

    Args:
        process: the process to plan for.
        world: processes of both layouts' ranks; None means that both number the same processes.
        names: restrict the plan to these canonical tensors (all processes must pass the same set).

    Raises:
        PlanError: a destination element has no source, or a destination tensor no source tensor;
        named.
    """
    world = world or World.colocated(source, target)
    wanted = None if names is None else set(names)
    source_ranks = [r for r, p in enumerate(world.sources) if p == process]
    target_ranks = [r for r, p in enumerate(world.targets) if p == process]
    outgoing = {name for rank in source_ranks for name in source.names(rank)}
    incoming = {name for rank in target_ranks for name in target.names(rank)}
    plan = RankPlan(process)
    for name in sorted(outgoing | incoming):
        if wanted is not None and name not in wanted:
            continue
        shards = source.shards(name), target.shards(name)
        only = None if name in outgoing else set(target_ranks)
        for s, t, parcel in routes(name, *shards, world, only):
            sender, receiver = world.sources[s], world.targets[t]
            if sender == receiver == process:
                plan.local.append(parcel)
            elif sender == process:
                plan.sends.setdefault(receiver, []).append(parcel)
            elif receiver == process:
                plan.receives.setdefault(sender, []).append(parcel)
    return plan


def routes(
    name: str,
    sources: Sequence[Shard],
    targets: Sequence[Shard],
    world: World,
    only: set[int] | None,
) -> Iterator[tuple[int, int, Parcel]]:
    """Who sends which part of one tensor to whom: boxes are met once per group of replicas, then
    dealt out.

    A process reads what it holds itself; otherwise the replicas of a source shard take turns over
    the destination ranks, and which of them begins goes on from layer to layer.

    Args:
        sources, targets: what is held of the tensor on either side.
        only: destination ranks to do it for; None does it for all.

    Yields:
        Source rank, destination rank, parcel.

    Raises:
        PlanError: an element has no source.
    """
    turn = _first_turn(name)
    own = [{world.sources[rank]: rank for rank in shard.ranks} for shard in sources]
    for local_boxes, ranks in targets:
        first, turn = turn, turn + len(ranks)
        wanted = [(i, rank) for i, rank in enumerate(ranks) if only is None or rank in only]
        if not wanted:
            continue
        cover = [part for box in local_boxes for part in _cover(name, box, ranks[0], sources)]
        for i, rank in wanted:
            process = world.targets[rank]
            for index, parcel in cover:
                holders = sources[index].ranks
                yield own[index].get(process, holders[(first + i) % len(holders)]), rank, parcel


def _first_turn(name: str) -> int:
    """Tensors of one kind and size begin one replica later in each layer and expert, so that bytes
    are shared evenly and not only tensors."""
    numbers = [int(number) for number in _NUMBER.findall(name)]
    return zlib.crc32(_NUMBER.sub("", name).encode()) + sum(numbers)


def _cover(
    name: str, local_box: LocalBox, rank: int, sources: Sequence[Shard]
) -> Iterator[tuple[int, Parcel]]:
    """(source shard, parcel) that together make up `local_box` exactly once."""
    missing = [local_box.box]
    for index, (local_boxes, _) in enumerate(sources):
        for offered in local_boxes:
            if not missing:
                return
            if not offered.source:
                continue
            rest: list[Box] = []
            for box in missing:
                common = intersect(box, offered.box)
                if common is None:
                    rest.append(box)
                    continue
                yield index, Parcel(common, offered, local_box)
                rest += subtract(box, common)
            missing = rest
    if missing:
        reason = (
            "no rank of the source layout holds it"
            if not sources
            else f"{missing[0]} is held by nobody"
        )
        raise PlanError(
            f"{name} -> {local_box.tensor} on destination rank {rank}: {reason}; both layouts must "
            "describe the same model"
        )


def check_coverage(target: Layout, rank: int, parcels: Iterable[Parcel]) -> None:
    """Prove that `parcels` write every element of destination `rank` exactly once.

    Raises:
        PlanError: an element would be written twice or not at all.
    """
    written: dict[LocalBox, list[Box]] = {}
    for parcel in parcels:
        for box in written.setdefault(parcel.target, []):
            if intersect(box, parcel.box) is not None:
                raise PlanError(
                    f"{parcel.target.name}: {parcel.box} of {parcel.target.tensor} is written twice"
                )
        written[parcel.target].append(parcel.box)
    for local_box in target.local_boxes(rank):
        covered = sum(box.numel for box in written.pop(local_box, []))
        if covered != local_box.numel:
            raise PlanError(
                f"{local_box.name}: {local_box.numel - covered} of {local_box.numel} elements of "
                f"{local_box.tensor} on rank {rank} "
                "would not be written"
            )
    if written:
        extra = next(iter(written))
        raise PlanError(
            f"{extra.name}: the plan writes {extra.tensor}, which destination rank {rank} does not "
            "have"
        )


def plan_digest(source: Layout, target: Layout, epoch: int, dtypes: Sequence[str]) -> str:
    """The key under which ranks may use one plan together: it changes with layouts, dtypes and
    membership epoch.

    Plans hold no addresses: tensors are looked up by key for every run.
    """
    state = repr((source.digest(), target.digest(), epoch, tuple(dtypes)))
    return hashlib.blake2b(state.encode(), digest_size=16).hexdigest()


def total_numel(parcels: Iterable[Parcel]) -> int:
    return sum(prod(parcel.box.shape) for parcel in parcels)
