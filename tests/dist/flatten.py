"""The slow, obvious form of a tree: every trajectory alone, with the edges it owns. Independent of
packing."""

from __future__ import annotations

import numpy as np

from gyre_megatron.trajectory.packing import PackedBin
from gyre_megatron.trajectory.tree import ExecutionTree


def dfs_leaves(tree: ExecutionTree) -> list[int]:
    """Leaves in depth-first order, children by index."""
    order: list[int] = []

    def visit(node: int) -> None:
        order.append(node)
        for child, other in enumerate(tree.nodes):
            if other.parent == node:
                visit(child)

    for root, node in enumerate(tree.nodes):
        if node.parent < 0:
            visit(root)
    return order


def trained_trajectories(tree: ExecutionTree) -> list[int]:
    """Trajectories that own at least one trained token, in depth-first order of their leaves."""
    owning = {int(tree.owner[n]) for n, node in enumerate(tree.nodes) if node.trainable.any()} - {-1}
    place = {node: i for i, node in enumerate(dfs_leaves(tree))}
    return sorted(owning, key=lambda j: place[tree.trajectories[j].leaf])


def flat_bins(trees: list[ExecutionTree]) -> list[PackedBin]:
    """One bin per trained trajectory: the tokens of its path, edges where it owns a sampled
    token."""
    bins = []
    for e, tree in enumerate(trees):
        owned = sum(int(n.trainable.sum()) for i, n in enumerate(tree.nodes) if tree.owner[i] >= 0)
        for j in trained_trajectories(tree):
            path = tree.path(tree.trajectories[j].leaf)
            tokens, labels = [], []
            for n in path:
                node = tree.nodes[n]
                for t in range(len(node)):
                    if node.trainable[t] and tree.owner[n] == j:
                        sampled = (node.behaviour_logprobs[t], node.temperatures[t], node.weight_versions[t])
                        labels.append((len(tokens) - 1, node.token_ids[t], *sampled))
                    tokens.append(node.token_ids[t])
            weight = 1.0 / (owned * len(trees))
            bins.append(_chain(np.array(tokens), labels, weight, tree.advantage, e, tree.trajectories[j].role))
    return bins


def _chain(tokens, labels, weight, advantage, execution, role) -> PackedBin:
    n = len(tokens)
    sources, ids, behaviour, temperatures, versions = (np.array(c) for c in zip(*labels, strict=True))
    return PackedBin(
        token_ids=tokens.astype(np.int32),
        positions=np.arange(n, dtype=np.int32),
        node_starts=np.array([0], np.int32),
        node_ends=np.array([n], np.int32),
        subtree_ends=np.array([n], np.int32),
        edge_sources=sources.astype(np.int32),
        edge_labels=ids.astype(np.int32),
        edge_weights=np.full(len(ids), weight, np.float32),
        edge_behaviour_logprobs=behaviour.astype(np.float32),
        edge_temperatures=temperatures.astype(np.float32),
        edge_versions=versions.astype(np.int32),
        edge_trajectories=np.zeros(len(ids), np.int32),
        trajectory_advantages=np.array([advantage], np.float32),
        trajectory_executions=np.array([execution], np.int32),
        trajectory_roles=np.array([role]),
        bin_weight=np.float32(0),
    )
