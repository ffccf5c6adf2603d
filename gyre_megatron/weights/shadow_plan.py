"""A publish as a reshard: from the training ranks' parameters into the shadows of the engine's ranks.

The engine's ranks are destination ranks; each is held by a training rank that sees the engine's
shared memory. Keys of targets are "<engine rank>/<parameter>", so that one process may hold several.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from gyre_megatron.errors import PlanError, TransferError
from gyre_megatron.weights.boxes import LocalBox, LocalTensor
from gyre_megatron.weights.direct import Sums
from gyre_megatron.weights.executor import Resharder
from gyre_megatron.weights.layout import Layout, ListedLayout
from gyre_megatron.weights.messages import SHADOW_FILE, Status
from gyre_megatron.weights.planner import Parcel, World, check_coverage, plan_rank
from gyre_megatron.weights.shadow import Shadow
from gyre_megatron.weights.transports.base import Transport


def engine_layout(answers: Sequence[Status]) -> ListedLayout:
    """The engine's real geometry as a layout; keys are those of its parameters."""
    return ListedLayout([_local_tensors(answer, "") for answer in answers])


def _local_tensors(answer: Status, prefix: str) -> list[LocalTensor]:
    held: dict[str, list[LocalBox]] = {}
    for box in answer.local_boxes:
        held.setdefault(box.tensor, []).append(box._replace(tensor=prefix + box.tensor))
    return [
        LocalTensor(prefix + spec.key, tuple(spec.shape), tuple(held.get(spec.key, ())))
        for spec in answer.tensors
    ]


class ShadowPlan:
    """One training rank's part of every publish into an engine.

    Args:
        source: layout of the training cell; its ranks are the processes.
        process: this rank.
        answers: what the engine's ranks say of their parameters, in rank order.
        directory: where their shadows lie.
        holders: processes that see this directory; the engine's ranks are dealt out to them.

    Raises:
        PlanError: an element of a shadow would be written twice or by nobody; the tensor is named.
        TransferError: no process sees the directory.
        OSError: a shadow cannot be mapped.
    """

    def __init__(
        self,
        source: Layout,
        process: int,
        answers: Sequence[Status],
        directory: str,
        holders: Sequence[int],
    ) -> None:
        if not holders:
            raise TransferError(
                f"no rank of the cell sees {directory}; start the engine on a host of the cell"
            )
        self.num_engine_ranks = len(answers)
        self.target = ListedLayout([_local_tensors(a, _prefix(r)) for r, a in enumerate(answers)])
        self._specs = {
            rank: [spec._replace(key=_prefix(rank) + spec.key) for spec in answer.tensors]
            for rank, answer in enumerate(answers)
        }
        self._dtypes = {s.key: s.torch_dtype for specs in self._specs.values() for s in specs}
        targets = tuple(holders[rank % len(holders)] for rank in range(len(answers)))
        world = World(tuple(range(source.num_ranks)), targets)
        self._plan = plan_rank(source, self.target, process, world)
        self._held = [rank for rank, holder in enumerate(targets) if holder == process]
        self._check_covered()
        outgoing = [*self._plan.local, *(p for some in self._plan.sends.values() for p in some)]
        self.nbytes_sent = sum(p.numel * self._dtypes[p.target.tensor].itemsize for p in outgoing)
        self._wire_dtypes = self._dtypes_by_name()
        self.shadows = [
            Shadow(Path(directory) / SHADOW_FILE.format(rank=rank), self._specs[rank])
            for rank in self._held
        ]

    @property
    def dtype_names(self) -> list[str]:
        """Dtypes of all the engine's tensors, for the plan's digest."""
        return [spec.dtype for specs in self._specs.values() for spec in specs]

    def resharder(
        self, sources: Mapping[str, torch.Tensor], transport: Transport, sums: bool
    ) -> Resharder:
        """The reshard that a publish runs.

        Args:
            sources: this rank's parameters by key.
            sums: have it return the checksums that the engine compares.
        """
        targets = {key: t for shadow in self.shadows for key, t in shadow.tensors.items()}
        return Resharder(
            self._plan,
            sources,
            targets,
            transport,
            self._wire_dtypes.__getitem__,
            windows=[shadow.window for shadow in self.shadows],
            sum_dtypes=self._dtypes if sums else None,
        )

    def sums_of_ranks(self, total: Sums) -> list[Sums]:
        """The senders' added sums as one dictionary for every engine rank, keys without the rank.

        A tensor of padding alone (an engine may give a rank no part of an expert) is sent by
        nobody and must be zeros; any other without a sum stays without one, and is refused.
        """
        ranks: list[Sums] = []
        for rank in range(self.num_engine_ranks):
            tensors = self.target.tensors(rank)
            padding = {tensor.key: 0 for tensor in tensors if not tensor.local_boxes}
            added = {t.key: total[t.key] for t in tensors if t.key in total}
            prefix = _prefix(rank)
            ranks.append({k.removeprefix(prefix): v for k, v in {**padding, **added}.items()})
        return ranks

    def _check_covered(self) -> None:
        arriving: dict[int, list[Parcel]] = {rank: [] for rank in self._held}
        received = (p for some in self._plan.receives.values() for p in some)
        for parcel in (*self._plan.local, *received):
            arriving[int(parcel.target.tensor.split("/", 1)[0])].append(parcel)
        for rank, parcels in arriving.items():
            check_coverage(self.target, rank, parcels)

    def _dtypes_by_name(self) -> dict[str, torch.dtype]:
        """In which dtype each canonical tensor travels: the one in which the engine has it."""
        found: dict[str, torch.dtype] = {}
        for rank in range(self.num_engine_ranks):
            for box in self.target.local_boxes(rank):
                dtype = self._dtypes[box.tensor]
                if found.setdefault(box.name, dtype) != dtype:
                    raise PlanError(
                        f"{box.name}: the engine holds it as {found[box.name]} and, in "
                        f"{box.tensor}, as {dtype}"
                    )
        return found


def _prefix(rank: int) -> str:
    return f"{rank}/"
