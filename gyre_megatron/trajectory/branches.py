"""The stored nodes of one execution as arrays: where branches end, and where every token went.

Used by the processor and by the export. Nothing here recurses: depth is unbounded.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np

from gyre_megatron.config.rollout import ProcessorConfig
from gyre_megatron.errors import TrajectoryError
from gyre_megatron.trajectory.columns import sampled_versions
from gyre_megatron.trajectory.paths import nodes_on_paths
from gyre_megatron.trajectory.records import Call, Node
from gyre_megatron.trajectory.sampling import path_sums


@dataclass(frozen=True)
class Conservation:
    """Where the tokens of all branches went.

    Attributes:
        captured: Tokens of all branches, each from its root: what flattening would train on.
        trained: Trainable tokens that carry a loss.
        shared: Repetitions of tokens that chosen branches share with others.
        context: Tokens of chosen branches that were not sampled, once each.
        dropped: Tokens on no chosen branch, or sampled but not to be trained.
    """

    captured: int = 0
    trained: int = 0
    shared: int = 0
    context: int = 0
    dropped: int = 0

    def __add__(self, other: Conservation) -> Conservation:
        return Conservation(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(self)))

    def check(self, where: str) -> None:
        """Raises TrajectoryError unless every captured token is accounted for."""
        if self.captured != self.trained + self.shared + self.context + self.dropped:
            raise TrajectoryError(f"{where}: tokens are not conserved: {self}")


class Branches:
    """The forest of one execution.

    `leaves` are where trainable branches end, `roles` the roles of their calls. What hangs below a
    leaf (an answer that was cut off when the harness ended, an auxiliary call) takes no part, but
    is in the accounts.
    """

    def __init__(self, nodes: Sequence[Node], calls: Sequence[Call]) -> None:
        self.nodes = nodes
        position = {node.node_id: index for index, node in enumerate(nodes)}
        self.parents = [position.get(node.parent, -1) for node in nodes]
        self._call_of = {position[call.node_id]: call for call in calls if call.node_id in position}
        self._ends = self._without_descendant(np.ones(len(nodes), bool))
        self.leaves = self._without_descendant(
            np.asarray([self._can_end_at(i) for i in range(len(nodes))], bool)
        )
        self.roles = [self._call_of[leaf].role for leaf in self.leaves]
        self._lengths = np.asarray([len(node.token_ids) for node in nodes], np.int64)

    def _can_end_at(self, index: int) -> bool:
        """Whether a branch can end here: an answer that the harness got, of a role that can
        train."""
        call = self._call_of.get(index)
        return call is not None and call.state == "complete" and call.role != "auxiliary"

    def _without_descendant(self, wanted: np.ndarray) -> list[int]:
        """Nodes among `wanted` (bool [nodes]) that have none of them below."""
        below = np.zeros(len(self.nodes), bool)
        for index in range(len(self.nodes) - 1, -1, -1):
            if self.parents[index] >= 0 and (below[index] or wanted[index]):
                below[self.parents[index]] = True
        return [index for index in range(len(self.nodes)) if wanted[index] and not below[index]]

    def trainable(
        self, config: ProcessorConfig, oldest_version: int | None = None
    ) -> list[np.ndarray]:
        """bool [sampled tokens] of each node: which of them may be trained.

        Args:
            oldest_version: tokens sampled by older weights may not; None: age does not matter.
        """
        masks = []
        for index, node in enumerate(self.nodes):
            mask = np.full(len(node.logprobs), self._may_train(index, config))
            if oldest_version is not None and len(mask):
                mask &= sampled_versions(node) >= oldest_version
            masks.append(mask)
        return masks

    def _may_train(self, index: int, config: ProcessorConfig) -> bool:
        call = self._call_of.get(index)
        if call is None or call.state != "complete" or call.role not in config.role_priority:
            return False
        return config.train_truncated or call.finish_reason != "length"

    def accounts(
        self, owner: np.ndarray, num_trainable: np.ndarray, chosen_leaves: Sequence[int]
    ) -> Conservation:
        """Where the tokens of all branches went.

        Args:
            owner: int32 [nodes]; -1 where no chosen branch trains the node.
            num_trainable: int64 [nodes]; trainable tokens of each node.
            chosen_leaves: nodes at which the chosen branches end.
        """
        captured = (
            int(path_sums(self.parents, self._lengths)[self._ends].sum()) if self._ends else 0
        )
        passes = self._num_leaves_below()
        on_chosen = np.zeros(len(self.nodes), bool)
        on_chosen[nodes_on_paths(chosen_leaves, self.parents)] = True
        sampled = np.asarray([len(node.logprobs) for node in self.nodes], np.int64)
        trained = np.where(on_chosen & (owner >= 0), num_trainable, 0)
        return Conservation(
            captured=captured,
            trained=int(trained.sum()),
            shared=int((self._lengths * (passes - 1))[on_chosen].sum()),
            context=int((self._lengths - sampled)[on_chosen].sum()),
            dropped=int((self._lengths * passes)[~on_chosen].sum())
            + int((sampled - trained)[on_chosen].sum()),
        )

    def no_accounts(self) -> Conservation:
        """Where the tokens went if nothing is trained: all are dropped."""
        nobody = np.full(len(self.nodes), -1, np.int32)
        return self.accounts(nobody, np.zeros(len(self.nodes), np.int64), [])

    def _num_leaves_below(self) -> np.ndarray:
        counts = np.zeros(len(self.nodes), np.int64)
        counts[self._ends] = 1
        for index in range(len(self.nodes) - 1, -1, -1):
            if self.parents[index] >= 0:
                counts[self.parents[index]] += counts[index]
        return counts
