"""What each order means in the world: one method per order, no decisions.

`ControlPlane` calls these with what `scheduler.decide` returned. Orders that concern cells go to
the board as they are; around them stand the things that only the control plane can do: routes,
counters, records. Invariant: the run's state changes only after the cells have reported.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Coroutine
from dataclasses import dataclass
from typing import Any

from gyre_megatron.config.loader import GyreConfig
from gyre_megatron.engines.router import Router
from gyre_megatron.errors import ParityError
from gyre_megatron.harness.tasks import TaskSet
from gyre_megatron.observe.journal import Journal
from gyre_megatron.runtime.batch import BatchBuilder
from gyre_megatron.runtime.cell_board import CellBoard
from gyre_megatron.runtime.measurements import Measurements
from gyre_megatron.runtime.protocol import INSTALL_SECONDS, LOGPROB_GAP, TRANSFER_SECONDS, Report
from gyre_megatron.runtime.run_directory import RunDirectory
from gyre_megatron.runtime.run_state import RunState
from gyre_megatron.scheduler import CellRole
from gyre_megatron.scheduler.orders import (
    Admit,
    Checkpoint,
    Dispatch,
    FinishStep,
    Leave,
    Publish,
    Return,
    SerialOrder,
    Sync,
)
from gyre_megatron.trajectory.store import TrajectoryStore


@dataclass(frozen=True)
class RunParts:
    """What a run is made of, built once by `service.compose`.

    Attributes:
        run: roles, versions and steps.
        directory: files and checkpoints.
        store: executions and their trajectories.
        tasks: the queries.
        router: where calls go.
        cells: orders and reports.
        batch: the step in progress.
        journal: what a person sees.
        measurements: what the scheduler's policy weighs moves by.
    """

    config: GyreConfig
    run: RunState
    directory: RunDirectory
    store: TrajectoryStore
    tasks: TaskSet
    router: Router
    cells: CellBoard
    batch: BatchBuilder
    journal: Journal
    measurements: Measurements


class Actions:
    """Carries orders out on the parts of a run."""

    def __init__(self, parts: RunParts) -> None:
        self._parts = parts
        config, tasks = parts.config, parts.tasks
        self._task_order = random.Random(config.run.seed).sample(list(tasks), len(tasks))

    def serial(self, order: SerialOrder) -> Coroutine[Any, Any, None]:
        """Begin an order that takes time; the rest of it is returned as a coroutine.

        Raises (the coroutine):
            CellError: a cell failed or fell silent.
            ParityError: trainer and engine disagree on log-probabilities.
        """
        match order:
            case Leave():
                # Before anything else runs: a cell on its way out has no room for executions.
                for cell in order.cells:
                    self._set_role(cell, CellRole.LEAVING)
                return self._leave(order)
            case Return():
                if self._parts.batch.num_admitted:
                    self._parts.batch.give_up()
                for cell in order.cells:
                    self._set_role(cell, CellRole.RETURNING)
                return self._return(order)
            case Sync():
                return self._sync(order)
            case FinishStep():
                return self._finish_step(order)
            case Publish():
                return self._publish(order)
            case Checkpoint():
                return self._checkpoint(order)

    # executions ------------------------------

    def dispatch(self, order: Dispatch) -> None:
        """Write new groups of queued executions into the store."""
        parts = self._parts
        num_executions = parts.config.scheduler.executions_per_group
        num_dispatched, _, _ = parts.store.counters()
        first = num_dispatched // num_executions
        for index in range(first, first + order.num_groups):
            query = parts.tasks[self._task_order[index % len(self._task_order)]].query()
            version = parts.run.published_steps
            parts.store.add_group(f"g{index:06d}", query, num_executions, version)

    async def admit(self, order: Admit) -> None:
        """Turn finished groups into micro-steps; cells claim those of the first while the second is
        packed."""
        parts = self._parts
        for _ in range(order.num_groups):
            num_micro_steps = await parts.batch.admit_next(parts.run.trained_steps)
            parts.measurements.group_admitted(num_micro_steps)
            parts.cells.wake()

    # roles ------------------------------

    async def _leave(self, order: Leave) -> None:
        parts = self._parts
        started = time.monotonic()
        # Calls first: an engine must be idle before its memory is released. No cell of the order
        # takes a call of another one.
        for cell in order.cells:
            parts.router.set_serving(cell, False)
        await asyncio.gather(*(parts.router.drain(cell) for cell in order.cells))
        await parts.cells.order(order.cells, order)
        parts.measurements.order_done(order, time.monotonic() - started)
        for cell in order.cells:
            self._set_role(cell, CellRole.TRAIN)

    async def _return(self, order: Return) -> None:
        parts = self._parts
        started = time.monotonic()
        reports = await parts.cells.order(order.cells, order)
        self._installed(reports)
        parts.measurements.order_done(order, time.monotonic() - started)
        # Calls last: until here the engines held no weights, or weights nobody had checked.
        for cell in order.cells:
            parts.router.set_serving(cell, True)
            self._set_role(cell, CellRole.ROLLOUT)

    def _set_role(self, cell: int, role: CellRole) -> None:
        parts = self._parts
        parts.run.roles[cell] = role
        parts.journal.roles(parts.run.roles)
        parts.cells.wake()  # a cell that trains from now on may claim

    # weights ------------------------------

    async def _sync(self, order: Sync) -> None:
        parts = self._parts
        cells = parts.cells
        helped = tuple(c for c in order.cells if not cells.registrations[c].pulls)
        alone = tuple(c for c in order.cells if c not in helped)
        orders = []
        if alone:
            orders.append(cells.order(alone, Sync(alone, order.version)))
        if helped:  # the core stops its micro-steps for these only
            orders.append(cells.order((0, *helped), Sync(helped, order.version)))
        await asyncio.gather(*orders)
        for cell in order.cells:
            parts.run.cell_versions[cell] = order.version
        parts.cells.wake()

    async def _finish_step(self, order: FinishStep) -> None:
        parts = self._parts
        reports = await parts.cells.order(range(order.prefix), order)
        parts.store.mark_trained(parts.batch.record.group_ids, order.step)
        parts.run.trained_steps = order.step
        parts.run.cell_versions[0] = order.step
        parts.journal.step(order.step, parts.batch.next_step(), reports[0].metrics)

    async def _publish(self, order: Publish) -> None:
        parts = self._parts
        reports = await parts.cells.order(range(parts.cells.num_cells), order)
        transfer_seconds = max(r.metrics[TRANSFER_SECONDS] for r in reports.values())
        parts.journal.published(order.version, transfer_seconds)
        self._installed(reports)
        parts.run.cell_versions[:] = [order.version] * parts.cells.num_cells
        parts.run.published_steps = order.version

    async def _checkpoint(self, order: Checkpoint) -> None:
        parts = self._parts
        parts.directory.make_staging(order.step)
        await parts.cells.order([0], order)
        dispatched, started, finished = parts.store.counters()
        counters = {"dispatched": dispatched, "started": started, "finished": finished}
        keep = parts.config.run.keep_checkpoints
        await asyncio.to_thread(parts.directory.commit_checkpoint, order.step, counters, keep)
        parts.run.checkpointed_steps = order.step

    # parity ------------------------------

    def _installed(self, reports: dict[int, Report]) -> None:
        """Record what cells report that put weights into their engine, and check them."""
        for cell, report in reports.items():
            if INSTALL_SECONDS in report.metrics:
                self._parts.journal.installed(report.metrics[INSTALL_SECONDS])
                self.check_gap(cell, report.metrics[LOGPROB_GAP])

    def check_gap(self, cell: int, gap: float) -> None:
        """Refuse an engine that gives other log-probabilities than its trainer.

        Raises:
            ParityError: the gap is above the limit, or no number.
        """
        self._parts.journal.logprob_gap(gap)
        limit = self._parts.config.run.logprob_gap_limit
        if not gap <= limit:  # also where the gap is NaN
            raise ParityError(
                f"cell {cell}: trainer and engine differ by {gap:.3g} nats on the same tokens, "
                f"run.logprob_gap_limit is {limit:g}; the weights or the numerics of the two "
                "differ (dtype, attention backend, router)"
            )
