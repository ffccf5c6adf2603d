"""Who talks to whom across cells, and the stand-alone process groups that carry gradients.

A cell is its own `torch.distributed` world, so Megatron sees only the cell. Gradients go to
the core over groups made here once at start: for every membership prefix of cells 0..k-1 and every
position inside a cell, one group. Cells join training in a fixed order, so no other memberships
exist. Weights go down the chain over transports (`chain`).
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from gyre_megatron.errors import CellError, LayoutError


@dataclass(frozen=True)
class CellTopology:
    """How the ranks of a job are grouped into equal cells: rank r is position r % ranks_per_cell of
    its cell."""

    world_size: int
    num_cells: int

    def __post_init__(self) -> None:
        if self.num_cells < 1 or self.world_size % self.num_cells:
            raise LayoutError(
                f"{self.world_size} ranks cannot be divided into {self.num_cells} equal cells; "
                "start torchrun with a "
                f"multiple of {self.num_cells} processes, or change cluster.num_cells"
            )

    @property
    def ranks_per_cell(self) -> int:
        return self.world_size // self.num_cells

    def cell_of(self, rank: int) -> int:
        return rank // self.ranks_per_cell

    def position_of(self, rank: int) -> int:
        return rank % self.ranks_per_cell


RawGroup = Any
"""A gloo or NCCL backend object that is not registered with torch.distributed."""


def make_group(
    kv_store: dist.Store,
    name: str,
    rank: int,
    size: int,
    timeout: timedelta,
    address: str = "127.0.0.1",
) -> RawGroup:
    """Make one process group outside the default world.

    Args:
        kv_store: a key-value store that all members reach.
        name: unique among the groups made from `kv_store`.
        rank, size: this member's place in the group.
        timeout: a collective that takes longer fails on every member.
        address: of this host, for gloo's connections; NCCL reads NCCL_SOCKET_IFNAME.
    """
    prefixed = dist.PrefixStore(name, kv_store)
    if torch.cuda.is_available():
        nccl = dist.ProcessGroupNCCL.Options()
        nccl._timeout = timeout
        return dist.ProcessGroupNCCL(prefixed, rank, size, nccl)
    gloo = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    gloo._timeout = timeout
    gloo._devices = [dist.ProcessGroupGloo.create_device(hostname=address)]
    return dist.ProcessGroupGloo(prefixed, rank, size, gloo)


class CrossCellGroups:
    """The groups of one rank: its position in every prefix of cells that contains its own cell."""

    def __init__(
        self,
        kv_store: dist.Store,
        topology: CellTopology,
        rank: int,
        timeout: timedelta,
        address: str = "127.0.0.1",
    ) -> None:
        self.topology = topology
        self.cell = topology.cell_of(rank)
        self.position = topology.position_of(rank)
        self._groups = {
            prefix: make_group(
                kv_store,
                f"gyre/prefix{prefix}/position{self.position}",
                self.cell,
                prefix,
                timeout,
                address,
            )
            for prefix in range(max(2, self.cell + 1), topology.num_cells + 1)
        }

    def reduce_to_core(self, tensor: torch.Tensor, prefix: int) -> None:
        """Sum `tensor` (contiguous, same shape at this position of every cell < prefix) into the
        core cell's copy."""
        if prefix == 1:
            return
        options = dist.ReduceOptions()
        options.rootRank = 0
        self._wait(self._group(prefix).reduce([tensor], options), "reduction to the core", prefix)

    def _group(self, prefix: int) -> RawGroup:
        if prefix not in self._groups:
            raise CellError(f"cell {self.cell} is not a member of the prefix of {prefix} cells")
        return self._groups[prefix]

    def _wait(self, work: dist.Work, what: str, prefix: int) -> None:
        try:
            work.wait()
        except RuntimeError as error:
            raise CellError(
                f"{what} over cells 0..{prefix - 1} failed at position {self.position}: {error}"
            ) from error
