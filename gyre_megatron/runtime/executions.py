"""Keeps as many executions running as the serving cells have room for.

One asyncio task per running execution; all state that matters is in the store, so a restarted control plane
goes on from there. Invariant: an execution is finished in the store exactly once.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from gyre_megatron.config.rollout import RolloutConfig
from gyre_megatron.rollout.tasks import TaskSet
from gyre_megatron.trajectory.store import TrajectoryStore


class ExecutionPool:
    """Starts queued executions and records how they end.

    Args:
        store: where executions are queued.
        tasks: what a query's name stands for.
        base_url: address of the proxy, given to harnesses.
        workspaces: directory for workspaces.
        room: how many executions may run now.
        on_change: called after each start and finish.
    """

    def __init__(
        self,
        store: TrajectoryStore,
        tasks: TaskSet,
        config: RolloutConfig,
        base_url: str,
        workspaces: Path,
        room: Callable[[], int],
        on_change: Callable[[], None],
    ) -> None:
        self._store = store
        self._tasks = tasks
        self._config = config
        self._base_url = base_url
        self._workspaces = workspaces
        self._room = room
        self._on_change = on_change
        self._running: dict[str, asyncio.Task[None]] = {}
        self.harness_errors = 0
        self.statuses: Counter[str] = Counter()

    @property
    def num_running(self) -> int:
        return len(self._running)
