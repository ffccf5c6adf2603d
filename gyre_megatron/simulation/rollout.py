"""The rollout half of the modelled world: which execution lives on which cell, and how it moves.

Invariant: an execution lives on a cell that serves as long as there is one; with none it stays where
it is and waits.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence

from gyre_megatron.simulation.accounts import Accounts
from gyre_megatron.simulation.costs import Costs
from gyre_megatron.simulation.residents import NEVER, Resident, Residents
from gyre_megatron.simulation.workload import Executions

Schedule = Callable[[float, Callable[[], None]], None]


class Rollout:
    """Executions on cells in virtual time.

    Args:
        capacity: executions that a whole cell serves.
        num_cells: cells, standalone ones included; all serve at first.
        timeout_s: wall time of one execution.
        schedule: calls a function at a virtual time.
        finished: told of every execution that ends, and its wall time.

    Attributes:
        capacities: executions that each cell serves at this moment.
    """

    def __init__(
        self,
        costs: Costs,
        executions: Executions,
        capacity: int,
        num_cells: int,
        timeout_s: float,
        accounts: Accounts,
        schedule: Schedule,
        finished: Callable[[int, float], None],
    ) -> None:
        self.capacities = [capacity] * num_cells
        self.started_at: dict[int, float] = {}
        """Of the executions that run, by number."""
        self._costs = costs
        self._executions = executions
        self._capacity = capacity
        self._timeout_s = timeout_s
        self._accounts = accounts
        self._schedule = schedule
        self._finished = finished
        self._cells = [Residents(costs.serving) for _ in range(num_cells)]
        self._serving = [True] * num_cells
        self._stamps = [-1] * num_cells
        self._sequence = itertools.count()

    def is_serving(self, cell: int) -> bool:
        """Whether calls can go there now."""
        return self._serving[cell] and self.capacities[cell] > 0

    def serving_cells(self) -> list[int]:
        """Cells to which calls can go now."""
        return [cell for cell in range(len(self._cells)) if self.is_serving(cell)]

    @property
    def num_running(self) -> int:
        """Executions that have started and not ended."""
        return len(self.started_at)

    # executions come and end ----------------------------------------------------------------------

    def start(self, executions: Iterable[int], now: float) -> None:
        """Start executions, each on the cell that is least full."""
        demand = self._executions
        residents = []
        for execution in executions:
            self.started_at[execution] = now
            residents.append(
                Resident(
                    execution,
                    float(demand.calls[execution]),
                    float(demand.tool_s[execution]),
                    now + self._timeout_s,
                )
            )
        self._place(residents, now)

    def _place(self, residents: Sequence[Resident], now: float, moved: bool = False) -> None:
        """Each to the cell that is least full; of equals the last, which serves longest."""
        serving = self.serving_cells()
        for cell in serving:
            self._cells[cell].advance(now)
        touched = set()
        for resident in residents:
            cell = min(serving, key=lambda c: (len(self._cells[c]) / self.capacities[c], -c))
            target = self._cells[cell]
            if moved:
                resident = self._charged(resident, target)
            target.add(resident)
            touched.add(cell)
        for cell in touched:
            self._accounts.begin(cell, "serving", now)
            self._expect_finish(cell)

    def _charged(self, resident: Resident, target: Residents) -> Resident:
        """The same execution, its prefix computed again where it has moved to."""
        context = float(self._executions.context_tokens[resident.execution])
        lost_s = self._costs.move_s(context)
        self._accounts.recomputed_s += lost_s
        self._accounts.moved_executions += 1
        cycle_s = target.cycle_s(resident.tool_s, len(target) + 1)
        return resident._replace(calls=resident.calls + lost_s / cycle_s)

    def _expect_finish(self, cell: int) -> None:
        when, execution = self._cells[cell].next_finish()
        stamp = self._stamps[cell] = next(self._sequence)
        if when < NEVER:
            self._schedule(when, lambda: self._maybe_finished(cell, execution, stamp, when))

    def _maybe_finished(self, cell: int, execution: int, stamp: int, now: float) -> None:
        if self._stamps[cell] != stamp:
            return  # somebody came or went since; a later event knows better
        residents = self._cells[cell]
        residents.advance(now)
        residents.remove(execution)
        if not len(residents):
            self._accounts.begin(cell, "idle", now)
        self._expect_finish(cell)
        self._finished(execution, now - self.started_at.pop(execution))

    # cells come and go ----------------------------------------------------------------------------

    def stop_serving(self, cells: Iterable[int], now: float) -> None:
        """Cells leave rollout; their executions go on elsewhere."""
        for cell in cells:
            self._serving[cell] = False
        self._rehouse(now)

    def serve(self, cells: Iterable[int], now: float) -> None:
        """Cells are back in rollout."""
        for cell in cells:
            self._serving[cell] = True
            self._accounts.begin(cell, "serving" if len(self._cells[cell]) else "idle", now)
        self._rehouse(now)

    def set_capacity(self, cell: int, capacity: int, now: float) -> None:
        """Engines of a cell died or came back: it serves `capacity` executions from now on."""
        self.capacities[cell] = capacity
        residents = self._cells[cell]
        residents.advance(now)
        if capacity:
            residents.crowd(self._capacity / capacity)
        self._rehouse(now)

    def _rehouse(self, now: float) -> None:
        """Executions of cells that do not serve move to cells that do."""
        somewhere = bool(self.serving_cells())
        homeless: list[Resident] = []
        for cell, residents in enumerate(self._cells):
            residents.advance(now)
            serves = self.is_serving(cell)
            if somewhere and not serves and len(residents):
                homeless += residents.remove_all()
                if self._serving[cell]:  # its engines are dead; else the world says what it does
                    self._accounts.begin(cell, "idle", now)
            residents.run(serves)
            self._expect_finish(cell)
        if homeless:
            self._place(homeless, now, moved=True)

    def void_caches(self, now: float) -> None:
        """New weights: every prefix is computed again."""
        for cell, residents in enumerate(self._cells):
            if not len(residents):
                continue
            residents.advance(now)
            contexts = [float(self._executions.context_tokens[e]) for e in residents.ids]
            lost_s = sum(self._costs.serving.recompute_s(context) for context in contexts)
            residents.delay(lost_s / len(contexts))
            self._accounts.recomputed_s += lost_s
            self._expect_finish(cell)

    def num_residents(self, cell: int) -> int:
        """Executions that live on a cell."""
        return len(self._cells[cell])
