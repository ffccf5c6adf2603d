"""A packed bin on one rank: padded, split over context-parallel ranks, as the tensors that layers
read.

Invariant: everything a layer needs rides in `TreeParams`, a PackedSeqParams, which Megatron hands
untouched from the model to every layer, also when activations are recomputed.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from megatron.core import parallel_state as mpu
from megatron.core.packed_seq_params import PackedSeqParams

from gyre_megatron.algos.objective import EdgeBatch
from gyre_megatron.errors import TrajectoryError
from gyre_megatron.ops.tree_attention import tree_pieces
from gyre_megatron.trajectory.packing import PackedBin

BLOCKS_PER_CP_RANK = 16
"""Blocks each context-parallel rank takes: enough to level costs, few enough to keep blocks
long."""
FLEX_BLOCK = 128
"""FlexAttention's block; on GPUs every block of queries is a multiple of it."""


@dataclass
class TreeParams(PackedSeqParams):
    """Tree metadata of one micro-step, as layers see it (tokens of this rank unless said
    otherwise).

    Attributes:
        positions: int64 [T]; depth on the path, for rotary embeddings.
        nodes: int32 [M] numpy each: starts, ends, subtree_ends over all context-parallel ranks'
            tokens.
        intervals: int64 [n, 2] numpy; global token intervals held here.
        order: int64 [S] or None; row of the gathered (rank by rank) tokens that holds each global
            token.
        padding: bool [T / sp]; True where a token is padding, on this rank's sequence-parallel
            share.
        routes: int64 [T / sp, layers, topk] or None; recorded experts, -1 where none.
        aux_weight: share of this bin in the batch's load-balancing loss.
        cache: what layers derive once per micro-step (pieces, block mask, levels).
    """

    positions: torch.Tensor = None  # type: ignore[assignment]
    nodes: tuple[np.ndarray, np.ndarray, np.ndarray] = None  # type: ignore[assignment]
    intervals: np.ndarray = None  # type: ignore[assignment]
    order: torch.Tensor | None = None
    padding: torch.Tensor = None  # type: ignore[assignment]
    routes: torch.Tensor | None = None
    aux_weight: float = 0.0
    cache: dict[str, Any] = None  # type: ignore[assignment]

    @property
    def pieces(self) -> torch.Tensor:
        """Dense pieces of this rank's attention (CPU kernel)."""
        if "pieces" not in self.cache:
            self.cache["pieces"] = torch.from_numpy(tree_pieces(*self.nodes, self.intervals))
        return self.cache["pieces"]


@dataclass(frozen=True)
class TreeBatch:
    """One micro-step on one rank.

    Attributes:
        token_ids: int64 [1, T].
        sources: int64 [E]; row of this rank's tokens that predicts the label.
        labels: int64 [E]; temperatures: fp32 [E].
        edges: loss columns of the same E edges; trajectory columns are the whole bin's.
        bin: where the batch came from.
        edge_indices: int64 [E] numpy; index of each edge in the bin.
        index: number of the micro-step among this replica's; results are kept by it.
    """

    params: TreeParams
    token_ids: torch.Tensor
    sources: torch.Tensor
    labels: torch.Tensor
    temperatures: torch.Tensor
    edges: EdgeBatch
    bin: PackedBin
    edge_indices: np.ndarray
    index: int


def padded_length(num_tokens: int, cp: int, tp: int, block: int) -> int:
    """Tokens after padding: every context-parallel rank gets equally many blocks, every block
    divides by tp."""
    unit = cp * _block_length(num_tokens, cp, tp, block)
    return max(1, -(-num_tokens // unit)) * unit


def _block_length(num_tokens: int, cp: int, tp: int, block: int) -> int:
    """Queries that move together between context-parallel ranks.

    A power of two times the unit, so that the padded length gives the same blocks as the bin's own
    length.
    """
    unit = math.lcm(tp, block)
    blocks = num_tokens // (cp * BLOCKS_PER_CP_RANK * unit) if cp > 1 else 0
    return unit << max(0, blocks.bit_length() - 1)


def make_batch(
    bin_: PackedBin,
    length: int,
    index: int = 0,
    *,
    device: torch.device,
    sequence_parallel: bool,
    block: int,
    replay: tuple[int, int] | None = None,
) -> TreeBatch:
    """Put a bin on this rank.

    Args:
        length: tokens after padding, from `padded_length` of this bin or of a longer one.
        index: number of the micro-step among this replica's.
        block: unit of blocks (1 on CPU, FLEX_BLOCK on GPU).
        replay: (MoE layers, experts per token) where recorded routes are to be replayed.

    Raises:
        TrajectoryError: recorded routes do not fit the model.
    """
    tp = mpu.get_tensor_model_parallel_world_size()
    cp = mpu.get_context_parallel_world_size()
    pad = length - bin_.num_tokens
    positions = np.concatenate([bin_.positions, np.arange(pad)]).astype(np.int64)
    nodes = _with_padding_node(bin_, length)
    owners = _assign_blocks(positions, cp, _block_length(length, cp, tp, block))
    mine = owners[mpu.get_context_parallel_rank()]
    local = np.concatenate([np.arange(a, b) for a, b in mine])
    row = np.full(length, -1)
    row[local] = np.arange(len(local))

    share = local
    if sequence_parallel:
        share = local.reshape(tp, -1)[mpu.get_tensor_model_parallel_rank()]
    params = TreeParams(
        qkv_format="sbhd",
        max_seqlen_q=len(local),
        max_seqlen_kv=length,
        positions=torch.from_numpy(positions[local]).to(device),
        nodes=nodes,
        intervals=mine,
        order=None if cp == 1 else torch.from_numpy(_gathered_order(owners, length)).to(device),
        padding=torch.from_numpy(share >= bin_.num_tokens).to(device),
        routes=_routes(bin_, share, replay, device),
        aux_weight=float(bin_.bin_weight),
        cache={},
    )
    rows = row[bin_.edge_sources]
    kept = np.flatnonzero(rows >= 0)
    tokens = np.concatenate([bin_.token_ids, np.zeros(pad, np.int32)])[local].astype(np.int64)
    return TreeBatch(
        params=params,
        token_ids=torch.from_numpy(tokens)[None].to(device),
        sources=torch.from_numpy(rows[kept]).to(device),
        labels=_tensor(bin_.edge_labels[kept], device),
        temperatures=torch.from_numpy(bin_.edge_temperatures[kept]).to(device),
        edges=_edges(bin_, kept, device),
        bin=bin_,
        edge_indices=kept,
        index=index,
    )


def _tensor(array: np.ndarray, device: torch.device) -> torch.Tensor:
    return torch.from_numpy(array.astype(np.int64)).to(device)


def _edges(bin_: PackedBin, kept: np.ndarray, device: torch.device) -> EdgeBatch:
    return EdgeBatch(
        weights=torch.from_numpy(bin_.edge_weights[kept]).to(device),
        behaviour_logprobs=torch.from_numpy(bin_.edge_behaviour_logprobs[kept]).to(device),
        versions=_tensor(bin_.edge_versions[kept], device),
        trajectories=_tensor(bin_.edge_trajectories[kept], device),
        advantages=torch.from_numpy(bin_.trajectory_advantages).to(device),
        executions=_tensor(bin_.trajectory_executions, device),
    )


def _with_padding_node(bin_: PackedBin, length: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Nodes with one root for all padding, so that padded queries see something and nobody sees
    them."""
    if length == bin_.num_tokens:
        return bin_.node_starts, bin_.node_ends, bin_.subtree_ends
    return (
        np.append(bin_.node_starts, bin_.num_tokens),
        np.append(bin_.node_ends, length),
        np.append(bin_.subtree_ends, length),
    )


def _assign_blocks(positions: np.ndarray, cp: int, block: int) -> list[np.ndarray]:
    """Split queries over context-parallel ranks: equally many blocks each, costs levelled.

    A query on depth d sees d + 1 keys, so a block costs the sum of its positions; the costliest go
    first, each to the rank with the least so far. Returns per rank the merged [start, end)
    intervals, ascending.
    """
    length = len(positions)
    if cp == 1:
        return [np.array([[0, length]])]
    num_blocks = length // block
    costs = (positions + 1).reshape(num_blocks, block).sum(axis=1)
    totals = [0] * cp
    chosen: list[list[int]] = [[] for _ in range(cp)]
    for b in np.argsort(-costs, kind="stable").tolist():
        rank = min(
            (r for r in range(cp) if len(chosen[r]) < num_blocks // cp),
            key=lambda r: (totals[r], r),
        )
        chosen[rank].append(b)
        totals[rank] += int(costs[b])
    return [_intervals(sorted(blocks), block) for blocks in chosen]


def _intervals(blocks: list[int], block: int) -> np.ndarray:
    merged: list[list[int]] = []
    for b in blocks:
        if merged and merged[-1][1] == b * block:
            merged[-1][1] += block
        else:
            merged.append([b * block, (b + 1) * block])
    return np.array(merged)


def _gathered_order(owners: list[np.ndarray], length: int) -> np.ndarray:
    gathered = np.concatenate([np.arange(a, b) for intervals in owners for a, b in intervals])
    order = np.empty(length, np.int64)
    order[gathered] = np.arange(length)
    return order


def _routes(
    bin_: PackedBin, share: np.ndarray, replay: tuple[int, int] | None, device: torch.device
) -> torch.Tensor | None:
    if replay is None or bin_.routed_experts is None:
        return None
    if bin_.routed_experts.shape[1:] != replay:
        raise TrajectoryError(
            f"recorded routes have (layers, experts per token) = {bin_.routed_experts.shape[1:]} "
            "but the model in "
            f"training has {replay}; serve the same model or set training.router_replay to false"
        )
    routes = np.full((len(share), *replay), -1, np.int64)
    real = share < bin_.num_tokens
    routes[real] = bin_.routed_experts[share[real]]
    return torch.from_numpy(routes).to(device)
