"""Stores filled by hand: executions whose trees a test can draw on paper."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

import numpy as np

from gyre_megatron.trajectory.forest import Forest
from gyre_megatron.trajectory.records import Call, Node, Outcome
from gyre_megatron.trajectory.store import TrajectoryStore


class TreeBuilder:
    """Adds nodes and calls to one running execution."""

    def __init__(self, store: TrajectoryStore, execution_id: str) -> None:
        self.store, self.execution_id = store, execution_id
        self.token = store.start_execution(execution_id)
        self.attempt = store.execution(execution_id).attempt
        self.forest = Forest(store.new_node_id)
        self._count = 0

    def context(self, parent: Node | None, num_tokens: int) -> Node:
        """Rendered tokens."""
        self._count += 1
        return self.forest.add_context(
            parent, b"c%d" % self._count, np.arange(num_tokens, dtype=np.int32)
        )

    def call(
        self,
        parent: Node,
        num_sampled: int,
        role: str = "main",
        state: str = "complete",
        finish: str = "stop",
        lead: int = 2,
        logprob: float = -0.5,
        temperature: float = 0.75,
        versions: tuple[tuple[int, int], ...] | None = None,
    ) -> Node:
        """An answer of `num_sampled` tokens after `lead` tokens of generation prompt, stored at
        once.

        Args:
            versions: (weight version, count) runs of the sampled tokens; version 3 by default.
        """
        self._count += 1
        node = Node(
            node_id=self.store.new_node_id(),
            parent=parent.node_id,
            key=b"s%d" % self._count,
            token_ids=np.arange(lead + num_sampled, dtype=np.int32) + 100 * self._count,
            num_context=lead,
            logprobs=np.full(num_sampled, logprob, np.float32),
            versions=versions or (((3, num_sampled),) if num_sampled else ()),
            temperature=temperature,
            call_id=f"{self.execution_id}-{self.attempt}-{self._count:04d}",
            start=parent.end,
        )
        if state == "complete":
            self.forest.add_sampled(node)
        now = time.time()
        call = Call(
            node.call_id,
            self.execution_id,
            self.attempt,
            node.node_id,
            "anthropic",
            role,
            state,
            finish,
            parent.end + lead,
            0,
            num_sampled,
            now,
            now,
        )
        nodes = [*self.forest.unsaved(parent), node]
        self.store.add_call(call, nodes).result()
        for stored in nodes:
            stored.persisted = True
        return node

    def finish(self, reward: float | None, status: str = "scored") -> None:
        """End the execution."""
        self.store.finish_execution(self.execution_id, Outcome(status, reward))


def open_store(folder: Path) -> TrajectoryStore:
    """A fresh store."""
    return TrajectoryStore(folder / "store.db")


def as_plain(node: Node) -> Node:
    """A node in a form that compares by value."""
    return replace(
        node,
        token_ids=tuple(node.token_ids.tolist()),
        logprobs=tuple(node.logprobs.tolist()),
        persisted=True,
    )
