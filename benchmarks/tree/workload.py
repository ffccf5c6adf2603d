"""Executions shaped like a coding agent's: a main line with compactions, sub-agents, retries."""

from __future__ import annotations

import numpy as np

from gyre_megatron.trajectory.packing import PackedBin
from gyre_megatron.trajectory.tree import ExecutionTree, Trajectory, TreeNode

PRIORITY = ("main", "main_summary", "sub_agent", "sub_agent_summary")


class Builder:
    """Grows one execution turn by turn: context tokens (tool results), then sampled tokens."""

    def __init__(self, seed: int, vocab: int) -> None:
        self.rng, self.vocab = np.random.default_rng(seed), vocab
        self.nodes: list[TreeNode] = []
        self.leaves: list[Trajectory] = []

    def node(self, parent: int, length: int, *, sampled: bool) -> int:
        zeros = np.zeros(length, np.float32)
        self.nodes.append(
            TreeNode(
                parent=parent,
                token_ids=self.rng.integers(0, self.vocab, length).astype(np.int32),
                trainable=np.full(length, sampled),
                behaviour_logprobs=zeros - (np.log(self.vocab) if sampled else 0),
                weight_versions=np.full(length, 0 if sampled else -1, np.int32),
                temperatures=zeros + 1,
            )
        )
        return len(self.nodes) - 1

    def turns(self, parent: int, count: int, context: int, sampled: int) -> int:
        """`count` turns of tool result and answer; returns the last node."""
        for _ in range(count):
            parent = self.node(self.node(parent, context, sampled=False), sampled, sampled=True)
        return parent

    def leaf(self, node: int, role: str) -> None:
        self.leaves.append(Trajectory(node, role))

    def build(self, max_trajectories: int | None) -> ExecutionTree:
        """Keep the first trajectories by role; a shared prefix is trained by the first that holds
        it."""
        chosen = sorted(self.leaves, key=lambda t: PRIORITY.index(t.role))[:max_trajectories]
        owner = np.full(len(self.nodes), -1, np.int32)
        for j, trajectory in enumerate(chosen):
            node = trajectory.leaf
            while node >= 0:
                if owner[node] < 0 and self.nodes[node].trainable.any():
                    owner[node] = j
                node = self.nodes[node].parent
        return ExecutionTree("bench", "bench", 1.0, 1.0, tuple(self.nodes), tuple(chosen), owner)


def coding_execution(
    scale: int, *, seed: int = 0, vocab: int = 512, segments: int = 2, sub_agents: int = 1
) -> Builder:
    """A main line of `segments` context windows with a compaction between two, a retry, and
    sub-agents.

    `scale` is the number of tokens of a typical tool result; an answer is half of it.
    """
    b = Builder(seed, vocab)
    system = b.node(
        -1, 12 * scale, sampled=False
    )  # system prompt, tools and task: shared by every window
    start = system
    for segment in range(segments):
        middle = b.turns(start, 8, scale, scale // 2)
        b.leaf(b.turns(middle, 1, scale // 4, scale // 2), "main")  # a retried turn, abandoned
        end = b.turns(middle, 6, scale, scale // 2)
        b.leaf(end, "main")
        if segment + 1 < segments:
            summary = b.node(b.node(end, scale // 2, sampled=False), 2 * scale, sampled=True)
            b.leaf(summary, "main_summary")
            start = b.node(system, 2 * scale, sampled=False)
    for _ in range(sub_agents):
        own = b.node(-1, 6 * scale, sampled=False)
        end = b.turns(own, 8, scale, scale // 2)
        b.leaf(end, "sub_agent")
        b.leaf(
            b.node(b.node(end, scale // 4, sampled=False), scale, sampled=True), "sub_agent_summary"
        )
    return b


def flattened(tree: ExecutionTree, budget: int) -> list[PackedBin]:
    """The same training without shared prefixes: each trajectory a root of its own, packed into the
    same budget."""
    from gyre_megatron.trajectory.packing import pack

    total = tree.num_trained_tokens
    flat = []
    for j, trajectory in enumerate(tree.trajectories):
        path = tree.path(trajectory.leaf)
        nodes = tuple(
            TreeNode(i - 1, *(getattr(tree.nodes[n], c) for c in COLUMNS))
            for i, n in enumerate(path)
        )
        owner = np.array([0 if tree.owner[n] == j else -1 for n in path], np.int32)
        flat.append(
            ExecutionTree(
                str(j),
                "bench",
                1.0,
                1.0,
                nodes,
                (Trajectory(len(path) - 1, trajectory.role),),
                owner,
            )
        )
    return pack(flat, budget, 1, denominator="constant", constant_length=total)


COLUMNS = ("token_ids", "trainable", "behaviour_logprobs", "weight_versions", "temperatures")


def nodes_of(bin_: PackedBin) -> np.ndarray:
    """int32 [3, M]."""
    return np.stack([bin_.node_starts, bin_.node_ends, bin_.subtree_ends])
