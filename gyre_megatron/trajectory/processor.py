"""Executions of a group to what training receives: rewards, advantages, chosen branches, and where
every token went.

Called by the control plane when a group has finished. Invariants: an execution that is excluded
counts nowhere; `captured = trained + shared + context + dropped`, counted over the branches as they
would be if each were flattened into a sample (checked).
"""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from gyre_megatron.config.rollout import ProcessorConfig
from gyre_megatron.errors import TrajectoryError
from gyre_megatron.trajectory.advantages import group_advantages
from gyre_megatron.trajectory.branches import Branches, Conservation
from gyre_megatron.trajectory.columns import token_columns
from gyre_megatron.trajectory.fit import Excluded, Problem, Reason, TrainingBounds, split_fitting
from gyre_megatron.trajectory.paths import nodes_on_paths
from gyre_megatron.trajectory.records import ExecutionRecord, Node
from gyre_megatron.trajectory.sampling import select_branches
from gyre_megatron.trajectory.store import TrajectoryStore
from gyre_megatron.trajectory.tree import ExecutionTree, Trajectory, TreeNode


@dataclass(frozen=True)
class ProcessedGroup:
    """Training data of one group, with its accounts.

    Attributes:
        trees: One per scored execution that training can take (it may own no trainable token if
            nothing was sampled).
        rewards: Of the executions that count, by execution id: those of `trees`, and placeholders
            (reward 0, no tokens, no tree).
        excluded: Executions that count nowhere, each with the reason.
        statuses: Executions by the way they ended.
    """

    group_id: str
    trees: list[ExecutionTree]
    conservation: Conservation
    rewards: dict[str, float]
    excluded: list[Excluded]
    statuses: Counter[str]

    @property
    def num_counted(self) -> int:
        """Executions that share the group's weight in the loss."""
        return len(self.rewards)


def process_group(
    store: TrajectoryStore,
    group_id: str,
    config: ProcessorConfig,
    bounds: TrainingBounds | None = None,
) -> ProcessedGroup:
    """Turn a finished group into trees with group-relative advantages.

    Args:
        bounds: what training can take; executions beyond it are excluded.

    Raises:
        TrajectoryError: an execution of the group has not finished, or tokens went astray.
    """
    bounds = bounds or TrainingBounds()
    executions = store.executions(group_id=group_id)
    unfinished = [e.execution_id for e in executions if e.state != "finished"]
    if unfinished:
        raise TrajectoryError(
            f"group {group_id} cannot be processed: {unfinished} have not finished"
        )
    candidates = [_candidate(store, execution, config, bounds) for execution in executions]
    trees = [candidate.tree for candidate in candidates if candidate.tree is not None]
    # Excluded before advantages are computed: what does not train must not shift the mean that the
    # others are compared with.
    fitting, unfit = split_fitting(trees, bounds)
    excluded = [candidate.excluded for candidate in candidates if candidate.excluded] + unfit
    out = {e.execution_id for e in excluded}
    rewards = {
        candidate.execution_id: candidate.reward
        for candidate in candidates
        if candidate.execution_id not in out
    }
    advantages = group_advantages(np.asarray(list(rewards.values()), np.float64), config)
    advantage_of = dict(zip(rewards, advantages, strict=True))
    return ProcessedGroup(
        group_id=group_id,
        trees=[replace(tree, advantage=advantage_of[tree.execution_id]) for tree in fitting],
        conservation=_accounts(group_id, candidates, out),
        rewards=rewards,
        excluded=excluded,
        statuses=Counter(e.outcome.status for e in executions if e.outcome is not None),
    )


@dataclass(frozen=True)
class _Candidate:
    """An execution on its way into training.

    Attributes:
        reward: 0 for an excluded execution; it counts nowhere.
        tree: without its advantage; None for placeholders and excluded executions.
        if_trained, if_dropped: where its tokens went.
    """

    execution_id: str
    reward: float
    tree: ExecutionTree | None
    excluded: Excluded | None
    if_trained: Conservation
    if_dropped: Conservation


def _candidate(
    store: TrajectoryStore,
    execution: ExecutionRecord,
    config: ProcessorConfig,
    bounds: TrainingBounds,
) -> _Candidate:
    branches = Branches(store.nodes(execution.execution_id), store.calls(execution.execution_id))
    reward = _reward(execution)
    problem = reward if isinstance(reward, Problem) else None
    tree = None
    if_trained = if_dropped = branches.no_accounts()
    if problem is None and execution.outcome is not None and execution.outcome.status == "scored":
        tree, if_trained = _select(execution, branches, config, bounds.oldest_version)
        if not tree.trajectories and _select(execution, branches, config, None)[0].trajectories:
            problem = Problem(
                Reason.STALE,
                f"all of its tokens were sampled before weight version {bounds.oldest_version}, "
                "the oldest that training.gspo.max_staleness allows",
            )
    return _Candidate(
        execution_id=execution.execution_id,
        reward=0.0 if isinstance(reward, Problem) else reward,
        tree=None if problem else tree,
        excluded=Excluded(execution.execution_id, problem) if problem else None,
        if_trained=if_dropped if problem else if_trained,
        if_dropped=if_dropped,
    )


def _reward(execution: ExecutionRecord) -> float | Problem:
    """The reward that counts in the group, or why there is none."""
    outcome = execution.outcome
    if outcome is None or outcome.status in ("excluded", "dropped"):
        detail = {} if outcome is None else outcome.detail
        return Problem(Reason.NO_REWARD, str(detail.get("reason", "it has no outcome")))
    # SQLite keeps NaN as NULL.
    if outcome.reward is None or not np.isfinite(outcome.reward):
        shown = "NaN" if outcome.reward is None else outcome.reward
        return Problem(Reason.NON_FINITE_REWARD, f"its evaluator gave the reward {shown}")
    return float(outcome.reward)


def _accounts(group_id: str, candidates: Sequence[_Candidate], out: set[str]) -> Conservation:
    total = Conservation()
    for candidate in candidates:
        counts = candidate.if_dropped if candidate.execution_id in out else candidate.if_trained
        counts.check(f"execution {candidate.execution_id}")
        total += counts
    total.check(f"group {group_id}")
    return total


def _select(
    execution: ExecutionRecord,
    branches: Branches,
    config: ProcessorConfig,
    oldest_version: int | None,
) -> tuple[ExecutionTree, Conservation]:
    """Choose branches; the tree of their nodes, and where the tokens went."""
    trainable = branches.trainable(config, oldest_version)
    num_trainable = np.asarray([int(mask.sum()) for mask in trainable], np.int64)
    chosen, owner = select_branches(
        branches.parents,
        num_trainable,
        branches.leaves,
        branches.roles,
        config.role_priority,
        config.max_trajectories,
        # Of the execution's own name: the choice depends neither on the order nor on the company.
        np.random.default_rng(zlib.crc32(execution.execution_id.encode()) ^ (config.seed & _MASK)),
    )
    tree = _tree(execution, branches, chosen, owner, trainable)
    leaves = [branches.leaves[index] for index in chosen]
    return tree, branches.accounts(owner, num_trainable, leaves)


_MASK = 0xFFFFFFFF


def _tree(
    execution: ExecutionRecord,
    branches: Branches,
    chosen: Sequence[int],
    owner: np.ndarray,
    trainable: Sequence[np.ndarray],
) -> ExecutionTree:
    leaves = [branches.leaves[index] for index in chosen]
    kept = nodes_on_paths(leaves, branches.parents)
    place = {index: new for new, index in enumerate(kept)}
    nodes = tuple(
        _tree_node(
            branches.nodes[index],
            place.get(branches.parents[index], -1),
            trainable[index] & (owner[index] >= 0),
        )
        for index in kept
    )
    reward = execution.outcome.reward if execution.outcome else None
    return ExecutionTree(
        execution_id=execution.execution_id,
        group_id=execution.group_id,
        reward=float(reward or 0.0),
        advantage=0.0,
        nodes=nodes,
        trajectories=tuple(
            Trajectory(place[leaf], branches.roles[index])
            for leaf, index in zip(leaves, chosen, strict=True)
        ),
        owner=owner[kept] if kept else np.empty(0, np.int32),
    )


def _tree_node(node: Node, parent: int, trainable: np.ndarray) -> TreeNode:
    """Args: trainable: bool [sampled tokens]."""
    columns = token_columns(node)
    mask = columns.sampled.copy()
    mask[mask] = trainable
    return TreeNode(
        parent=parent,
        token_ids=columns.token_ids,
        trainable=mask,
        behaviour_logprobs=columns.logprobs,
        weight_versions=columns.weight_versions,
        temperatures=columns.temperatures,
        routed_experts=node.routed_experts,
    )
