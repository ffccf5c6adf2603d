"""Which executions training can take, and why it cannot take the others.

Pure. Called by the processor before advantages are computed and denominators fixed: an execution
that is excluded here counts nowhere (not in its group's mean, not among the executions that share
the loss). Everything that `pack` would refuse is found here first, so that one odd execution costs
itself and not the run.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

import numpy as np

from gyre_megatron.config.training import TrainingConfig
from gyre_megatron.trajectory.paths import nodes_on_paths
from gyre_megatron.trajectory.tree import ExecutionTree, TreeNode


class Reason(StrEnum):
    """Why an execution is excluded: the name it is counted under."""

    NO_REWARD = "no_reward"
    """The evaluator failed for good, the overall timeout passed, or the run itself was at fault."""
    NON_FINITE_REWARD = "non_finite_reward"
    NON_FINITE_LOGPROBS = "non_finite_logprobs"
    GREEDY_SAMPLING = "greedy_sampling"
    NO_PROMPT = "no_prompt"
    STALE = "stale"
    """Everything it sampled is older than max_staleness allows."""
    TRAJECTORY_TOO_LONG = "trajectory_too_long"
    EXECUTION_TOO_LARGE = "execution_too_large"


@dataclass(frozen=True)
class Problem:
    """What is wrong with an execution: counted by `reason`, explained by `detail`."""

    reason: Reason
    detail: str


@dataclass(frozen=True)
class Excluded:
    """An execution that does not train."""

    execution_id: str
    problem: Problem

    def __str__(self) -> str:
        return (
            f"execution {self.execution_id} is excluded from training ({self.problem.reason}): "
            f"{self.problem.detail}"
        )


@dataclass(frozen=True)
class TrainingBounds:
    """What training takes.

    Attributes:
        token_budget: unique tokens of one bin; None: no bound.
        keep_executions_whole: an execution must fit one bin (the execution-level ratio).
        oldest_version: tokens sampled by older weights take no gradient; None: all do.
    """

    token_budget: int | None = None
    keep_executions_whole: bool = False
    oldest_version: int | None = None

    @classmethod
    def of(cls, training: TrainingConfig, weight_version: int) -> TrainingBounds:
        """The bounds of a configuration.

        Args:
            weight_version: version in training when the group is admitted.
        """
        staleness = training.gspo.max_staleness
        return cls(
            token_budget=training.token_budget,
            keep_executions_whole=training.gspo.ratio_level == "execution",
            oldest_version=None if staleness is None else weight_version - staleness,
        )


def split_fitting(
    trees: Sequence[ExecutionTree], bounds: TrainingBounds
) -> tuple[list[ExecutionTree], list[Excluded]]:
    """The trees that training can take, and the others with the reason."""
    fitting: list[ExecutionTree] = []
    excluded: list[Excluded] = []
    for tree in trees:
        problem = find_problem(tree, bounds)
        if problem is None:
            fitting.append(tree)
        else:
            excluded.append(Excluded(tree.execution_id, problem))
    return fitting, excluded


def find_problem(tree: ExecutionTree, bounds: TrainingBounds) -> Problem | None:
    """Why a tree cannot be trained; None if it can."""
    ends: list[int] = []
    for node in tree.nodes:
        ends.append((ends[node.parent] if node.parent >= 0 else 0) + len(node))
    for index, node in tree.trained_nodes():
        if problem := untrainable(node, starts_path=ends[index] == len(node)):
            return problem
    return _too_large(tree, ends, bounds)


def untrainable(node: TreeNode, starts_path: bool) -> Problem | None:
    """Why the trainable tokens of a node cannot carry a loss; None if they can.

    Args:
        starts_path: no token precedes the node.
    """
    if starts_path and len(node) and node.trainable[0]:
        return Problem(
            Reason.NO_PROMPT,
            "the first token of a path is marked trainable, but nothing comes before it to predict "
            "it; a sampled token needs a prompt",
        )
    temperatures = node.temperatures[node.trainable]
    if not (temperatures > 0).all():
        return Problem(
            Reason.GREEDY_SAMPLING,
            f"a sampling temperature of {temperatures.min()} must be positive: greedy calls have "
            "no behaviour log-probability and cannot be trained; set rollout.sampling.temperature",
        )
    num_broken = int((~np.isfinite(node.behaviour_logprobs[node.trainable])).sum())
    if num_broken:
        return Problem(
            Reason.NON_FINITE_LOGPROBS,
            f"{num_broken} behaviour log-probabilities of a call are not finite; one would make "
            "every gradient of the step NaN",
        )
    return None


def _too_large(tree: ExecutionTree, ends: list[int], bounds: TrainingBounds) -> Problem | None:
    if bounds.token_budget is None:
        return None
    owners = {int(tree.owner[n]) for n, node in tree.trained_nodes() if node.trainable.any()}
    leaves = [tree.trajectories[j].leaf for j in owners]
    longest = max((ends[leaf] for leaf in leaves), default=0)
    if longest > bounds.token_budget:
        return Problem(
            Reason.TRAJECTORY_TOO_LONG,
            f"a trajectory has {longest} tokens but training.token_budget is "
            f"{bounds.token_budget}; raise training.token_budget (or training.cp with it)",
        )
    if not bounds.keep_executions_whole:
        return None
    total = sum(len(tree.nodes[n]) for n in nodes_on_paths(leaves, tree.parents))
    if total > bounds.token_budget:
        return Problem(
            Reason.EXECUTION_TOO_LARGE,
            f"its trajectories have {total} unique tokens, which the execution-level ratio needs "
            f"in one bin, but training.token_budget is {bounds.token_budget}; raise "
            "training.token_budget or set training.gspo.ratio_level to 'trajectory'",
        )
    return None
