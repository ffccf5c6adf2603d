"""From a recorded execution to slime's samples, and back to what was recorded.

Part of `integrations.slime`. Invariant: a sampled token trains in exactly one sample of its
execution.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import numpy as np

from gyre_megatron.errors import ConfigError
from gyre_megatron.text.renderer import Renderer
from gyre_megatron.trajectory.columns import NOT_SAMPLED
from gyre_megatron.trajectory.processor import ProcessedGroup
from gyre_megatron.trajectory.records import Outcome
from gyre_megatron.trajectory.tree import ExecutionTree, Trajectory

_RECORD = "gyre"
"""Key of a sample's metadata under which `generate` leaves what `reward` and `group_rewards` read."""


def record_of(sample: Any) -> dict[str, Any]:
    record = (sample.metadata or {}).get(_RECORD)
    if record is None:
        raise ConfigError(
            f"sample {sample.index} was not made by gyre_megatron.integrations.slime.generate; name "
            "that function under --custom-generate-function-path"
        )
    return record


def samples_of(
    sample: Any, group: ProcessedGroup, outcome: Outcome, execution_id: str, renderer: Renderer
) -> list[Any]:
    """What slime trains on: the trajectories of the execution, or a sample that trains nothing."""
    counts = execution_id in group.rewards
    record = {
        "execution": execution_id,
        "status": outcome.status if counts else "excluded",
        "reward": group.rewards.get(execution_id, 0.0),
    }
    if problems := [excluded.problem for excluded in group.excluded]:
        record["reason"] = f"{problems[0].reason}: {problems[0].detail}"
    trained = [
        _trained(_sibling(sample, record | {"role": trajectory.role}), tree, index, renderer)
        for tree in group.trees
        for index, trajectory in enumerate(tree.trajectories)
    ]
    return trained or [_untrained(_sibling(sample, record), counts, renderer)]


def _sibling(sample: Any, record: dict[str, Any]) -> Any:
    made = copy.copy(sample)
    made.metadata = {**(sample.metadata or {}), _RECORD: record}
    made.reward = record["reward"]
    known = getattr(sample, "rollout_id", None)
    made.rollout_id = sample.index if known is None else known
    return made


def _trained(made: Any, tree: ExecutionTree, index: int, renderer: Renderer) -> Any:
    columns = _branch_columns(tree, tree.trajectories[index], index)
    first = int(np.flatnonzero(columns.sampled)[0])  # the prompt is what nobody sampled
    made.tokens = columns.token_ids.tolist()
    made.response_length = len(made.tokens) - first
    made.loss_mask = columns.trained[first:].astype(int).tolist()
    made.rollout_log_probs = columns.logprobs[first:].tolist()
    made.response = renderer.tokens.decode(made.tokens[first:], skip_special=False)
    versions = columns.versions[columns.sampled].tolist()
    made.weight_versions = [str(version) for version in dict.fromkeys(versions)]
    made.remove_sample = False
    made.status = made.Status.COMPLETED
    return made


def _untrained(made: Any, counts: bool, renderer: Renderer) -> Any:
    """A prompt of one token and a masked answer of one: slime wants both to exist."""
    made.tokens = [renderer.turn_end_id] * 2
    made.response, made.response_length = "", 1
    made.loss_mask, made.rollout_log_probs = [0], [0.0]
    made.weight_versions = []
    made.remove_sample = True
    made.status = made.Status.COMPLETED if counts else made.Status.ABORTED
    return made


@dataclass(frozen=True)
class _BranchColumns:
    """A branch token by token, from its root: arrays [n]."""

    token_ids: np.ndarray
    sampled: np.ndarray
    trained: np.ndarray
    logprobs: np.ndarray
    versions: np.ndarray


def _branch_columns(tree: ExecutionTree, trajectory: Trajectory, index: int) -> _BranchColumns:
    path = tree.path(trajectory.leaf)
    nodes = [tree.nodes[node] for node in path]
    mine = [tree.owner[node] == index for node in path]
    versions = np.concatenate([node.weight_versions for node in nodes])
    return _BranchColumns(
        token_ids=np.concatenate([node.token_ids for node in nodes]),
        sampled=versions != NOT_SAMPLED,
        trained=np.concatenate([n.trainable & own for n, own in zip(nodes, mine, strict=True)]),
        logprobs=np.concatenate([node.behaviour_logprobs for node in nodes]),
        versions=versions,
    )
