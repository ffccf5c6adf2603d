"""The control plane: one asyncio process that owns proxy, store, scheduler and queue, and orders
the cells.

Read `ControlPlane.run` first: it is the whole system in twenty lines. Decisions come from
`scheduler.decide`; this module builds the state it decides on and carries its orders out.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Coroutine
from functools import partial
from typing import Any

from gyre_megatron.config.loader import GyreConfig
from gyre_megatron.engines.router import Router
from gyre_megatron.errors import CellError, ParityError
from gyre_megatron.harness.runner import HarnessContext
from gyre_megatron.harness.tasks import TaskSet
from gyre_megatron.observe.journal import Journal
from gyre_megatron.runtime import protocol
from gyre_megatron.runtime.batch import BatchBuilder
from gyre_megatron.runtime.cell_board import CellBoard
from gyre_megatron.runtime.executions import ExecutionPool
from gyre_megatron.runtime.micro_steps import MicroStepQueue
from gyre_megatron.runtime.run_directory import RunDirectory
from gyre_megatron.scheduler import (
    Dispatch,
    Finish,
    FinishStep,
    Leave,
    Order,
    Publish,
    Return,
    Role,
    SchedulerState,
    decide,
)
from gyre_megatron.trajectory.store import TrajectoryStore


class ControlPlane:
    """Runs one training run from the first dispatch to the last publication."""

    def __init__(
        self,
        config: GyreConfig,
        directory: RunDirectory,
        store: TrajectoryStore,
        router: Router,
        tasks: TaskSet,
        journal: Journal,
        ranks_per_cell: int,
        trained_steps: int,
        base_url: str,
    ) -> None:
        self.config = config
        self.directory = directory
        self.store = store
        self.router = router
        self.tasks = tasks
        self.journal = journal
        self.trained_steps = self.published_steps = trained_steps
        self.micro_steps = MicroStepQueue()
        model_ranks = config.training.min_ranks
        self.batches = BatchBuilder(
            store, config, self.micro_steps, cell_dp=ranks_per_cell // model_ranks
        )
        cluster = config.cluster
        self.cells = CellBoard(
            cluster.num_cells,
            self.micro_steps,
            cluster.order_poll_s,
            2 * cluster.collective_timeout_s,
            self._micro_step_trained,
        )
        context = HarnessContext(store, tasks, config.rollout, base_url)
        self.executions = ExecutionPool(context, self._room, self._wake)
        self._task_order = random.Random(config.run.seed).sample(list(tasks), len(tasks))
        self._cell_versions = [trained_steps] * cluster.num_cells
        self._changed = asyncio.Event()
        self._transition: asyncio.Task[None] | None = None
        self._finished = False

    async def run(self) -> None:
        """The control loop.

        Raises:
            CellError: a cell failed, fell silent or never started.
            ParityError: trainer and engine disagree on log-probabilities.
        """
        await self._wait_for_cells()
        while not self._finished:
            self._changed.clear()
            await self._admit_ready_groups()
            self.executions.start_queued()
            orders = decide(self.state(), self.config.scheduler)
            for order in orders:
                await self._carry_out(order)
            if not orders:
                await self._next_change()
            self.executions.raise_failures()

    def state(self) -> SchedulerState:
        """A snapshot for the scheduler."""
        dispatched, started, finished = self.store.counters()
        return SchedulerState(
            roles=tuple(self.cells.roles),
            dispatched=dispatched,
            started=started,
            finished=finished,
            trained_steps=self.trained_steps,
            published_steps=self.published_steps,
            total_steps=self.config.run.num_steps,
            ready_groups=len(self.batches.ready_groups()),
            admitted_groups=len(self.batches.batch.group_ids),
            open_micro_steps=self.micro_steps.num_open,
        )

    # orders ------------------------------

    async def _carry_out(self, order: Order) -> None:
        match order:
            case Dispatch(num_groups):
                self._dispatch(num_groups)
            case Leave(cell):
                self._start_transition(cell, Role.LEAVING, self._leave(cell))
            case Return(cell):
                self._start_transition(cell, Role.RETURNING, self._return(cell))
            case FinishStep(prefix):
                await self._finish_step(prefix)
            case Publish():
                await self._publish()
            case Finish():
                self._finished = True

    def _dispatch(self, num_groups: int) -> None:
        first = len(self.store.groups())
        for index in range(first, first + num_groups):
            query = self.tasks[self._task_order[index % len(self._task_order)]].query()
            num_executions = self.config.scheduler.executions_per_group
            self.store.add_group(f"g{index:06d}", query, num_executions, self.published_steps)

    async def _leave(self, cell: int) -> None:
        """Rollout -> training: calls move to other cells first, then the engine's memory goes to
        the trainer."""
        self.router.set_serving(cell, False)
        await self.router.drain(cell)
        await self.cells.order([cell], partial(protocol.Join, step=self.trained_steps + 1))
        if self._cell_versions[cell] != self.trained_steps:
            await self._sync(prefix=cell + 1)
        self._set_role(cell, Role.TRAIN)

    async def _return(self, cell: int) -> None:
        """Training -> rollout: the engine takes its memory back and the published weights, then
        calls come in."""
        reports = await self.cells.order(
            [cell], partial(protocol.Serve, version=self.published_steps)
        )
        self._check_parity(reports)
        self.router.set_serving(cell, True)
        self._set_role(cell, Role.ROLLOUT)

    async def _sync(self, prefix: int) -> None:
        """Bring the trainers of cells 0..prefix-1 to the core's weights in the middle of a
        burst."""
        make = partial(protocol.Sync, prefix=prefix, version=self.trained_steps)
        await self.cells.order(range(prefix), make)
        for cell in range(prefix):
            self._cell_versions[cell] = self.trained_steps

    async def _finish_step(self, prefix: int) -> None:
        step = self.trained_steps + 1
        make = partial(
            protocol.FinishStep, step=step, prefix=prefix, skip=self.batches.batch.num_bins == 0
        )
        reports = await self.cells.order(range(prefix), make)
        self.store.mark_trained(self.batches.batch.group_ids, step)
        self.trained_steps = self._cell_versions[0] = step
        by_cell = dict(self.micro_steps.done_by_cell)
        self.journal.step(
            step, self.batches.next_step(), reports[0].metrics, by_cell, self.status()
        )
        if prefix > 1 and step < self.state().burst_end(self.config.scheduler):
            await self._sync(prefix)

    async def _publish(self) -> None:
        """End of a burst: the core's weights go to every trainer, and into the engines that
        serve."""
        version = self.trained_steps
        roles = list(self.cells.roles)
        serving = [cell for cell, role in enumerate(roles) if role is Role.ROLLOUT]
        orders = {
            cell: partial(protocol.Publish, version=version, install=cell in serving)
            for cell in range(len(roles))
        }
        reports = await self.cells.order_each(orders)
        self._check_parity(reports)
        self._cell_versions = [version] * len(roles)
        self.published_steps = version
        self.journal.published(version, max(report.seconds for report in reports.values()))
        await self._checkpoint_if_due()

    async def _checkpoint_if_due(self) -> None:
        run, step = self.config.run, self.trained_steps
        last = self.directory.latest_checkpoint()
        due = (
            run.checkpoint_interval > 0
            and step - (last.step if last else 0) >= run.checkpoint_interval
        )
        if not due and step < run.num_steps:
            return
        staging = self.directory.staging_for(step)
        await self.cells.order([0], partial(protocol.Checkpoint, directory=str(staging)))
        dispatched, started, finished = self.store.counters()
        counters = {"dispatched": dispatched, "started": started, "finished": finished}
        await asyncio.to_thread(
            self.directory.commit_checkpoint, step, counters, run.keep_checkpoints
        )

    # inner ------------------------------

    async def _wait_for_cells(self) -> None:
        registered = asyncio.ensure_future(self.cells.all_registered.wait())
        timeout = self.config.cluster.start_timeout_s
        await asyncio.wait(
            (registered, self.cells.failure), timeout=timeout, return_when="FIRST_COMPLETED"
        )
        if self.cells.failure.done():
            raise CellError(self.cells.failure.result())
        if not registered.done():
            missing = sorted(set(range(len(self.cells.roles))) - set(self.cells.registrations))
            raise CellError(
                f"cells {missing} did not start within cluster.start_timeout_s={timeout} s; see "
                "logs/"
            )
        for cell, registration in sorted(self.cells.registrations.items()):
            self._check_gap(cell, registration.logprob_gap)
            self.router.add_engine(
                cell, registration.engine_url, self.config.scheduler.cell_capacity
            )
        self.router.set_preference(
            range(len(self.cells.roles) - 1, -1, -1)
        )  # later cells serve longest
        self.journal.roles(self.cells.roles, self.state().waterlevel)

    async def _admit_ready_groups(self) -> None:
        """The core trains what has finished while the rest still runs."""
        missing = self.config.scheduler.groups_per_step - len(self.batches.batch.group_ids)
        if (
            self.cells.roles[0] is not Role.TRAIN
            or missing == 0
            or self.trained_steps == self.config.run.num_steps
        ):
            return
        for group_id in self.batches.ready_groups()[:missing]:
            await self.batches.admit(group_id, self.trained_steps)
        await self.cells.wake()

    def _room(self) -> int:
        """Executions that may run now: what the serving cells hold."""
        serving = sum(role is Role.ROLLOUT for role in self.cells.roles)
        return serving * self.config.scheduler.cell_capacity

    def _start_transition(
        self, cell: int, through: Role, transition: Coroutine[Any, Any, None]
    ) -> None:
        self._set_role(cell, through)
        self._transition = asyncio.create_task(transition)
        self._transition.add_done_callback(lambda _: self._wake())

    def _set_role(self, cell: int, role: Role) -> None:
        self.cells.roles[cell] = role
        self.journal.roles(self.cells.roles, self.state().waterlevel)
        self._wake()

    def _wake(self) -> None:
        self.journal.waterlevel(self.store.counters())
        self._changed.set()

    def _micro_step_trained(self, metrics: dict[str, float]) -> None:
        self.batches.batch.micro_step_metrics.update(metrics)
        self._wake()

    async def _next_change(self) -> None:
        changed = asyncio.ensure_future(self._changed.wait())
        waits: list[asyncio.Future[Any]] = [changed, self.cells.failure]
        waits += [self._transition] if self._transition is not None else []
        await asyncio.wait(waits, return_when="FIRST_COMPLETED")
        changed.cancel()
        if self.cells.failure.done():
            raise CellError(self.cells.failure.result())
        if self._transition is not None and self._transition.done():
            finished, self._transition = self._transition, None
            finished.result()

    def _check_parity(self, reports: dict[int, protocol.Report]) -> None:
        for cell, report in reports.items():
            if "logprob_gap" in report.metrics:
                self._check_gap(cell, report.metrics["logprob_gap"])

    def _check_gap(self, cell: int, gap: float) -> None:
        self.journal.logprob_gap(gap)
        limit = self.config.run.logprob_gap_limit
        if not gap <= limit:
            raise ParityError(
                f"cell {cell}: trainer and engine differ by {gap:.3g} nats on the same tokens, "
                f"run.logprob_gap_limit is {limit:g}; the weights or the numerics of the two "
                "differ "
                "(dtype, attention backend, router)"
            )

    def status(self) -> dict[str, Any]:
        """What the status page shows."""
        state = self.state()
        return {
            "step": self.trained_steps,
            "num_steps": self.config.run.num_steps,
            "weight_version": self.published_steps,
            "waterlevel": state.waterlevel,
            "dispatched": state.dispatched,
            "started": state.started,
            "finished": state.finished,
            "running": self.executions.num_running,
            "roles": [str(role) for role in state.roles],
            "ready_groups": state.ready_groups,
            "admitted_groups": state.admitted_groups,
            "open_micro_steps": state.open_micro_steps,
            "rerouted_calls": self.router.rerouted_calls,
            "lost_calls": self.router.lost_calls,
            "harness_errors": self.executions.harness_errors,
            **self.journal.totals(),
        }
