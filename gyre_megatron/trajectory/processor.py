"""Executions of a group to what training receives: rewards, advantages, chosen branches, and where
every token went.

Called by the control plane when a group has finished. Invariant, checked: `captured = trained +
shared + context + dropped`, counted over the branches as they would be if each were flattened into
a sample.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np

from gyre_megatron.config.rollout import ProcessorConfig
from gyre_megatron.errors import TrajectoryError
from gyre_megatron.trajectory.records import Call, ExecutionRecord, Node
from gyre_megatron.trajectory.sampling import path_sums, select_branches
from gyre_megatron.trajectory.store import TrajectoryStore
from gyre_megatron.trajectory.tree import ExecutionTree, Trajectory, TreeNode


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


@dataclass(frozen=True)
class ProcessedGroup:
    """Training data of one group, with its accounts.

    Attributes:
        trees: One per execution that is trained (it may own no trainable token if nothing was
            sampled).
        rewards: Of the scored executions, by execution id.
        num_excluded: Executions without a reward (evaluator failed, or dropped).
    """

    group_id: str
    trees: list[ExecutionTree]
    conservation: Conservation
    rewards: dict[str, float]
    num_excluded: int


def process_group(store: TrajectoryStore, group_id: str, config: ProcessorConfig) -> ProcessedGroup:
    """Turn a finished group into trees with group-relative advantages.

    Raises:
        TrajectoryError: an execution of the group has not finished, or tokens went astray.
    """
    executions = store.executions(group_id=group_id)
    unfinished = [e.execution_id for e in executions if e.state != "finished"]
    if unfinished:
        raise TrajectoryError(
            f"group {group_id} cannot be processed: {unfinished} have not finished"
        )
    rewards = {
        e.execution_id: float(e.outcome.reward)
        for e in executions
        if e.outcome and e.outcome.reward is not None
    }
    advantages = dict(
        zip(rewards, group_advantages(np.asarray(list(rewards.values())), config), strict=True)
    )
    trees, accounts = [], Conservation()
    for execution in executions:
        tree, counts = _process_execution(
            store, execution, advantages.get(execution.execution_id), config
        )
        counts.check(f"execution {execution.execution_id}")
        accounts += counts
        if tree is not None:
            trees.append(tree)
    accounts.check(f"group {group_id}")
    return ProcessedGroup(group_id, trees, accounts, rewards, len(executions) - len(rewards))


def group_advantages(rewards: np.ndarray, config: ProcessorConfig) -> list[float]:
    """Rewards (float64 [n]) relative to their group: minus the mean, over the standard deviation if
    so configured.

    Groups of one, and groups whose rewards do not differ, get zeros. Source: GRPO (arXiv
    2402.03300); `mean`: Dr. GRPO (arXiv 2503.20783).
    """
    if len(rewards) < 2 or float(np.ptp(rewards)) < config.min_spread:
        return [0.0] * len(rewards)
    centred = rewards - rewards.mean()
    return [
        float(a) for a in (centred / rewards.std() if config.advantage == "mean_std" else centred)
    ]


def _process_execution(
    store: TrajectoryStore,
    execution: ExecutionRecord,
    advantage: float | None,
    config: ProcessorConfig,
) -> tuple[ExecutionTree | None, Conservation]:
    nodes, calls = store.nodes(execution.execution_id), store.calls(execution.execution_id)
    branches = Branches(nodes, calls)
    outcome = execution.outcome
    if outcome is None or advantage is None or outcome.status != "scored":
        return None, branches.accounts(np.full(len(nodes), -1, np.int32), [])
    seed = zlib.crc32(execution.execution_id.encode()) ^ (config.seed & 0xFFFFFFFF)
    trainable = branches.num_trainable(config)
    chosen, owner = select_branches(
        branches.parents,
        trainable,
        branches.leaves,
        branches.roles,
        config.role_priority,
        config.max_trajectories,
        np.random.default_rng(seed),
    )
    tree = _tree(execution, advantage, branches, chosen, owner)
    return tree, branches.accounts(owner, [branches.leaves[index] for index in chosen])


class Branches:
    """The forest of one execution as arrays.

    `leaves` are where trainable branches end, `roles` their roles. What hangs below a leaf (an answer that was cut off
    when the harness ended, an auxiliary call) takes no part, but is in the accounts.
    """

    def __init__(self, nodes: Sequence[Node], calls: Sequence[Call]) -> None:
        self.nodes = nodes
        position = {node.node_id: index for index, node in enumerate(nodes)}
        self.parents = [position.get(node.parent, -1) for node in nodes]
        self._call_of = {position[call.node_id]: call for call in calls if call.node_id in position}
        self._ends = self._without_descendant(np.ones(len(nodes), bool))
        self.leaves = self._without_descendant(
            np.asarray([self._counts(i) for i in range(len(nodes))], bool)
        )
        self.roles = [self._call_of[leaf].role for leaf in self.leaves]
        self._lengths = np.asarray([len(node.token_ids) for node in nodes], np.int64)

    def _counts(self, index: int) -> bool:
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

    def trains(self, index: int, config: ProcessorConfig) -> bool:
        """Whether a node's sampled tokens may be trained at all."""
        call = self._call_of.get(index)
        if call is None or call.state != "complete" or call.role not in config.role_priority:
            return False
        return config.train_truncated or call.finish_reason != "length"

    def num_trainable(self, config: ProcessorConfig) -> np.ndarray:
        """int64 [nodes]: tokens the policy sampled that may be trained."""
        counts = [
            len(node.logprobs) if self.trains(i, config) else 0 for i, node in enumerate(self.nodes)
        ]
        return np.asarray(counts, np.int64)

    def accounts(self, owner: np.ndarray, chosen_leaves: Sequence[int]) -> Conservation:
        """Where the tokens of all branches went, given who owns each node and which leaves were
        chosen."""
        captured = (
            int(path_sums(self.parents, self._lengths)[self._ends].sum()) if self._ends else 0
        )
        passes = self._num_leaves_below()
        on_chosen = np.zeros(len(self.nodes), bool)
        on_chosen[sorted(_ancestors(self.parents, chosen_leaves))] = True
        trained = shared = context = dropped = 0
        for index, node in enumerate(self.nodes):
            length, sampled = len(node.token_ids), len(node.logprobs)
            if not on_chosen[index]:
                dropped += length * int(passes[index])
                continue
            shared += length * int(passes[index] - 1)
            context += length - sampled
            if owner[index] >= 0:
                trained += sampled
            else:
                dropped += sampled
        return Conservation(captured, trained, shared, context, dropped)

    def _num_leaves_below(self) -> np.ndarray:
        counts = np.zeros(len(self.nodes), np.int64)
        counts[self._ends] = 1
        for index in range(len(self.nodes) - 1, -1, -1):
            if self.parents[index] >= 0:
                counts[self.parents[index]] += counts[index]
        return counts


def _tree(
    execution: ExecutionRecord,
    advantage: float,
    branches: Branches,
    chosen: Sequence[int],
    owner: np.ndarray,
) -> ExecutionTree:
    kept = sorted(_ancestors(branches.parents, [branches.leaves[index] for index in chosen]))
    position = {index: place for place, index in enumerate(kept)}
    nodes = tuple(
        _tree_node(
            branches.nodes[index], position.get(branches.parents[index], -1), owner[index] >= 0
        )
        for index in kept
    )
    trajectories = tuple(
        Trajectory(position[branches.leaves[i]], branches.roles[i]) for i in chosen
    )
    reward = (
        execution.outcome.reward
        if execution.outcome and execution.outcome.reward is not None
        else 0.0
    )
    return ExecutionTree(
        execution_id=execution.execution_id,
        group_id=execution.group_id,
        reward=float(reward),
        advantage=float(advantage),
        nodes=nodes,
        trajectories=trajectories,
        owner=owner[kept] if kept else np.empty(0, np.int32),
    )


def _ancestors(parents: Sequence[int], leaves: Sequence[int]) -> set[int]:
    kept: set[int] = set()
    for leaf in leaves:
        node = leaf
        while node >= 0 and node not in kept:
            kept.add(node)
            node = parents[node]
    return kept


def _tree_node(node: Node, parent: int, trained: bool) -> TreeNode:
    length, lead = len(node.token_ids), node.num_context
    trainable = np.zeros(length, bool)
    logprobs = np.zeros(length, np.float32)
    versions = np.full(length, -1, np.int32)
    temperatures = np.ones(length, np.float32)
    if node.sampled:
        trainable[lead:] = trained
        logprobs[lead:] = node.logprobs
        versions[lead:] = np.repeat([v for v, _ in node.versions], [c for _, c in node.versions])
        temperatures[lead:] = node.temperature
    return TreeNode(
        parent, node.token_ids, trainable, logprobs, versions, temperatures, node.routed_experts
    )
