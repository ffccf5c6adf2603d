"""The modelled world that the real scheduler drives: executions, cells and a trainer in virtual time.

`World.run` is the control loop of the runtime with events in place of processes: build the state,
`decide`, carry out, wait for what happens next. Decisions are never made here.
"""

from __future__ import annotations

import heapq
import itertools
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from gyre_megatron.config.scheduler import SchedulerConfig
from gyre_megatron.errors import PolicyError
from gyre_megatron.runtime.micro_steps import MicroStepQueue
from gyre_megatron.scheduler import CellRole, SchedulerState, decide
from gyre_megatron.scheduler.durations import Durations
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
from gyre_megatron.simulation.config import TransitionConfig
from gyre_megatron.simulation.residents import NEVER, Residents
from gyre_megatron.simulation.serving import ServingModel
from gyre_megatron.simulation.workload import Executions

MAX_EVENTS_PER_EXECUTION = 400
"""A run that needs more is not going anywhere."""


@dataclass(frozen=True)
class Costs:
    """What the modelled cluster charges.

    Attributes:
        serving: of one cell.
        training_s_per_token: one cell, one packed token.
        tokens_per_micro_step: packed tokens of one micro-step.
        transitions: of roles and boundaries.
        move_s: seconds that a moved execution loses, from its context in tokens.
        streaming: training starts on finished groups while others run.
    """

    serving: ServingModel
    training_s_per_token: float
    tokens_per_micro_step: int
    transitions: TransitionConfig
    move_s: Callable[[float], float]
    streaming: bool = True


class World:
    """One run of one policy.

    Args:
        config: the scheduler's own configuration.
        num_cells: cells of the prefix order.
        standalone_cells: cells that only serve; they come last.
        executions: what will be dispatched, groups in order.
        timeout_s: wall time of one execution; None never ends one.
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
    ) -> None:
        self.config = config
        self.costs = costs
        self.executions = executions
        self.num_steps = num_steps
        self.now = 0.0
        self.accounts = Accounts()
        self.roles = [CellRole.ROLLOUT] * num_cells
        self._timeout_s = NEVER if timeout_s is None else timeout_s
        self._cells = [Residents(costs.serving) for _ in range(num_cells + standalone_cells)]
        self._stamps = [-1] * len(self._cells)
        self._running: set[int] = set()
        self._queued: deque[int] = deque()
        self._dispatched = 0
        self._started = 0
        self._finished = 0
        self._dispatch_version: dict[int, int] = {}
        self._dispatch_time: dict[int, float] = {}
        self._start_time: dict[int, float] = {}
        self._left_in_group: dict[int, int] = {}
        self._ready: deque[int] = deque()
        self._admitted: list[int] = []
        self._micro_steps = MicroStepQueue()
        self._durations = Durations()
        self._group_micro_steps = 0.0
        self._micro_step_s = costs.tokens_per_micro_step * costs.training_s_per_token
        full_call_s = costs.serving.call_s(config.cell_capacity)
        self._slowdown = full_call_s / costs.serving.call_s(1) - 1.0
        self._call_share = full_call_s / (full_call_s + float(executions.tool_s.mean()))
        self._working: dict[int, int] = {}
        self._claims_since_leave = [0] * num_cells
        self._cell_versions = [0] * num_cells
        self._trained_steps = 0
        self._published_steps = 0
        self._busy = False
        self._over = False
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._sequence = itertools.count()

    def run(self) -> Accounts:
        """Drive the run to its end.

        Raises:
            PolicyError: the policy gave an impossible order, or nothing can happen any more.
        """
        for cell in range(len(self._cells)):
            self.accounts.begin(cell, "idle", 0.0)
        budget = MAX_EVENTS_PER_EXECUTION * (len(self.executions.calls) + 100)
        while not self._over:
            self._decide_until_quiet()
            if self._over:
                break
            budget -= 1
            if budget < 0:
                raise PolicyError("the run does not end: events go round in circles")
            self._next_event()
        self.accounts.close(self.now)
        return self.accounts

    @property
    def num_cells_serving(self) -> int:
        """Cells that serve now, standalone ones included."""
        return sum(self._is_serving(cell) for cell in range(len(self._cells)))

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
        return SchedulerState(
            roles=tuple(self.roles),
            dispatched=self._dispatched,
            started=self._started,
            finished=self._finished,
            trained_steps=self._trained_steps,
            published_steps=self._published_steps,
            total_steps=self.num_steps,
            ready_groups=self._num_ready(),
            admitted_groups=len(self._admitted),
            open_micro_steps=self._micro_steps.num_open,
            cell_versions=tuple(self._cell_versions),
            checkpointed_steps=self.num_steps,
            busy=self._busy,
            standalone_capacity=(len(self._cells) - len(self.roles)) * self.config.cell_capacity,
            outlook=None if self._busy else self._outlook(),
        )

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

    def _num_ready(self) -> int:
        """Groups that may be admitted; without streaming none before a whole batch is there."""
        missing = self.config.groups_per_step - len(self._admitted)
        if not self.costs.streaming and len(self._ready) < missing:
            return 0
        return len(self._ready)

    def _outlook(self) -> Outlook | None:
        """What this world has shown so far; as little as a real run would know."""
        if len(self._durations) < self.config.executions_per_group:
            return None
        return Outlook(
            micro_step_s=self._micro_step_s,
            micro_steps_per_group=self._group_micro_steps,
            leave_s=self.costs.transitions.leave_s,
            return_s=self.costs.transitions.return_s,
            execution_s=self._durations.mean,
            remaining_s=self._durations.remaining(
                [self.now - self._start_time[e] for e in self._running]
            ),
            call_share=self._call_share,
            slowdown=self._slowdown,
        )

    def _dispatch(self, num_groups: int) -> None:
        size = self.config.executions_per_group
        for _ in range(num_groups):
            group = self._dispatched // size
            self._dispatch_version[group] = self._published_steps
            self._dispatch_time[group] = self.now
            self._left_in_group[group] = size
            self._queued.extend(range(group * size, (group + 1) * size))
            self._dispatched += size
        self._note_waterlevel()

    def _leave(self, cells: tuple[int, ...]) -> None:
        for cell in cells:
            self.roles[cell] = CellRole.LEAVING
        self.accounts.leaves += len(cells)
        for cell in cells:
            self._claims_since_leave[cell] = 0
            self._move_away(cell)
            self.accounts.begin(cell, "transition", self.now)
        self._block(self.costs.transitions.leave_s, lambda: self._joined(cells))

    def _joined(self, cells: tuple[int, ...]) -> None:
        for cell in cells:
            self.roles[cell] = CellRole.TRAIN
            self.accounts.begin(cell, "idle", self.now)
            self._claim(cell)

    def _return(self, cells: tuple[int, ...]) -> None:
        for cell in cells:
            self.roles[cell] = CellRole.RETURNING
            self.accounts.returns += 1
            self.accounts.useless_trips += self._claims_since_leave[cell] == 0
            self.accounts.begin(cell, "transition", self.now)
        self._block(self.costs.transitions.return_s, lambda: self._serving(cells))

    def _serving(self, cells: tuple[int, ...]) -> None:
        for cell in cells:
            self.roles[cell] = CellRole.ROLLOUT
            residents = self._cells[cell]
            residents.advance(self.now)
            residents.halt(False)
            self.accounts.begin(cell, "serving" if len(residents) else "idle", self.now)
            self._expect_finish(cell)

    def _step_done(self) -> None:
        self._trained_steps += 1
        self.accounts.step_ends.append(self.now)
        for group in self._admitted:
            version = self._dispatch_version[group]
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
        for cell, residents in enumerate(self._cells):
            if len(residents):
                self._void_cache(cell)

    def _block(self, seconds: float, done: Callable[[], None]) -> None:
        """Begin a serial order; `done` when it has been carried out."""
        self._busy = True

        def finish() -> None:
            self._busy = False
            done()

        self._after(seconds, finish)

    # rollout --------------------------------------------------------------------------------------

    def _is_serving(self, cell: int) -> bool:
        return cell >= len(self.roles) or self.roles[cell] is CellRole.ROLLOUT

    def _start(self, num_executions: int) -> None:
        """Start what has waited longest, each on the cell with most room."""
        serving = [cell for cell in range(len(self._cells)) if self._is_serving(cell)]
        demand = self.executions
        for _ in range(num_executions):
            cell = min(serving, key=lambda c: len(self._cells[c]))
            execution = self._queued.popleft()
            self._started += 1
            self._start_time[execution] = self.now
            deadline = self.now + self._timeout_s
            self._place(
                execution, cell, demand.calls[execution], demand.tool_s[execution], deadline
            )

    def _place(
        self, execution: int, cell: int, calls: float, tool_s: float, deadline: float
    ) -> None:
        residents = self._cells[cell]
        residents.advance(self.now)
        residents.add(execution, calls, tool_s, deadline)
        self._running.add(execution)
        self.accounts.begin(cell, "serving", self.now)
        self._expect_finish(cell)

    def _move_away(self, cell: int) -> None:
        """Calls of a leaving cell go on elsewhere, to cells that will serve longest."""
        residents = self._cells[cell]
        residents.advance(self.now)
        if not any(self._is_serving(other) for other in range(len(self._cells))):
            residents.halt(True)  # nobody serves: its calls wait until it does again
            self._expect_finish(cell)
            return
        for execution in residents.ids.tolist():
            calls, tool_s, deadline = residents.remove(execution)
            destination = self._destination(cell)
            lost = self.costs.move_s(float(self.executions.context_tokens[execution]))
            target = self._cells[destination]
            calls += lost / target.cycle_s(tool_s, len(target) + 1)
            self.accounts.recomputed_s += lost
            self.accounts.moved_executions += 1
            self._place(execution, destination, calls, tool_s, deadline)
        self._expect_finish(cell)  # voids the finish that was expected here

    def _destination(self, leaving: int) -> int:
        """The cell that serves longest among those with room, else the emptiest."""
        serving = [c for c in range(len(self._cells)) if c != leaving and self._is_serving(c)]
        room = [c for c in serving if len(self._cells[c]) < self.config.cell_capacity]
        candidates = room or serving
        fewest = min(len(self._cells[c]) for c in candidates)
        return max(c for c in candidates if len(self._cells[c]) == fewest)

    def _void_cache(self, cell: int) -> None:
        """New weights: every resident's prefix is computed again."""
        residents = self._cells[cell]
        residents.advance(self.now)
        contexts = [float(self.executions.context_tokens[e]) for e in residents.ids.tolist()]
        lost = sum(self.costs.serving.recompute_s(context) for context in contexts)
        residents.delay(lost / len(contexts))
        self.accounts.recomputed_s += lost
        self._expect_finish(cell)

    def _expect_finish(self, cell: int) -> None:
        when, execution = self._cells[cell].next_finish()
        stamp = self._stamps[cell] = next(self._sequence)
        if when < NEVER:
            self._at(when, lambda: self._maybe_finished(cell, execution, stamp))

    def _maybe_finished(self, cell: int, execution: int, stamp: int) -> None:
        if self._stamps[cell] != stamp:
            return  # somebody came or went since; a later event knows better
        residents = self._cells[cell]
        residents.advance(self.now)
        residents.remove(execution)
        self._running.remove(execution)
        self._finished += 1
        seconds = self.now - self._start_time[execution]
        self.accounts.execution_seconds.append(seconds)
        self._durations.add(seconds)
        if not len(residents):
            self.accounts.begin(cell, "idle", self.now)
        self._expect_finish(cell)
        group = execution // self.config.executions_per_group
        self._left_in_group[group] -= 1
        if self._left_in_group[group] == 0:
            self._ready.append(group)
            size = self._num_micro_steps(group)
            before = self._group_micro_steps or size
            self._group_micro_steps = 0.9 * before + 0.1 * size
            self.accounts.group_seconds.append(self.now - self._dispatch_time[group])
        self._note_waterlevel()

    def _note_waterlevel(self) -> None:
        self.accounts.waterlevel.append((self.now, self._dispatched - self._finished))

    # training -------------------------------------------------------------------------------------

    def _admit(self, num_groups: int) -> None:
        """Finished groups become micro-steps."""
        for _ in range(num_groups):
            group = self._ready.popleft()
            self._admitted.append(group)
            self._micro_steps.put([[b""]] * self._num_micro_steps(group))
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
        self._claims_since_leave[cell] += 1
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
            raise PolicyError(
                f"nothing can happen any more at {self.now:.0f} s: roles "
                f"{list(map(str, self.roles))}, waterlevel {self._dispatched - self._finished}, "
                f"{self._trained_steps} of {self.num_steps} steps trained"
            )
        self.now, _, action = heapq.heappop(self._events)
        action()
