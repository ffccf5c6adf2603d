"""Rows of the trajectory store, as plain values.

A *node* is a run of tokens hung under a parent: context (rendered messages) or sampled (the
generation prompt followed by what the policy produced). A *call* is one request of a harness; it
owns exactly one sampled node.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

NO_PARENT = -1

ExecutionState = Literal["queued", "running", "finished"]
OutcomeStatus = Literal["scored", "excluded", "placeholder", "dropped"]
CallState = Literal["complete", "undelivered", "superseded"]


@dataclass(frozen=True)
class Outcome:
    """How an execution ended.

    Attributes:
        status: scored (reward counts), excluded (the evaluator failed for good), placeholder
            (nothing to evaluate: reward 0, no tokens train) or dropped (the overall timeout
            passed).
        reward: In [0, 1]; None unless scored or placeholder.
        detail: Anything worth reading later: exit code, timings, evaluator report.
    """

    status: OutcomeStatus
    reward: float | None = None
    detail: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class ExecutionRecord:
    """One attempt of a query by a harness."""

    execution_id: str
    group_id: str
    position: int
    state: ExecutionState
    attempt: int
    outcome: Outcome | None
    started_at: float | None
    finished_at: float | None


@dataclass(frozen=True)
class GroupRecord:
    """A query and the executions that are compared with each other."""

    group_id: str
    query: dict[str, Any]
    num_executions: int
    weight_version: int
    trained_step: int | None


@dataclass
class Node:
    """A run of tokens; only its own.

    Attributes:
        key: Digest of the message (or answer) in normal form; with the parent it locates the node.
        token_ids: int32 [n].
        num_context: Leading tokens that were not sampled; equals n for a context node.
        logprobs: float32 [n - num_context].
        versions: (weight version, count) runs over the sampled tokens.
        temperature: Of the sampled tokens.
        routed_experts: int16 [n, layers, k] or None.
        call_id: The call that sampled it; "" for context.
        start: Tokens on the path before this node.
    """

    node_id: int
    parent: int
    key: bytes
    token_ids: np.ndarray
    num_context: int
    logprobs: np.ndarray
    versions: tuple[tuple[int, int], ...] = ()
    temperature: float = 1.0
    routed_experts: np.ndarray | None = None
    call_id: str = ""
    start: int = 0
    persisted: bool = False

    @property
    def end(self) -> int:
        """Tokens on the path up to and with this node."""
        return self.start + len(self.token_ids)

    @property
    def sampled(self) -> bool:
        """Whether a call produced this node."""
        return bool(self.call_id)


@dataclass(frozen=True)
class Call:
    """One request of a harness that was answered in full."""

    call_id: str
    execution_id: str
    attempt: int
    node_id: int
    dialect: str
    role: str
    state: CallState
    finish_reason: str
    num_prompt_tokens: int
    num_reused_tokens: int
    num_output_tokens: int
    started_at: float
    finished_at: float
    meta: dict[str, Any] = field(default_factory=dict)
