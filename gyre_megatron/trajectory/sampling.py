"""Which branches of an execution are trained: bounded, by role, each token at most once.

From the highest class that still has unmasked trainable tokens a leaf is drawn with probability
proportional to them; its whole path is masked (a shared prefix trains once); until nothing is left
or J_max branches are taken.
Source: QwenGyre (arXiv 2609.33848), bounded and deduplicated sampling. All passes are iterative.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from gyre_megatron.trajectory.paths import walk_up_indices


def path_sums(parents: Sequence[int], values: np.ndarray) -> np.ndarray:
    """Sum of `values` (int64 [n]) from the root to each node; parents come first."""
    sums = np.asarray(values, np.int64).copy()
    for index, parent in enumerate(parents):
        if parent >= 0:
            sums[index] += sums[parent]
    return sums


def select_branches(
    parents: Sequence[int],
    num_trainable: np.ndarray,
    leaves: Sequence[int],
    roles: Sequence[str],
    priority: Sequence[str],
    max_branches: int,
    rng: np.random.Generator,
) -> tuple[list[int], np.ndarray]:
    """Choose leaves.

    Args:
        parents: Index of each node's parent, -1 for roots; parents come first.
        num_trainable: int64 [nodes], trainable tokens of each node.
        leaves: Node of each candidate branch.
        roles: Role of each candidate; roles not in `priority` are never chosen.
        max_branches: J_max.

    Returns:
        Positions in `leaves` in the order drawn, and int32 [nodes]: which of them owns each node,
        -1 for none.
    """
    unmasked = np.asarray(num_trainable, np.int64).copy()
    owner = np.full(len(parents), -1, np.int32)
    chosen: list[int] = []
    while len(chosen) < max_branches:
        weights = path_sums(parents, unmasked)[np.asarray(leaves, np.int64)]
        candidates = _highest_class(weights, roles, priority)
        if not candidates:
            break
        share = weights[candidates] / weights[candidates].sum()
        drawn = candidates[int(rng.choice(len(candidates), p=share))]
        _mask_path(parents, leaves[drawn], len(chosen), unmasked, owner)
        chosen.append(drawn)
    return chosen, owner


def _highest_class(weights: np.ndarray, roles: Sequence[str], priority: Sequence[str]) -> list[int]:
    for role in priority:
        candidates = [
            index for index, found in enumerate(roles) if found == role and weights[index] > 0
        ]
        if candidates:
            return candidates
    return []


def _mask_path(
    parents: Sequence[int], leaf: int, branch: int, unmasked: np.ndarray, owner: np.ndarray
) -> None:
    for node in walk_up_indices(leaf, parents):
        if unmasked[node] > 0:
            owner[node] = branch
            unmasked[node] = 0
