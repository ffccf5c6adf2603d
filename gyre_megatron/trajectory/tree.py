"""What training receives of one execution: a forest of nodes and the branches chosen from it.

Made by `trajectory.processor`, read by `trajectory.packing` and by training. Invariant: nodes hold
only their own tokens, parents come before children, and every trained token is owned by exactly one
trajectory.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from gyre_megatron.errors import TrajectoryError
from gyre_megatron.trajectory.paths import path_to


@dataclass(frozen=True)
class TreeNode:
    """A run of tokens that its children share.

    Attributes:
        parent: Index of the parent in `ExecutionTree.nodes`; -1 for a root (a forest is allowed).
        token_ids: int32 [n].
        trainable: bool [n]; True where the policy sampled the token.
        behaviour_logprobs: float32 [n]; 0 where not sampled.
        weight_versions: int32 [n]; the version that sampled the token, -1 where not sampled.
        temperatures: float32 [n]; the sampling temperature, 1.0 where not sampled.
        routed_experts: int16 [n, num_moe_layers, experts_per_token], or None if the engine returned
            none.
    """

    parent: int
    token_ids: np.ndarray
    trainable: np.ndarray
    behaviour_logprobs: np.ndarray
    weight_versions: np.ndarray
    temperatures: np.ndarray
    routed_experts: np.ndarray | None = None

    def __len__(self) -> int:
        return len(self.token_ids)


@dataclass(frozen=True)
class Trajectory:
    """A selected branch: the path from a root to `leaf`, with the role of the branch."""

    leaf: int
    role: str


@dataclass(frozen=True)
class ExecutionTree:
    """The training data of one execution.

    Attributes:
        nodes: Nodes of the selected branches, parents before children.
        trajectories: Selected branches, at most J_max.
        owner: int32 [len(nodes)]; index of the trajectory that trains the node's trainable tokens,
            -1 if none does.
    """

    execution_id: str
    group_id: str
    reward: float
    advantage: float
    nodes: tuple[TreeNode, ...]
    trajectories: tuple[Trajectory, ...]
    owner: np.ndarray

    def __post_init__(self) -> None:
        if len(self.owner) != len(self.nodes):
            raise TrajectoryError(
                f"execution {self.execution_id}: owner has {len(self.owner)} entries for "
                f"{len(self.nodes)} nodes"
            )
        for index, node in enumerate(self.nodes):
            self._check_node(index, node)
        for trajectory in self.trajectories:
            if not 0 <= trajectory.leaf < len(self.nodes):
                raise TrajectoryError(
                    f"execution {self.execution_id}: no node {trajectory.leaf} for a leaf"
                )

    def _check_node(self, index: int, node: TreeNode) -> None:
        where = f"execution {self.execution_id}, node {index}"
        if not -1 <= node.parent < index:
            raise TrajectoryError(f"{where}: parent {node.parent} must be -1 or an earlier node")
        columns = (node.trainable, node.behaviour_logprobs, node.weight_versions, node.temperatures)
        if any(len(column) != len(node) for column in columns):
            raise TrajectoryError(f"{where}: columns differ in length from its {len(node)} tokens")
        if not -1 <= self.owner[index] < len(self.trajectories):
            raise TrajectoryError(
                f"{where}: owner {self.owner[index]} is not one of the trajectories"
            )

    @cached_property
    def parents(self) -> list[int]:
        """Index of each node's parent, -1 for a root."""
        return [node.parent for node in self.nodes]

    def path(self, node: int) -> list[int]:
        """Indices of the nodes from the root down to `node`."""
        return path_to(node, self.parents)

    def trained_nodes(self) -> Iterator[tuple[int, TreeNode]]:
        """Nodes whose trainable tokens belong to a trajectory."""
        return ((i, node) for i, node in enumerate(self.nodes) if self.owner[i] >= 0)

    @property
    def num_trained_tokens(self) -> int:
        """Tokens that carry a loss: the denominator of this execution's mean."""
        return sum(int(node.trainable.sum()) for _, node in self.trained_nodes())
