"""How far the run is, in memory: counters, the queue of executions, groups that wait for training.

Owned by the store, asked by the control plane at every event, so no answer costs a query. Built
from the file when the store opens and moved by the writer thread after a commit, before the
writer's future resolves. Invariant: the ledger never says more than the file holds, and whoever was
told that a write is done sees it here.
"""

from __future__ import annotations

import sqlite3
import threading
from bisect import bisect_left, insort
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import NamedTuple

from gyre_megatron.errors import StoreError


class Counters(NamedTuple):
    """Executions ever dispatched, started at least once, and finished."""

    dispatched: int
    started: int
    finished: int


@dataclass
class _Group:
    """What the ledger keeps of a group.

    Attributes:
        first_execution: row of its first execution: groups that finished at the same time keep the
            order of their dispatch.
        finished_at: when its last execution so far finished.
    """

    first_execution: int
    weight_version: int
    num_unfinished: int
    finished_at: float = 0.0
    trained_step: int | None = None


_ReadyKey = tuple[int, float, int, str]
"""Order in which finished groups are trained, those of the oldest weights first: (weight version,
end of the last execution, first row, group id)."""


class Ledger:
    """Progress of one run. Reads from any thread; moved by one thread, the writer's."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counters = Counters(0, 0, 0)
        self._groups: dict[str, _Group] = {}
        # Ordered dictionaries drop their first entry in constant time; a plain one scans the gap.
        self._queued: OrderedDict[str, int] = OrderedDict()
        self._running: dict[str, int] = {}
        self._ready: list[_ReadyKey] = []
        self._unfinished_versions: list[int] = []

    @classmethod
    def load(cls, connection: sqlite3.Connection) -> Ledger:
        """The ledger of what the file holds now."""
        ledger = cls()
        for row in connection.execute(_GROUPS):
            group_id, first, version, num_executions, num_started, num_finished, at, step = row
            group = _Group(first, version, num_executions - num_finished, at, step)
            ledger._groups[group_id] = group
            ledger._count(num_executions, num_started, num_finished)
            ledger._offer(group_id, group)
            if group.num_unfinished:
                insort(ledger._unfinished_versions, version)
        for execution_id, row, state in connection.execute(_OPEN_EXECUTIONS):
            (ledger._queued if state == "queued" else ledger._running)[execution_id] = row
        return ledger

    # answers ------------------------------

    @property
    def counters(self) -> Counters:
        """Executions ever (dispatched, started, finished)."""
        return self._counters  # one immutable object, replaced whole: no lock needed

    @property
    def num_groups(self) -> int:
        """Groups ever dispatched."""
        return len(self._groups)

    @property
    def num_queued(self) -> int:
        """Executions that wait to be started."""
        return len(self._queued)

    def queued(self, limit: int | None = None) -> list[str]:
        """Ids of executions that wait to be started, in the order of their dispatch."""
        with self._lock:
            return list(islice(self._queued, limit))

    @property
    def num_ready(self) -> int:
        """Groups that have finished and were not trained."""
        with self._lock:  # an end counts in `counters` a moment before its group is offered here
            return len(self._ready)

    def ready_groups(self) -> list[str]:
        """Groups that have finished and were not trained: of the oldest weights first, and of those
        the earliest finish."""
        with self._lock:
            return [group_id for _, _, _, group_id in self._ready]

    @property
    def unfinished_versions(self) -> tuple[int, ...]:
        """Weight versions under which the unfinished groups were dispatched, ascending."""
        with self._lock:
            return tuple(self._unfinished_versions)

    def weight_version(self, group_id: str) -> int:
        """Version of the weights that served when the group was dispatched.

        Raises:
            StoreError: there is no such group.
        """
        if (group := self._groups.get(group_id)) is None:
            raise StoreError(f"no group {group_id!r} in the ledger")
        return group.weight_version

    # what was committed ------------------------------

    def group_added(
        self, group_id: str, weight_version: int, executions: Sequence[tuple[str, int]]
    ) -> None:
        """A group was dispatched; `executions` are its (execution id, row)."""
        with self._lock:
            self._groups[group_id] = _Group(executions[0][1], weight_version, len(executions))
            insort(self._unfinished_versions, weight_version)
            self._queued.update(executions)
            self._count(dispatched=len(executions))

    def execution_started(self, execution_id: str, attempt: int) -> None:
        """A queued execution runs."""
        with self._lock:
            self._running[execution_id] = self._queued.pop(execution_id)
            self._count(started=attempt == 1)

    def execution_finished(self, execution_id: str, group_id: str, finished_at: float) -> None:
        """A running execution ended."""
        with self._lock:
            del self._running[execution_id]
            self._count(finished=1)
            group = self._groups[group_id]
            group.num_unfinished -= 1
            group.finished_at = max(group.finished_at, finished_at)
            if group.num_unfinished == 0:
                self._unfinished_versions.remove(group.weight_version)
            self._offer(group_id, group)

    def running_requeued(self) -> None:
        """All running executions wait again, each in its old place."""
        with self._lock:
            waiting = self._queued | self._running
            self._queued = OrderedDict(sorted(waiting.items(), key=lambda item: item[1]))
            self._running.clear()

    def groups_trained(self, group_ids: Iterable[str], step: int) -> None:
        """The groups were trained in `step`."""
        with self._lock:
            for group_id in group_ids:
                group = self._groups[group_id]
                self._withdraw(group_id, group)
                group.trained_step = step

    def rolled_back(self, step: int) -> None:
        """Groups trained after `step` wait for training again."""
        with self._lock:
            for group_id, group in self._groups.items():
                if group.trained_step is not None and group.trained_step > step:
                    group.trained_step = None
                    self._offer(group_id, group)

    # inner ------------------------------

    def _count(self, dispatched: int = 0, started: int = 0, finished: int = 0) -> None:
        now = self._counters
        self._counters = Counters(
            now.dispatched + dispatched, now.started + started, now.finished + finished
        )

    def _offer(self, group_id: str, group: _Group) -> None:
        if group.num_unfinished == 0 and group.trained_step is None:
            insort(self._ready, _key(group_id, group))

    def _withdraw(self, group_id: str, group: _Group) -> None:
        key = _key(group_id, group)
        place = bisect_left(self._ready, key)
        if place < len(self._ready) and self._ready[place] == key:
            del self._ready[place]


def _key(group_id: str, group: _Group) -> _ReadyKey:
    return group.weight_version, group.finished_at, group.first_execution, group_id


_GROUPS = """
SELECT group_id, min(execution), weight_version, count(*), sum(attempt > 0),
       sum(state = 'finished'), coalesce(max(finished_at), 0.0), trained_step
FROM groups JOIN executions USING(group_id) GROUP BY group_id
"""

_OPEN_EXECUTIONS = """
SELECT execution_id, execution, state FROM executions WHERE state != 'finished' ORDER BY execution
"""
