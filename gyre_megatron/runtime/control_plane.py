"""The control plane: one asyncio process that owns proxy, store, scheduler and queue, and orders
the cells.

Read `ControlPlane.run` first: it is the whole system in ten lines. Decisions come from
`scheduler.decide`; this module builds the state it decides on and begins what it says; what an
order means is in `actions`.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Coroutine
from typing import Any

from gyre_megatron.errors import CellError
from gyre_megatron.runtime.actions import Actions, RunParts
from gyre_megatron.runtime.executions import ExecutionPool
from gyre_megatron.runtime.micro_steps import MicroStepQueue
from gyre_megatron.scheduler import SchedulerState, decide
from gyre_megatron.scheduler.orders import Admit, Dispatch, Finish, Order, Start


class ControlPlane:
    """Runs one training run from the first dispatch to the last publication.

    Args:
        parts: what the run is made of.
        executions: harnesses that run.
        micro_steps: what cells in training claim.
        changed: set by every part when something happened that may change a decision.
    """

    def __init__(
        self,
        parts: RunParts,
        executions: ExecutionPool,
        micro_steps: MicroStepQueue,
        changed: asyncio.Event,
    ) -> None:
        self.parts = parts
        self.executions = executions
        self.micro_steps = micro_steps
        self.actions = Actions(parts)
        self._changed = changed
        self._serial: asyncio.Task[None] | None = None
        self._admission: asyncio.Task[None] | None = None
        self._finished = False
        parts.cells.failure.add_done_callback(lambda _: changed.set())

    async def run(self) -> None:
        """The control loop.

        Raises:
            CellError: a cell failed, fell silent or never started.
            ParityError: trainer and engine disagree on log-probabilities.
            PolicyError: the scheduler's policy made the run impossible to go on with.
        """
        await self._wait_for_cells()
        while not self._finished:
            # Cleared before anything is looked at: what happens from here on is seen next time.
            self._changed.clear()
            self._collect_ended()
            state = self.state()
            self.parts.journal.waterlevel(state.waterlevel)
            orders = decide(state, self.parts.config.scheduler)
            for order in orders:
                self._begin(order)
            if not orders:
                await self._changed.wait()

    def check(self) -> None:
        """Make the first decision without carrying it out: a resumed run that the scheduler cannot
        go on with is refused before an engine starts.

        Raises:
            PolicyError: the run cannot go on with these settings.
        """
        decide(self.state(), self.parts.config.scheduler)

    def state(self) -> SchedulerState:
        """A snapshot for the scheduler."""
        parts = self.parts
        run = parts.run
        dispatched, started, finished = parts.store.counters()
        ready = parts.batch.ready_versions
        state = SchedulerState(
            roles=tuple(run.roles),
            dispatched=dispatched,
            started=started,
            finished=finished,
            trained_steps=run.trained_steps,
            published_steps=run.published_steps,
            total_steps=parts.config.run.num_steps,
            ready_groups=len(ready),
            ready_versions=ready,
            unfinished_versions=parts.store.unfinished_versions,
            admitted_groups=parts.batch.num_admitted,
            open_micro_steps=self.micro_steps.num_open,
            batch_has_bins=parts.batch.record.num_bins > 0,
            running=self.executions.num_running,
            max_running=parts.config.rollout.harness.max_concurrent,
            cell_versions=tuple(run.cell_versions),
            checkpointed_steps=run.checkpointed_steps,
            checkpoint_interval=parts.config.run.checkpoint_interval,
            admitting=self._admission is not None,
            busy=self._serial is not None,
        )
        scheduler = parts.config.scheduler
        parts.measurements.load(state.num_running, state.serving_capacity(scheduler))
        if state.busy:  # no policy is asked while a serial order is carried out
            return state
        slowdown = parts.router.load_profile.slowdown
        num_needed = state.executions_burst_needs(scheduler)
        outlook = parts.measurements.outlook(slowdown, num_needed)
        return dataclasses.replace(state, outlook=outlook)

    def _begin(self, order: Order) -> None:
        """Begin an order. Never waits, so that nothing happens between the orders of one
        decision."""
        match order:
            case Dispatch():
                self.actions.dispatch(order)
            case Start(num_executions):
                self.executions.start(num_executions)
            case Admit():
                self._admission = self._task(self.actions.admit(order))
            case Finish():
                self._finished = True
            case _:
                self._serial = self._task(self.actions.serial(order))

    def _task(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        task.add_done_callback(lambda _: self._changed.set())
        return task

    # inner ------------------------------

    def _collect_ended(self) -> None:
        """Forget background work that is done; a failure of it, or of a cell, ends the run."""
        failure = self.parts.cells.failure
        if failure.done():
            raise CellError(failure.result())
        if self._serial is not None and self._serial.done():
            ended = self._serial
            self._serial = None
            ended.result()
        if self._admission is not None and self._admission.done():
            ended = self._admission
            self._admission = None
            ended.result()
        self.executions.raise_failures()

    async def _wait_for_cells(self) -> None:
        parts = self.parts
        cells = parts.cells
        registered = asyncio.ensure_future(cells.all_registered.wait())
        timeout = parts.config.cluster.start_timeout_s
        await asyncio.wait(
            (registered, cells.failure), timeout=timeout, return_when="FIRST_COMPLETED"
        )
        if cells.failure.done():
            raise CellError(cells.failure.result())
        if not registered.done():
            missing = sorted(set(range(cells.num_cells)) - set(cells.registrations))
            raise CellError(
                f"cells {missing} did not start within cluster.start_timeout_s={timeout} s; see "
                "logs/"
            )
        for cell, registration in sorted(cells.registrations.items()):
            self.actions.check_gap(cell, registration.logprob_gap)
            capacity = parts.config.scheduler.cell_capacity
            parts.router.add_engine(cell, registration.engine_url, capacity)
        # Later cells leave last, so a call that moves there is least likely to move again.
        parts.router.set_preference(range(cells.num_cells - 1, -1, -1))
        parts.journal.cells_ready(parts.run.roles)

    async def stop(self, reason: str) -> None:
        """End what runs: background work, harnesses, then the cells; `reason` is empty after a run
        that went well."""
        background = [task for task in (self._serial, self._admission) if task is not None]
        for task in background:
            task.cancel()
        await asyncio.gather(*background, return_exceptions=True)
        await self.executions.stop()
        self.parts.cells.stop(reason)

    def status(self) -> dict[str, Any]:
        """What the status page shows."""
        state = self.state()
        return {
            "step": state.trained_steps,
            "num_steps": state.total_steps,
            "weight_version": state.published_steps,
            "waterlevel": state.waterlevel,
            "dispatched": state.dispatched,
            "started": state.started,
            "finished": state.finished,
            "running": state.num_running,
            "roles": [str(role) for role in state.roles],
            "ready_groups": state.ready_groups,
            "admitted_groups": state.admitted_groups,
            "open_micro_steps": state.open_micro_steps,
            **self.parts.journal.totals(),
        }
