"""Random execution trees: shallow and deep, single-token nodes, many children, branches at the
first token."""

from __future__ import annotations

import numpy as np

from gyre_megatron.trajectory.tree import ExecutionTree, Trajectory, TreeNode

ROLES = ("main", "main_summary", "sub_agent", "sub_agent_summary")


def random_node(
    rng: np.random.Generator, parent: int, length: int, vocab: int, trainable: bool
) -> TreeNode:
    mask = np.full(length, trainable) & (rng.random(length) < 0.8)
    return TreeNode(
        parent=parent,
        token_ids=rng.integers(0, vocab, length).astype(np.int32),
        trainable=mask,
        behaviour_logprobs=np.where(mask, -np.abs(rng.normal(4.6, 0.6, length)), 0).astype(
            np.float32
        ),
        weight_versions=np.where(mask, rng.integers(0, 3, length), -1).astype(np.int32),
        temperatures=np.where(mask, rng.choice([0.7, 1.0], length), 1.0).astype(np.float32),
    )


def random_tree(
    seed: int, vocab: int = 96, max_depth: int = 4, max_length: int = 12, max_children: int = 4
) -> ExecutionTree:
    """A tree of depth 0 to `max_depth` whose every leaf is a selected trajectory; ownership is
    random along paths."""
    rng = np.random.default_rng(seed)
    depth = int(rng.integers(0, max_depth + 1))
    # One seed in three branches right behind a one-token root.
    root_length = 1 if seed % 3 == 0 else int(rng.integers(2, max_length + 1))
    nodes = [random_node(rng, -1, root_length, vocab, False)]
    if seed % 5 == 0:
        nodes.append(
            random_node(rng, -1, int(rng.integers(1, max_length)), vocab, False)
        )  # a second root
    frontier = list(range(len(nodes)))
    for _ in range(depth):
        grown = []
        for parent in frontier:
            for _ in range(int(rng.integers(1, max_children + 1))):
                length = 1 if rng.random() < 0.3 else int(rng.integers(1, max_length + 1))
                nodes.append(random_node(rng, parent, length, vocab, bool(rng.random() < 0.7)))
                grown.append(len(nodes) - 1)
        frontier = list(rng.permutation(grown)[:4])
    parents = {node.parent for node in nodes}
    leaves = [n for n in range(len(nodes)) if n not in parents]
    trajectories = [Trajectory(leaf, ROLES[i % 4]) for i, leaf in enumerate(leaves)]
    owner = np.full(len(nodes), -1, np.int32)
    for j in rng.permutation(len(leaves)):
        node = leaves[j]
        while node >= 0:
            if owner[node] < 0 and nodes[node].trainable.any():
                owner[node] = j
            node = nodes[node].parent
    return ExecutionTree(
        execution_id=f"execution-{seed}",
        group_id=f"group-{seed % 4}",
        reward=float(rng.random()),
        advantage=float(rng.normal()),
        nodes=tuple(nodes),
        trajectories=tuple(trajectories),
        owner=owner,
    )
