"""Keeps as many executions running as the serving cells have room for.

One asyncio task per running execution; all state that matters is in the store, so a restarted
control plane goes on from there. Invariant: an execution is finished in the store exactly once.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial

from gyre_megatron.harness.runner import HarnessContext, run_execution
from gyre_megatron.trajectory.records import Outcome


class ExecutionPool:
    """Starts queued executions and watches them to their end.

    Args:
        context: store, tasks and configuration that executions share.
        room: how many executions may run now.
        on_change: called after each finish.
    """

    def __init__(
        self, context: HarnessContext, room: Callable[[], int], on_change: Callable[[], None]
    ) -> None:
        self._context = context
        self._room = room
        self._on_change = on_change
        self._running: dict[str, asyncio.Task[Outcome]] = {}
        self._failures: list[BaseException] = []
        self.harness_errors = 0

    @property
    def num_running(self) -> int:
        return len(self._running)

    def start_queued(self) -> None:
        """Start queued executions while there is room."""
        room = min(self._room(), self._context.config.harness.max_concurrent) - len(self._running)
        if room <= 0:
            return
        queued = self._context.store.executions(states=["queued"])
        for execution in [e for e in queued if e.execution_id not in self._running][:room]:
            task = asyncio.create_task(run_execution(self._context, execution.execution_id))
            self._running[execution.execution_id] = task
            task.add_done_callback(partial(self._ended, execution.execution_id))

    def raise_failures(self) -> None:
        """Re-raise what no outcome stands for: a broken store or task, never a failed rollout."""
        if self._failures:
            raise self._failures[0]

    async def stop(self) -> None:
        """End the harnesses that still run; their executions stay `running` and are queued again on
        resume."""
        tasks = list(self._running.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _ended(self, execution_id: str, task: asyncio.Task[Outcome]) -> None:
        del self._running[execution_id]
        if task.cancelled():
            return
        if (failure := task.exception()) is not None:
            self._failures.append(failure)
        else:
            harness = task.result().detail.get("harness", {})
            self.harness_errors += harness.get("ended_by") == "exit" and harness.get("code") != 0
        self._on_change()
