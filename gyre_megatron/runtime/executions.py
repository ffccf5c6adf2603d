"""The executions whose harness runs now.

One asyncio task per running execution; all state that matters is in the store, so a restarted
control plane goes on from there. The scheduler says how many to start. Invariant: an execution is
finished in the store exactly once.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial

from gyre_megatron.errors import StoreError
from gyre_megatron.harness.runner import HarnessContext, run_execution
from gyre_megatron.observe.timeline import TotalName
from gyre_megatron.runtime.measurements import Measurements
from gyre_megatron.trajectory.records import Outcome


class ExecutionPool:
    """Starts queued executions and watches them to their end.

    Args:
        context: store, tasks and configuration that executions share.
        count: called with "harness_errors" for each harness that failed by itself.
        on_change: called after each end.
        measurements: told of starts and ends.
    """

    def __init__(
        self,
        context: HarnessContext,
        count: Callable[[TotalName], None],
        on_change: Callable[[], None],
        measurements: Measurements,
    ) -> None:
        self._measurements = measurements
        self._context = context
        self._count = count
        self._on_change = on_change
        self._running: dict[str, asyncio.Task[Outcome]] = {}
        self._failures: list[BaseException] = []

    @property
    def num_running(self) -> int:
        return len(self._running)

    def start(self, num_executions: int) -> None:
        """Start the executions that have waited longest.

        Raises:
            StoreError: fewer are queued.
        """
        # An execution stays queued in the store until its task has run for the first time, so the
        # first ones may be on their way already.
        queued = self._context.store.queued(limit=num_executions + self.num_running)
        waiting = [execution_id for execution_id in queued if execution_id not in self._running]
        if len(waiting) < num_executions:
            raise StoreError(
                f"{num_executions} executions were to be started, {len(waiting)} are queued"
            )
        for execution_id in waiting[:num_executions]:
            task = asyncio.create_task(run_execution(self._context, execution_id))
            self._running[execution_id] = task
            self._measurements.execution_started(execution_id)
            task.add_done_callback(partial(self._ended, execution_id))

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
        self._measurements.execution_ended(execution_id)
        if task.cancelled():
            return
        if (failure := task.exception()) is not None:
            self._failures.append(failure)
        else:
            harness = task.result().detail.get("harness", {})
            if harness.get("ended_by") == "exit" and harness.get("code") != 0:
                self._count("harness_errors")
        self._on_change()
