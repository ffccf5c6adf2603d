"""Forests of the executions that are calling now, kept in memory within a budget.

A forest that is not in use is dropped, oldest first, and read again from the store when its
execution calls again.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from gyre_megatron.trajectory.forest import Forest
from gyre_megatron.trajectory.store import TrajectoryStore

_BYTES_PER_TOKEN = 4  # int32 ids; few are sampled and hold a log-probability besides
_BYTES_PER_NODE = 700  # measured: the object, its index entries and small arrays


@dataclass(eq=False)
class Session:
    """One attempt of an execution that talks to the proxy."""

    execution_id: str
    attempt: int
    forest: Forest
    num_users: int = 0

    @property
    def num_bytes(self) -> int:
        """Estimated memory."""
        return _BYTES_PER_TOKEN * self.forest.num_tokens + _BYTES_PER_NODE * len(self.forest)


class Sessions:
    """Sessions by (execution, attempt), least recently used first."""

    def __init__(self, store: TrajectoryStore, budget_mib: int) -> None:
        self._store = store
        self._budget = budget_mib << 20
        self._sessions: OrderedDict[tuple[str, int], Session] = OrderedDict()

    @contextmanager
    def use(self, execution_id: str, attempt: int) -> Iterator[Session]:
        """The session, held in memory while it is used."""
        session = self._get(execution_id, attempt)
        session.num_users += 1
        try:
            yield session
        finally:
            session.num_users -= 1
            self._shrink()

    def _get(self, execution_id: str, attempt: int) -> Session:
        key = (execution_id, attempt)
        if key not in self._sessions:
            nodes = self._store.nodes(*key)
            calls = self._store.calls(*key)
            self._sessions[key] = Session(*key, Forest(self._store.new_node_id, nodes, calls))
        self._sessions.move_to_end(key)
        return self._sessions[key]

    def _shrink(self) -> None:
        total = sum(session.num_bytes for session in self._sessions.values())
        for key in list(self._sessions):
            if total <= self._budget:
                break
            if self._sessions[key].num_users == 0:
                total -= self._sessions.pop(key).num_bytes
