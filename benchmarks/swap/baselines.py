"""What users do today: gather and broadcast whole tensors, and Megatron-Core's own resharding."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from gyre_megatron.ops.boxes import copy_boxes
from gyre_megatron.weights.boxes import LocalBox, contiguous_strides
from gyre_megatron.weights.layout import Layout
from gyre_megatron.weights.planner import Parcel
from gyre_megatron.weights.tables import direct_rows, table_of


def _whole(local_box: LocalBox, shape: tuple[int, ...]) -> LocalBox:
    """The box of `local_box` in a tensor that holds the canonical tensor whole."""
    strides = contiguous_strides(shape)
    offset = sum(s * stride for s, stride in zip(local_box.start, strides, strict=True))
    return LocalBox(
        local_box.name, local_box.start, local_box.shape, local_box.name, offset, strides
    )


class GatherBroadcast:
    """Every owner broadcasts its shards to all ranks in buckets; each rank rebuilds the tensors and
    cuts its part.

    This is the exchange of the common trainers (all-gather over tensor and expert parallelism,
    broadcast over pipeline stages), bucketed so that small tensors do not count against it.
    """

    def __init__(
        self,
        source: Layout,
        sources: dict[str, torch.Tensor],
        target: Layout,
        targets: dict[str, torch.Tensor],
        shapes: dict[str, tuple[int, ...]],
        bucket_bytes: int = 128 << 20,
    ) -> None:
        rank = dist.get_rank()
        self._sources, self._targets = list(sources.values()), list(targets.values())
        source_index, target_index = ({k: i for i, k in enumerate(t)} for t in (sources, targets))
        self._groups = []
        for names in _groups(shapes, bucket_bytes):
            whole_index = {name: i for i, name in enumerate(names)}
            owned: dict[int, list[LocalBox]] = {}
            for name in names:
                for local_boxes, ranks in source.shards(name):
                    owned.setdefault(ranks[0], []).extend(p for p in local_boxes if p.source)
            sends, pack, unpack = [], None, []
            for owner, local_boxes in sorted(owned.items()):
                flat, at = [], 0
                for local_box in local_boxes:
                    flat.append(
                        local_box._replace(
                            tensor="bucket", offset=at, strides=contiguous_strides(local_box.shape)
                        )
                    )
                    at += local_box.numel
                if owner == rank:
                    rows = [Parcel(p.box, p, f) for p, f in zip(local_boxes, flat, strict=True)]
                    pack = table_of(direct_rows(rows, source_index, {"bucket": 0}))
                rows = [Parcel(f.box, f, _whole(f, shapes[f.name])) for f in flat]
                unpack.append(table_of(direct_rows(rows, {"bucket": 0}, whole_index)))
                sends.append((owner, at))
            wanted = set(names)
            cut = [
                Parcel(p.box, _whole(p, shapes[p.name]), p)
                for p in target.local_boxes(rank)
                if p.name in wanted
            ]
            take = table_of(direct_rows(cut, whole_index, target_index))
            self._groups.append((names, [shapes[n] for n in names], sends, pack, unpack, take))

    def run(self) -> None:
        rank = dist.get_rank()
        for _, shapes, sends, pack, unpack, take in self._groups:
            whole = [torch.empty(shape, dtype=torch.bfloat16) for shape in shapes]
            for (owner, numel), rows in zip(sends, unpack, strict=True):
                bucket = torch.empty(numel, dtype=torch.bfloat16)
                if owner == rank:
                    copy_boxes(self._sources, [bucket], pack)
                dist.broadcast(bucket, owner)
                copy_boxes([bucket], whole, rows)
            copy_boxes(whole, self._targets, take)


def _groups(shapes: dict[str, tuple[int, ...]], bucket_bytes: int) -> list[list[str]]:
    groups: list[list[str]] = [[]]
    used = 0
    for name, shape in shapes.items():
        size = 2 * torch.Size(shape).numel()
        if groups[-1] and used + size > bucket_bytes:
            groups.append([])
            used = 0
        groups[-1].append(name)
        used += size
    return groups


def megatron_groups() -> Any:
    """Process groups of the layout that Megatron holds now, as `swap_model_weights` wants them on a
    model."""
    from megatron.core.process_groups_config import ProcessGroupCollection

    return ProcessGroupCollection.use_mpu_process_groups()


def megatron_swap(source: Any, target: Any) -> None:
    """Megatron-Core's resharding over gloo; its plan is cached after the first call."""
    from megatron.core.resharding.refit import swap_model_weights

    swap_model_weights(source, target, "gloo")
