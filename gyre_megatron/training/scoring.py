"""Log-probabilities of plain sequences, through the same packed path that trains."""

from __future__ import annotations

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state as mpu

from gyre_megatron.errors import TrajectoryError
from gyre_megatron.training.tree_batch import TreeBatch
from gyre_megatron.trajectory.packing import PackedBin, pack
from gyre_megatron.trajectory.tree import ExecutionTree, Trajectory, TreeNode


def sequence_bins(
    sequences: list[list[int]], temperature: float, token_budget: int
) -> list[PackedBin]:
    """Bins in which every token but a sequence's first is an edge.

    Raises:
        TrajectoryError: a sequence has fewer than two tokens.
    """
    if short := [i for i, ids in enumerate(sequences) if len(ids) < 2]:
        raise TrajectoryError(
            f"sequences {short[:5]} have fewer than 2 tokens; there is no next token to score"
        )
    trees = [_as_tree(i, ids, temperature) for i, ids in enumerate(sequences)]
    return pack(trees, max([token_budget, *map(len, sequences)]), len(sequences)) if trees else []


def _as_tree(index: int, ids: list[int], temperature: float) -> ExecutionTree:
    n = len(ids)
    trainable = np.arange(n) > 0
    node = TreeNode(
        parent=-1,
        token_ids=np.asarray(ids, np.int32),
        trainable=trainable,
        behaviour_logprobs=np.zeros(n, np.float32),
        weight_versions=np.where(trainable, 0, -1).astype(np.int32),
        temperatures=np.full(n, temperature, np.float32),
    )
    owner = np.zeros(1, np.int32)
    return ExecutionTree(str(index), "score", 0.0, 0.0, (node,), (Trajectory(0, "main"),), owner)


def collect_logprobs(
    bins: list[PackedBin],
    batches: list[TreeBatch],
    scored: dict[int, torch.Tensor],
    device: torch.device,
) -> list[np.ndarray]:
    """Per bin, float32 [E] of all its edges, on every rank of the cell.

    Args:
        batches: this replica's share of the bins.
        scored: log-probabilities of each batch's edges by its index, on the last stage.
    """
    starts = np.cumsum([0, *(len(b.edge_labels) for b in bins)])
    total = torch.zeros(int(starts[-1]), dtype=torch.float32, device=device)
    dp = mpu.get_data_parallel_world_size()
    rank = mpu.get_data_parallel_rank()
    if mpu.get_tensor_model_parallel_rank() == 0:
        # The replica's bins are bins[rank::dp]; batches beyond them only fill the pipeline
        for number, batch in zip(range(rank, len(bins), dp), batches, strict=False):
            if batch.index in scored:
                places = torch.from_numpy(starts[number] + batch.edge_indices).to(device)
                total[places] = scored[batch.index]
    if dist.get_world_size() > 1:
        dist.all_reduce(total)
    return [part.cpu().numpy() for part in total.split(np.diff(starts).tolist())]


def split_by_sequence(
    bins: list[PackedBin], logprobs: list[np.ndarray], num_sequences: int
) -> list[np.ndarray]:
    """Reorder per-bin results into one array per sequence."""
    results: list[np.ndarray] = [np.zeros(0, np.float32)] * num_sequences
    for bin_, values in zip(bins, logprobs, strict=True):
        owners = bin_.trajectory_executions[bin_.edge_trajectories]
        for sequence in bin_.trajectory_executions.tolist():
            results[sequence] = values[owners == sequence]
    return results
