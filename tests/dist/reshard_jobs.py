"""What the ranks of the resharding tests do: build real models, move weights between layouts,
compare bit by bit."""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from gyre_megatron.config.model import Architecture
from gyre_megatron.weights.checkpoint import box_view, wire_dtypes
from gyre_megatron.weights.executor import Resharder
from gyre_megatron.weights.layout import Layout, WholeLayout
from gyre_megatron.weights.megatron import bind, layout_of
from gyre_megatron.weights.parallel import Parallelism
from gyre_megatron.weights.planner import World, check_coverage, plan_rank
from gyre_megatron.weights.sglang import SglangLayout
from gyre_megatron.weights.transports.base import Transport
from gyre_megatron.weights.transports.collective import CollectiveTransport
from gyre_megatron.weights.transports.file import FileTransport
from gyre_megatron.weights.transports.ipc import IpcTransport
from tests.support import megatron_models, reference_shards


@dataclass(frozen=True)
class Train:
    """A Megatron layout; with `first_replica` only the ranks of data-parallel replica 0 belong to
    it."""

    parallelism: Parallelism
    experts: str = "sequential"
    first_replica: bool = False


@dataclass(frozen=True)
class Serve:
    """An SGLang layout."""

    tp: int
    ep: int = 1
    attention_dp: int = 1


@dataclass
class Side:
    """One layout on this process: where its ranks run, this process's tensors, and what they must
    hold."""

    layout: Layout
    processes: tuple[int, ...]
    tensors: dict[str, torch.Tensor]
    expected: dict[str, torch.Tensor]

    def fill(self) -> None:
        for key, tensor in self.tensors.items():
            tensor.copy_(self.expected[key])

    def spoil(self) -> None:
        """Wrong numbers everywhere but in padding, which nobody writes."""
        for key, tensor in self.tensors.items():
            tensor.copy_(torch.where(self.expected[key] == 0, self.expected[key], torch.full_like(tensor, 7.25)))

    def wrong(self) -> list[str]:
        return [key for key, tensor in self.tensors.items() if not torch.equal(tensor, self.expected[key])]


@lru_cache(maxsize=2)
def _weights(architecture: str) -> dict[str, torch.Tensor]:
    return reference_shards.whole_weights(megatron_models.ARCHITECTURES[architecture])


@lru_cache(maxsize=16)
def side(architecture: str, spec: Train | Serve) -> Side:
    """Build a side once per process."""
    a = megatron_models.ARCHITECTURES[architecture]
    return _train_side(a, architecture, spec) if isinstance(spec, Train) else _serve_side(a, architecture, spec)


def _train_side(a: Architecture, architecture: str, spec: Train) -> Side:
    p, rank = spec.parallelism, dist.get_rank()
    megatron_models.initialize(p)
    chunks = megatron_models.build(a, p, spec.experts)
    place, weights = p.rank(rank), _weights(architecture)
    layout = layout_of(a, place, chunks)
    tensors = bind(layout, place.index, chunks)
    layers = {
        f"{i}.{name}.": module.layer_number - 1 + (a.num_layers if name.startswith("mtp") else 0)
        for i, chunk in enumerate(chunks)
        for name, module in chunk.named_modules()
        if hasattr(module, "layer_number") and name.count(".") == 2
    }
    expected = {}
    for key in tensors:
        layer = next((number for prefix, number in layers.items() if key.startswith(prefix)), None)
        expected[key] = reference_shards.expected(a, place, weights, key.split(".", 1)[1], layer)
    processes = tuple(range(layout.num_ranks))
    if spec.first_replica:
        processes = tuple(r for r in range(p.world_size) if p.rank(r).dp_rank == 0)
        smaller = Parallelism(p.tp, p.pp, p.vpp, p.cp, 1, p.ep, p.etp, p.stage_layers)
        layout = type(layout)(a, smaller, layout.style)
        if rank not in processes:
            tensors, expected = {}, {}
    return Side(layout, processes, tensors, expected)


def _serve_side(a: Architecture, architecture: str, spec: Serve) -> Side:
    layout, rank, weights = (
        SglangLayout(a, spec.tp, spec.ep, spec.attention_dp),
        dist.get_rank(),
        _weights(architecture),
    )
    expected: dict[str, torch.Tensor] = {}
    for local in layout.tensors(rank) if rank < layout.num_ranks else ():
        expected[local.key] = torch.zeros(local.shape)
        for local_box in local.local_boxes:
            box = tuple(slice(s, s + n) for s, n in zip(local_box.start, local_box.shape, strict=True))
            box_view(expected[local.key], local_box).copy_(weights[local_box.name][box])
    tensors = {key: torch.zeros_like(value) for key, value in expected.items()}
    return Side(layout, tuple(range(layout.num_ranks)), tensors, expected)


_transports: dict[tuple[str, int], Transport] = {}


def transport(kind: str, staging_kib: int, timeout_s: float = 60.0) -> Transport:
    """A transport over all ranks of the pool, made once."""
    key = (kind, staging_kib)
    if key not in _transports:
        store, rank, size = dist.distributed_c10d._get_default_store(), dist.get_rank(), dist.get_world_size()
        common: dict[str, Any] = dict(name=f"{kind}{staging_kib}", timeout_s=timeout_s, staging_bytes=staging_kib << 10)
        if kind == "ipc":
            _transports[key] = IpcTransport(store, rank, size, **common)
        elif kind == "file":
            _transports[key] = FileTransport(store, rank, size, Path(os.environ["RESHARD_TMP"]) / key[0], **common)
        elif kind == "mooncake":
            from gyre_megatron.weights.transports.mooncake import MooncakeTransport

            _transports[key] = MooncakeTransport(store, rank, size, **common)
        else:
            _transports[key] = CollectiveTransport(store, rank, size, **common)
    return _transports[key]


def reshard(architecture: str, source: Side, target: Side, carrier: Transport) -> list[str]:
    """Move all that the target holds and the source has; returns this process's wrong tensors."""
    source.fill()
    target.spoil()
    world = World(source.processes, target.processes)
    names = None
    if isinstance(source.layout, SglangLayout):  # an engine does not hold the draft (MTP) layer
        mine = {n for r in range(target.layout.num_ranks) for n in target.layout.names(r)}
        names = [n for n in mine if source.layout.shards(n)]
    plan = plan_rank(source.layout, target.layout, carrier.process, world, names)
    if names is None and carrier.process in target.processes:
        arriving = [p for parcels in plan.receives.values() for p in parcels] + plan.local
        check_coverage(target.layout, target.processes.index(carrier.process), arriving)
    Resharder(plan, source.tensors, target.tensors, carrier, wire_dtypes(torch.float32), verify=True).run()
    moved = None if names is None else {
        p.tensor for p in target.layout.local_boxes(target.processes.index(carrier.process)) if p.name in set(names)
    } if carrier.process in target.processes else set()
    return [key for key in target.wrong() if moved is None or key in moved]


def pair_and_back(architecture: str, source: Train | Serve, target: Train | Serve, kind: str, staging_kib: int) -> list:
    """Source -> target and target -> source; returns what is wrong in each."""
    a, b, carrier = side(architecture, source), side(architecture, target), transport(kind, staging_kib)
    there = reshard(architecture, a, b, carrier)
    back = reshard(architecture, b, a, carrier)
    return [there, back, carrier.peak_staging_bytes]


def gather(architecture: str, source: Train, kind: str) -> list[str]:
    """Everything whole on rank 0, compared with the checkpoint."""
    from gyre_megatron.weights.canonical import canonical_tensors

    a, shapes = side(architecture, source), canonical_tensors(megatron_models.ARCHITECTURES[architecture])
    a.fill()
    rank = dist.get_rank()
    whole = WholeLayout(shapes, a.layout.num_ranks)
    targets = {n: torch.zeros(s) for n, s in shapes.items()} if rank == 0 else {}
    plan = plan_rank(a.layout, whole, rank, World(a.processes, tuple(range(a.layout.num_ranks))))
    Resharder(plan, a.tensors, targets, transport(kind, 512), wire_dtypes(torch.float32)).run()
    weights = _weights(architecture)
    return [n for n, t in targets.items() if not torch.equal(t, weights[n])]
