"""What a run has measured of itself, for policies that weigh a move's gain against its cost.

Fed by the control plane's parts as things end; asked once a decision. Invariant: nothing here is
ever read by anything but the scheduler, so a wrong estimate can cost time, never correctness.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from gyre_megatron.scheduler.durations import Durations, LoadHistory
from gyre_megatron.scheduler.orders import Leave, Return, SerialOrder
from gyre_megatron.scheduler.outlook import Outlook

KEEP = 0.8
"""Weight of what was known before in a running mean: a few observations outweigh a start-up."""
FIRST_GUESS_S = 1.0
"""Of a move that has not been made yet."""


class RunningMean:
    """A mean that forgets; None before the first value."""

    def __init__(self) -> None:
        self.value: float | None = None

    def add(self, value: float) -> None:
        """Take one observation in."""
        self.value = value if self.value is None else KEEP * self.value + (1 - KEEP) * value

    def or_else(self, default: float) -> float:
        """The mean, or `default` before the first value."""
        return default if self.value is None else self.value


class Measurements:
    """Durations of executions, micro-steps, groups and moves.

    Args:
        clock: seconds, monotonic.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._durations = Durations()
        self._loads = LoadHistory()
        self._started: dict[str, tuple[float, float]] = {}  # (when, integral of load), oldest first
        self._micro_step_s = RunningMean()
        self._group_micro_steps = RunningMean()
        self._leave_s = RunningMean()
        self._return_s = RunningMean()
        self._execution_s = 0.0
        self._call_s = 0.0

    def execution_started(self, execution_id: str) -> None:
        """A harness runs from now on."""
        now = self._clock()
        self._started[execution_id] = (now, self._loads.integral(now))

    def execution_ended(self, execution_id: str) -> None:
        """Its execution has ended, however."""
        now = self._clock()
        started, integral = self._started.pop(execution_id)
        seconds = now - started
        load = (self._loads.integral(now) - integral) / seconds if seconds > 0 else 0.0
        self._durations.add(seconds, load)
        self._execution_s += seconds

    def load(self, running: int, capacity: int) -> None:
        """From now on `running` executions use the `capacity` of the cells that serve."""
        self._loads.update(self._clock(), running, capacity)

    def call_ended(self, seconds: float) -> None:
        """A call has spent `seconds` on an engine."""
        self._call_s += seconds

    def micro_step(self, seconds: float) -> None:
        """A cell has trained a micro-step."""
        self._micro_step_s.add(seconds)

    def group_admitted(self, num_micro_steps: int) -> None:
        """A group was packed into so many micro-steps."""
        self._group_micro_steps.add(num_micro_steps)

    def order_done(self, order: SerialOrder, seconds: float) -> None:
        """Cells have carried an order out."""
        if isinstance(order, Leave):
            self._leave_s.add(seconds)
        elif isinstance(order, Return):
            self._return_s.add(seconds)

    def outlook(self, slowdown: float, num_needed: int) -> Outlook | None:
        """What is known now; None before an execution has ended and a micro-step was trained.

        Args:
            slowdown: of engines under load, as the router has measured it.
            num_needed: executions that the burst in progress lacks.
        """
        if not len(self._durations) or self._micro_step_s.value is None:
            return None
        now = self._clock()
        elapsed = [now - started for started, _ in self._started.values()]
        # Calls of executions that still run count in full, so the share is an upper bound.
        total = self._execution_s + sum(elapsed)
        return Outlook(
            micro_step_s=self._micro_step_s.value,
            micro_steps_per_group=self._group_micro_steps.or_else(1.0),
            leave_s=self._leave_s.or_else(FIRST_GUESS_S),
            return_s=self._return_s.or_else(FIRST_GUESS_S),
            execution_s=self._durations.mean(elapsed),
            remaining_s=self._durations.remaining(elapsed[:num_needed], elapsed),
            call_share=min(self._call_s / total, 1.0) if total else 0.0,
            slowdown=slowdown,
            execution_load=self._durations.mean_load,
        )
