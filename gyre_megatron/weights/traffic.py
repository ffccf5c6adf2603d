"""What every process sends, receives and keeps in a reshard, without a plan for each of them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from gyre_megatron.weights.layout import Layout
from gyre_megatron.weights.planner import World, routes


@dataclass(frozen=True)
class Traffic:
    """Elements by process (int64[processes]), those between processes of one node apart."""

    out_near: np.ndarray
    out_far: np.ndarray
    in_near: np.ndarray
    in_far: np.ndarray
    local: np.ndarray

    @property
    def out(self) -> np.ndarray:
        """Elements sent."""
        return self.out_near + self.out_far

    @property
    def incoming(self) -> np.ndarray:
        """Elements received."""
        return self.in_near + self.in_far


def traffic(source: Layout, target: Layout, names: Iterable[str], ranks_per_node: int) -> Traffic:
    """Add up the parcels of all processes.

    Args:
        source, target: both number the same processes.
        names: the tensors to move.
        ranks_per_node: processes of one node follow one another.

    Raises:
        PlanError: an element of `target` has no source; its tensor is named.
    """
    num_processes = max(source.num_ranks, target.num_ranks)
    near_out, far_out, near_in, far_in, local = ([0] * num_processes for _ in range(5))
    world = World.colocated(source, target)
    for name in names:
        for sender, receiver, parcel in routes(
            name, source.shards(name), target.shards(name), world, None
        ):
            numel = parcel.numel
            if sender == receiver:
                local[sender] += numel
            elif sender // ranks_per_node == receiver // ranks_per_node:
                near_out[sender] += numel
                near_in[receiver] += numel
            else:
                far_out[sender] += numel
                far_in[receiver] += numel
    return Traffic(
        *(np.array(side, np.int64) for side in (near_out, far_out, near_in, far_in, local))
    )
