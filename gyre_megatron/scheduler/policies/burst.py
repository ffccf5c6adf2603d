"""What the burst in progress still takes, by the number of cells that train: the estimate behind
every move of the policy gyre.

A burst is served until its groups are there, and what then is left of training is done by as many
cells as suits. With lag, executions of later bursts run meanwhile; what they gain is credited in
seconds that all cells would take for it.
"""

from __future__ import annotations

import math

from gyre_megatron.config.scheduler import SchedulerConfig
from gyre_megatron.scheduler.outlook import Outlook
from gyre_megatron.scheduler.state import SchedulerState

NEVER = float("inf")
ALMOST = 0.3
"""Of a micro-step: a joiner that finds one this surely is not sent in vain."""
LAST_SHARE = 0.2
"""Of the groups that still run, the share that ends too late to be trained while others run."""


class Burst:
    """Expected seconds to the end of the burst, as if its next groups were dispatched already.

    Attributes:
        is_ready: whether the burst can be trained whole without another execution.
        trip_s: seconds to leave and to return.
    """

    def __init__(self, state: SchedulerState, config: SchedulerConfig, outlook: Outlook) -> None:
        self._outlook = outlook
        self._num_cells = len(state.roles)
        self._num_training = len(state.training_cells)
        self.trip_s = outlook.leave_s + outlook.return_s
        size = config.executions_per_group
        num_new = state.groups_to_dispatch(config) * size
        self._unfinished = state.waterlevel + num_new
        self._capacity = [state.capacity_beyond(k, config) for k in range(self._num_cells + 1)]
        self._running = state.num_running
        alive = sum(not self._is_dead(cell) for cell in state.serving_cells)
        self._num_idle = max(alive - state.num_running, 0)
        missing = state.groups_to_train(config)
        now = state.trainable_groups(config)
        self.is_ready = now >= missing
        self._needed = min(max(missing - now, 0) * size, self._unfinished)
        self._available = state.open_micro_steps + now * outlook.micro_steps_per_group
        self._coming = max(missing - now, 0) * outlook.micro_steps_per_group
        # One group at least ends last of all, and the tail of the others is as good as last.
        in_time = max(missing - now - 1, 0) * (1.0 - LAST_SHARE)
        self._in_time = in_time * outlook.micro_steps_per_group
        self._surplus = self._next_burst_needs(state, config)
        self._later_s = self._seconds_each(0, self._unfinished) if self._surplus else 0.0
        if self._unfinished < self._capacity[0]:
            # Engines wait for the next dispatch, which waits for this burst.
            lag = config.max_lag_steps
            self._later_s *= (lag + config.steps_per_burst / 2) / (lag + config.steps_per_burst)

    def _next_burst_needs(self, state: SchedulerState, config: SchedulerConfig) -> float:
        """Executions of the burst after this one that are on their way; what runs is half done."""
        steps = min(config.steps_per_burst, state.total_steps - state.burst_end(config))
        ready = max(state.ready_groups - state.groups_to_train(config), 0)
        lacking = (steps * config.groups_per_step - ready) * config.executions_per_group
        beyond = self._unfinished - self._needed
        running = min(max(self._running - self._needed, 0), beyond)
        return max(min(beyond - running / 2, lacking), 0.0)

    # What the policy asks ------------------------------

    def seconds(self, prefix: int) -> float:
        """To the end of the burst with `prefix` cells in training from now on, and more of them
        once it is ready, less what later bursts gain meanwhile."""
        if self.is_ready:
            return self._rest_s(self._num_training, prefix, self._available, self._surplus)
        outlook = self._outlook
        served_s = self._served_s(prefix)
        if served_s == NEVER:
            return NEVER
        change_s = 0.0
        if prefix > self._num_training:
            change_s = outlook.leave_s
        elif prefix < self._num_training:
            change_s = outlook.return_s
        served_s = max(served_s, change_s)
        training = min(prefix, self._num_training)
        busy_s = training * change_s + self._busy_cells(prefix) * (served_s - change_s)
        trained = min(busy_s / outlook.micro_step_s, self._available + self._in_time)
        left = self._available + self._coming - trained
        needed = self._needed - min(self._running, self._needed) / 2  # what runs is half done
        gained = self._gained(prefix, served_s, self._surplus, needed)
        surplus = self._surplus - gained
        rest_s = min(
            self._rest_s(prefix, k, left, surplus) for k in {max(prefix, 1), self._num_cells}
        )
        return served_s - gained * self._later_s + rest_s

    def has_work_for(self, prefix: int) -> bool:
        """Whether every cell that joins finds a micro-step waiting when it arrives."""
        outlook, current = self._outlook, self._num_training
        if current == 0 and prefix == 1 and self.is_ready:
            return True  # the core ends a step even if its groups gave nothing to train
        taken = current * (1 + outlook.leave_s / outlook.micro_step_s) if current else 0.0
        return self._available - taken + ALMOST >= prefix - current

    def lowest_useful(self) -> int:
        """The shortest prefix at which every cell that returned would get something to serve."""
        housed = self._running if self._num_training < self._num_cells else 0
        starting = self._unfinished - housed - self._num_idle
        prefix = self._num_training
        while prefix > 0 and (starting > 0 or self._is_dead(prefix - 1)):
            prefix -= 1
            starting -= not self._is_dead(prefix)
        return prefix

    def _is_dead(self, cell: int) -> bool:
        return self._capacity[cell] == self._capacity[cell + 1]

    def has_room(self, prefix: int) -> bool:
        """Whether what runs now fits the cells that would go on serving."""
        return self._running <= self._capacity[prefix]

    def _busy_cells(self, prefix: int) -> float:
        """Mean number of cells that train until the burst is ready: `prefix` from now on, more as
        the waterlevel falls and their executions end.

        It is taken to fall evenly, from now on or, where nothing runs yet, in the second half.
        """
        each = self._capacity[0] / self._num_cells
        if each == 0 or self._running:
            return prefix
        first = max(self._num_cells - self._unfinished / each, 0.0)
        last = max(self._num_cells - (self._unfinished - self._needed) / each, 0.0)
        if last <= prefix:
            return prefix
        if first >= prefix:
            mean = (first + last) / 2
        else:
            crossing = (prefix - first) / (last - first)
            mean = prefix * crossing + (prefix + last) / 2 * (1 - crossing)
        return (prefix + mean) / 2

    # Its parts ------------------------------

    def _rest_s(self, current: int, prefix: int, micro_steps: float, surplus: float) -> float:
        """Training of what is left by `prefix` cells of which `current` train already, less what
        `surplus` executions gain meanwhile."""
        outlook = self._outlook
        if prefix == 0:
            return NEVER
        seconds = 0.0
        if prefix > current:
            seconds = outlook.leave_s
            micro_steps = max(micro_steps - current * outlook.leave_s / outlook.micro_step_s, 0.0)
        seconds += math.ceil(micro_steps / prefix - 1e-6) * outlook.micro_step_s
        credit_s = self._gained(prefix, seconds, surplus, 0) * self._later_s
        if prefix != self._num_training and self._surplus:
            seconds += outlook.return_s
        return seconds - credit_s

    def _gained(self, prefix: int, seconds: float, surplus: float, needed: float) -> float:
        """How many of `surplus` executions are served in `seconds` beside those that are needed."""
        if surplus <= 0 or self._capacity[prefix] == 0:
            return 0.0
        served = seconds / self._seconds_each(prefix, self._unfinished) - needed
        return min(max(served, 0.0), surplus)

    def _served_s(self, prefix: int) -> float:
        """Until the executions that the burst needs have ended."""
        outlook = self._outlook
        if self._needed == 0:
            return 0.0
        capacity = self._capacity[prefix]
        if capacity == 0:
            return NEVER
        running = min(self._running, self._unfinished)
        crowd = max(running / capacity, 1.0)
        rest_s = outlook.remaining_s * crowd * self._stretch(self._load(running, capacity))
        waiting = self._needed - running
        if waiting <= 0:
            return rest_s
        # A queue: cells are full until it is empty, and those that run then are half way through.
        served = min(self._unfinished, capacity)
        execution_s = outlook.execution_s * self._stretch(self._load(served, capacity))
        work_s = running * rest_s / crowd / 2 + waiting * execution_s
        return max(rest_s, work_s / served + execution_s / 2)

    def _seconds_each(self, prefix: int, unfinished: float) -> float:
        """Mean seconds between the ends of two executions."""
        capacity = self._capacity[prefix]
        served = min(unfinished, capacity)
        if served <= 0:
            return 0.0
        return self._outlook.execution_s * self._stretch(self._load(served, capacity)) / served

    def _stretch(self, load: float) -> float:
        return self._outlook.stretch(load)

    @staticmethod
    def _load(executions: float, capacity: int) -> float:
        return min(executions / capacity, 1.0)
