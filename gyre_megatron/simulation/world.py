"""The modelled world that the real scheduler drives: executions, cells and a trainer in virtual time.

`World.run` is the control loop of the runtime with events in place of processes: build the state,
`decide`, carry out, wait for what happens next. Decisions are never made here.
"""

from __future__ import annotations

import bisect
import dataclasses
import heapq
import itertools
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial

from gyre_megatron.config.scheduler import SchedulerConfig
from gyre_megatron.errors import PolicyError, StalledError
from gyre_megatron.runtime.micro_steps import MicroStepQueue
from gyre_megatron.scheduler import CellRole, SchedulerState, decide
from gyre_megatron.scheduler.durations import Durations, LoadHistory
from gyre_megatron.scheduler.orders import (
    Admit,
    Dispatch,
    Finish,
    FinishStep,
    Leave,
    Order,
    Publish,
    Return,
    Start,
    Sync,
)
from gyre_megatron.scheduler.outlook import Outlook
from gyre_megatron.simulation.accounts import Accounts
from gyre_megatron.simulation.config import CapacityLoss
from gyre_megatron.simulation.costs import Costs
from gyre_megatron.simulation.residents import NEVER
from gyre_megatron.simulation.rollout import Rollout
from gyre_megatron.simulation.workload import Executions

MAX_EVENTS_PER_EXECUTION = 400
"""A run that needs more is not going anywhere."""


class World:
    """One run of one policy.

    Args:
        config: the scheduler's own configuration.
        num_cells: cells of the prefix order.
        standalone_cells: cells that only serve; they come last.
        executions: what will be dispatched, groups in order.
        timeout_s: wall time of one execution; None never ends one.
        losses: engines that die in the course of the run.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        num_cells: int,
        standalone_cells: int,
        num_steps: int,
        executions: Executions,
        costs: Costs,
        timeout_s: float | None = None,
        losses: Sequence[CapacityLoss] = (),
    ) -> None:
        self.config = config
        self.costs = costs
        self.executions = executions
        self.num_steps = num_steps
        self.now = 0.0
        self.accounts = Accounts()
        self.roles = [CellRole.ROLLOUT] * num_cells
        self.num_cells = num_cells + standalone_cells
        self.rollout = Rollout(
            costs,
            executions,
            config.cell_capacity,
            self.num_cells,
            NEVER if timeout_s is None else timeout_s,
            self.accounts,
            self._at,
            self._execution_finished,
        )
        self._queued: deque[int] = deque()
        self._dispatched = 0
        self._started = 0
        self._finished = 0
        self._dispatch_version: dict[int, int] = {}
        self._dispatch_time: dict[int, float] = {}
        self._start_time: dict[int, float] = {}
        self._left_in_group: dict[int, int] = {}
        self._unfinished_versions: list[int] = []
        self._ready: list[tuple[int, int, int]] = []  # (version, when finished, group), ascending
        self._admitted: list[tuple[int, int, int]] = []
        self._micro_steps = MicroStepQueue()
        self._durations = Durations()
        self._loads = LoadHistory()
        self._integral_at_start: dict[int, float] = {}
        self._group_micro_steps = 0.0
        self._micro_step_s = costs.tokens_per_micro_step * costs.training_s_per_token
        full_call_s = costs.serving.call_s(config.cell_capacity)
        self._slowdown = full_call_s / costs.serving.call_s(1) - 1.0
        self._call_share = full_call_s / (full_call_s + float(executions.tool_s.mean()))
        self._working: dict[int, int] = {}
        self._cell_versions = [0] * num_cells
        self._trained_steps = 0
        self._published_steps = 0
        self._busy = False
        self._over = False
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._sequence = itertools.count()
        for loss in losses:
            self._at(loss.at_s, partial(self._lose, loss))

    def run(self, until_s: float = NEVER) -> Accounts:
        """Drive the run to its end, or to a moment at which it has lost against another one.

        Raises:
            PolicyError: the policy gave an impossible order, or nothing can happen any more.
        """
        for cell in range(self.num_cells):
            self.accounts.begin(cell, "idle", 0.0)
        budget = MAX_EVENTS_PER_EXECUTION * (len(self.executions.calls) + 100)
        while not self._over:
            self._decide_until_quiet()
            if self._over:
                break
            budget -= 1
            if budget < 0:
                raise StalledError("the run does not end: events go round in circles")
            self._next_event()
            if self.now > until_s:
                break
        self.accounts.close(self.now)
        return self.accounts

    @property
    def is_over(self) -> bool:
        """Whether every step was trained and published."""
        return self._over

    # decisions ------------------------------------------------------------------------------------

    def _decide_until_quiet(self) -> None:
        while not self._over:
            orders = decide(self.state(), self.config)
            if not orders:
                return
            for order in orders:
                self._carry_out(order)

    def state(self) -> SchedulerState:
        """What the scheduler sees."""
        capacities = self.rollout.capacities
        num_cells = len(self.roles)
        ready = self._ready_versions()
        state = SchedulerState(
            roles=tuple(self.roles),
            dispatched=self._dispatched,
            started=self._started,
            finished=self._finished,
            trained_steps=self._trained_steps,
            published_steps=self._published_steps,
            total_steps=self.num_steps,
            ready_groups=len(ready),
            ready_versions=ready,
            unfinished_versions=tuple(self._unfinished_versions),
            admitted_groups=len(self._admitted),
            open_micro_steps=self._micro_steps.num_open,
            cell_versions=tuple(self._cell_versions),
            checkpointed_steps=self.num_steps,
            busy=self._busy,
            standalone_capacity=sum(capacities[num_cells:]),
            capacities=tuple(capacities[:num_cells]),
        )
        few = len(self._durations) < self.config.executions_per_group
        if self._busy or few or self.config.policy in ("colocate", "async"):
            return state  # nobody would look at it
        return dataclasses.replace(state, outlook=self._outlook(state))

    def _carry_out(self, order: Order) -> None:
        match order:
            case Dispatch(num_groups):
                self._dispatch(num_groups)
            case Start(num_executions):
                self._start(num_executions)
            case Admit(num_groups):
                self._admit(num_groups)
            case Leave(cells):
                self._leave(cells)
            case Return(cells, _):
                self._return(cells)
            case Sync(cells, version):
                self._block(self.costs.transitions.sync_s, lambda: self._synced(cells, version))
            case FinishStep():
                self._block(self.costs.transitions.optimizer_s, self._step_done)
            case Publish():
                self._block(self.costs.transitions.publish_s, self._published)
            case Finish():
                self._over = True
            case _:
                raise PolicyError(f"the modelled world does not know the order {order}")

    def _ready_versions(self) -> tuple[int, ...]:
        """Of groups that may be admitted; without streaming none before a whole batch is there."""
        missing = self.config.groups_per_step - len(self._admitted)
        if not self.costs.streaming and len(self._ready) < missing:
            return ()
        return tuple(version for version, _, _ in self._ready)

    def _outlook(self, state: SchedulerState) -> Outlook:
        """What this world has shown so far; as little as a real run would know."""
        num_needed = state.executions_burst_needs(self.config)
        ages = [self.now - started for started in self.rollout.started_at.values()]
        return Outlook(
            micro_step_s=self._micro_step_s,
            micro_steps_per_group=self._group_micro_steps,
            leave_s=self.costs.transitions.leave_s,
            return_s=self.costs.transitions.return_s,
            execution_s=self._durations.mean(ages),
            remaining_s=self._durations.remaining(ages[:num_needed], ages),
            call_share=self._call_share,
            slowdown=self._slowdown,
            execution_load=self._durations.mean_load,
        )

    def _dispatch(self, num_groups: int) -> None:
        size = self.config.executions_per_group
        for _ in range(num_groups):
            group = self._dispatched // size
            self._dispatch_version[group] = self._published_steps
            self._dispatch_time[group] = self.now
            self._left_in_group[group] = size
            self._unfinished_versions.append(self._published_steps)
            self._queued.extend(range(group * size, (group + 1) * size))
            self._dispatched += size
        self._note_waterlevel()

    def _leave(self, cells: tuple[int, ...]) -> None:
        for cell in cells:
            self.roles[cell] = CellRole.LEAVING
            self.accounts.left(cell)
            self.accounts.begin(cell, "transition", self.now)
        self.rollout.stop_serving(cells, self.now)
        self._note_load()
        self._block(self.costs.transitions.leave_s, lambda: self._joined(cells))

    def _joined(self, cells: tuple[int, ...]) -> None:
        for cell in cells:
            self.roles[cell] = CellRole.TRAIN
            self.accounts.begin(cell, "idle", self.now)
            self._claim(cell)

    def _return(self, cells: tuple[int, ...]) -> None:
        for cell in cells:
            self.roles[cell] = CellRole.RETURNING
            self.accounts.returned(cell)
            self.accounts.begin(cell, "transition", self.now)
        if self._admitted:  # given up: the gradients are lost with the cells' roles
            self.accounts.batches_given_up += 1
            for ready in self._admitted:
                bisect.insort(self._ready, ready)
            self._admitted.clear()
        self._block(self.costs.transitions.return_s, lambda: self._serving(cells))

    def _serving(self, cells: tuple[int, ...]) -> None:
        for cell in cells:
            self.roles[cell] = CellRole.ROLLOUT
        self.rollout.serve(cells, self.now)
        self._note_load()

    def _step_done(self) -> None:
        self._trained_steps += 1
        self.accounts.step_ends.append(self.now)
        for version, _, _ in self._admitted:
            self.accounts.staleness.append(self._trained_steps - 1 - version)
        self._admitted.clear()
        self._cell_versions[0] = self._trained_steps

    def _synced(self, cells: tuple[int, ...], version: int) -> None:
        for cell in cells:
            self._cell_versions[cell] = version
            self._claim(cell)

    def _published(self) -> None:
        self._published_steps = self._trained_steps
        self._cell_versions = [self._trained_steps] * len(self.roles)
        self.rollout.void_caches(self.now)

    def _block(self, seconds: float, done: Callable[[], None]) -> None:
        """Begin a serial order; `done` when it has been carried out."""
        self._busy = True

        def finish() -> None:
            self._busy = False
            done()

        self._after(seconds, finish)

    # rollout --------------------------------------------------------------------------------------

    def _start(self, num_executions: int) -> None:
        """Start what has waited longest."""
        self._started += num_executions
        executions = [self._queued.popleft() for _ in range(num_executions)]
        self.rollout.start(executions, self.now)
        self._note_load()
        integral = self._loads.integral(self.now)
        self._integral_at_start.update(dict.fromkeys(executions, integral))

    def _execution_finished(self, execution: int, seconds: float) -> None:
        self._finished += 1
        self.accounts.execution_seconds.append(seconds)
        loaded_s = self._loads.integral(self.now) - self._integral_at_start.pop(execution)
        self._durations.add(seconds, loaded_s / seconds)
        self._note_load()
        group = execution // self.config.executions_per_group
        self._left_in_group[group] -= 1
        if self._left_in_group[group] == 0:
            self._group_finished(group)
        self._note_waterlevel()

    def _note_load(self) -> None:
        rollout = self.rollout
        capacity = sum(rollout.capacities[cell] for cell in rollout.serving_cells())
        self._loads.update(self.now, rollout.num_running, capacity)

    def _group_finished(self, group: int) -> None:
        version = self._dispatch_version[group]
        self._unfinished_versions.remove(version)
        bisect.insort(self._ready, (version, self._finished, group))
        size = self._num_micro_steps(group)
        before = self._group_micro_steps or size
        self._group_micro_steps = 0.9 * before + 0.1 * size
        self.accounts.group_seconds.append(self.now - self._dispatch_time[group])

    def _note_waterlevel(self) -> None:
        self.accounts.waterlevel.append((self.now, self._dispatched - self._finished))

    def _lose(self, loss: CapacityLoss) -> None:
        """Engines die, and may come back."""
        whole = self.config.cell_capacity
        self.rollout.set_capacity(loss.cell, int(whole * loss.share_left), self.now)
        if loss.until_s is not None:
            self._at(loss.until_s, lambda: self.rollout.set_capacity(loss.cell, whole, self.now))

    # training -------------------------------------------------------------------------------------

    def _admit(self, num_groups: int) -> None:
        """Finished groups become micro-steps."""
        for _ in range(num_groups):
            ready = self._ready.pop(0)
            self._admitted.append(ready)
            self._micro_steps.put([[b""]] * self._num_micro_steps(ready[2]))
        for cell in range(len(self.roles)):
            self._claim(cell)

    def _num_micro_steps(self, group: int) -> int:
        size = self.config.executions_per_group
        tokens = self.executions.trained_tokens[group * size : (group + 1) * size].sum()
        return max(1, round(float(tokens) / self.costs.tokens_per_micro_step))

    def _claim(self, cell: int) -> None:
        if self.roles[cell] is not CellRole.TRAIN or cell in self._working:
            return
        if self._cell_versions[cell] != self._trained_steps:
            return  # a joiner without the weights of this step
        claimed = self._micro_steps.claim(cell)
        if claimed is None:
            self.accounts.begin(cell, "idle", self.now)
            return
        self._working[cell] = claimed[0]
        self.accounts.begin(cell, "training", self.now)
        self._after(self._micro_step_s, lambda: self._micro_step_done(cell))

    def _micro_step_done(self, cell: int) -> None:
        self._micro_steps.done(self._working.pop(cell), cell)
        self._claim(cell)

    # time -----------------------------------------------------------------------------------------

    def _after(self, seconds: float, action: Callable[[], None]) -> None:
        self._at(self.now + seconds, action)

    def _at(self, when: float, action: Callable[[], None]) -> None:
        heapq.heappush(self._events, (when, next(self._sequence), action))

    def _next_event(self) -> None:
        if not self._events:
            raise StalledError(
                f"nothing can happen any more at {self.now:.0f} s: roles "
                f"{list(map(str, self.roles))}, waterlevel {self._dispatched - self._finished}, "
                f"{self._trained_steps} of {self.num_steps} steps trained"
            )
        self.now, _, action = heapq.heappop(self._events)
        action()
