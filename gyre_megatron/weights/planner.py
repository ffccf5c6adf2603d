"""Who sends which box to whom: pure intersection of two layouts, local to one rank, without
communication.

Invariant: every element of every destination piece is written exactly once, or the plan is refused
by name. Both ends of a pair compute the same list of parcels in the same order, so a packed stream
needs no headers.
"""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import NamedTuple

from gyre_megatron.errors import PlanError
from gyre_megatron.weights.boxes import Box, Piece, intersect, subtract
from gyre_megatron.weights.layout import Layout, Shard


class Parcel(NamedTuple):
    """One box on its way: read it from `source` (a piece of the sending rank), write it to
    `target`."""

    box: Box
    source: Piece
    target: Piece

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
        for s, t, parcel in _routes(name, *shards, world, only):
            sender, receiver = world.sources[s], world.targets[t]
            if sender == receiver == process:
                plan.local.append(parcel)
            elif sender == process:
                plan.sends.setdefault(receiver, []).append(parcel)
            elif receiver == process:
                plan.receives.setdefault(sender, []).append(parcel)
    return plan


def _routes(
    name: str,
    sources: Sequence[Shard],
    targets: Sequence[Shard],
    world: World,
    only: set[int] | None,
) -> Iterator[tuple[int, int, Parcel]]:
    """(source rank, target rank, parcel) of one tensor: boxes are met once per group of replicas,
    then dealt out.

    A process reads what it holds itself; otherwise replicas of a shard take turns, by destination
    rank.
    """
    spread = zlib.crc32(name.encode())
    own = [{world.sources[rank]: rank for rank in shard.ranks} for shard in sources]
    for pieces, ranks in targets:
        wanted = [rank for rank in ranks if only is None or rank in only]
        if not wanted:
            continue
        cover = [part for piece in pieces for part in _cover(name, piece, ranks[0], sources)]
        for rank in wanted:
            process = world.targets[rank]
            for index, parcel in cover:
                holders = sources[index].ranks
                yield own[index].get(process, holders[(spread + rank) % len(holders)]), rank, parcel


def _cover(
    name: str, piece: Piece, rank: int, sources: Sequence[Shard]
) -> Iterator[tuple[int, Parcel]]:
    """(source shard, parcel) that together make up `piece` exactly once."""
    missing = [piece.box]
    for index, (pieces, _) in enumerate(sources):
        for offered in pieces:
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
                yield index, Parcel(common, offered, piece)
                rest += subtract(box, common)
            missing = rest
    if missing:
        reason = (
            "no rank of the source layout holds it"
            if not sources
            else f"{missing[0]} is held by nobody"
        )
        raise PlanError(
            f"{name} -> {piece.tensor} on destination rank {rank}: {reason}; both layouts must "
            "describe the same model"
        )


def check_coverage(target: Layout, rank: int, parcels: Iterable[Parcel]) -> None:
    """Prove that `parcels` write every element of destination `rank` exactly once.

    Raises:
        PlanError: an element would be written twice or not at all.
    """
    written: dict[Piece, list[Box]] = {}
    for parcel in parcels:
        for box in written.setdefault(parcel.target, []):
            if intersect(box, parcel.box) is not None:
                raise PlanError(
                    f"{parcel.target.name}: {parcel.box} of {parcel.target.tensor} is written twice"
                )
        written[parcel.target].append(parcel.box)
    for piece in target.pieces(rank):
        covered = sum(box.numel for box in written.pop(piece, []))
        if covered != piece.numel:
            raise PlanError(
                f"{piece.name}: {piece.numel - covered} of {piece.numel} elements of "
                f"{piece.tensor} on rank {rank} "
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
