"""Cells leave rollout when those that remain cover the unfinished work, and only if it pays.

The waterlevel says what may leave; the outlook says what should. On-policy (no lag) every burst is
rollout, then the rest of training: cells leave early as far as that shortens the sum. With lag
rollout and training run side by side for good, so the policy holds the split under which both keep
pace. Without an outlook, before anything has been measured, only the waterlevel speaks.
"""

from __future__ import annotations

from gyre_megatron.config.scheduler import SchedulerConfig
from gyre_megatron.scheduler.outlook import Outlook
from gyre_megatron.scheduler.state import SchedulerState
from gyre_megatron.scheduler.wanted import Wanted

NEVER = float("inf")
LAST_SHARE = 0.2
"""Of the groups that still run, the share that ends too late to be trained while others run."""

SPLIT_TOLERANCE = 1.05
"""How much slower than turns a fixed split may look and still be held: it never waits for tails."""


def waterlevel(state: SchedulerState, config: SchedulerConfig) -> Wanted:
    """The number of cells that should train, and what may be dispatched.

    Source: cells may leave while w(t) <= C_R(t) - C_e, core first; after a burst they stay as far
    as the next batch is ready and the capacity that remains covers what is about to be dispatched.
    """
    outlook = state.outlook
    if outlook is None:
        return Wanted(_by_waterlevel(state, config))
    if config.max_lag_steps > 0 and not state.dispatch_is_over(config):
        pace = _Pace(state, config, outlook)
        if pace.a_split_is_worth_it():
            prefix = _by_pace(state, config, pace)
            return Wanted(prefix, state.capacity_beyond(prefix, config))
    return Wanted(_by_burst(state, config, outlook))


# Before anything is measured ------------------------------


def _by_waterlevel(state: SchedulerState, config: SchedulerConfig) -> int:
    num_training = len(state.training_cells)
    work = state.ready_groups > 0 or state.open_micro_steps > 0
    if state.at_boundary and num_training > 0:
        num_new = state.groups_to_dispatch(config) * config.executions_per_group
        covered = state.waterlevel + num_new <= state.capacity_beyond(1, config)
        if num_new > 0 or not work:
            return int(work and covered)
    return max(_covered_prefix(state, config), num_training) if work else num_training


def _covered_prefix(state: SchedulerState, config: SchedulerConfig) -> int:
    """The longest training prefix whose rest covers the waterlevel."""
    for prefix in range(len(state.roles), 0, -1):
        if state.waterlevel <= state.capacity_beyond(prefix, config):
            return prefix
    return 0


# With lag: both keep pace ------------------------------


def _by_pace(state: SchedulerState, config: SchedulerConfig, pace: _Pace) -> int:
    num_training = len(state.training_cells)
    best = min(
        range(1, pace.num_splits + 1), key=lambda k: (pace.group_s(k), abs(k - num_training))
    )
    if best <= num_training:
        gain = pace.group_s(num_training) / pace.group_s(best) if num_training else 1.0
        worth = num_training <= pace.num_splits and gain < pace.hysteresis
        return num_training if worth else best
    covered = _covered_prefix(state, config)
    work = state.ready_groups > 0 or state.open_micro_steps > 0
    return max(min(best, covered), num_training) if work else num_training


class _Pace:
    """Seconds a group under each fixed split, serving and training side by side."""

    def __init__(self, state: SchedulerState, config: SchedulerConfig, outlook: Outlook) -> None:
        self._state = state
        self._config = config
        self._outlook = outlook
        depth = (config.max_lag_steps + config.steps_per_burst) * config.groups_per_step
        self._in_flight = depth * config.executions_per_group
        num_cells = len(state.roles)
        self.num_splits = num_cells if state.standalone_capacity else num_cells - 1
        burst_s = self.group_s(1) * config.groups_per_step * config.steps_per_burst
        self.hysteresis = 1.0 + (outlook.leave_s + outlook.return_s) / max(burst_s, 1.0)

    def a_split_is_worth_it(self) -> bool:
        """Whether whole cells divide nearly as the work does. With few cells they rarely do, and
        taking turns is better."""
        best = min((self.group_s(k) for k in range(1, self.num_splits + 1)), default=NEVER)
        turns = self._rollout_s(0) + self._training_s / len(self._state.roles)
        return best <= SPLIT_TOLERANCE * turns

    def group_s(self, prefix: int) -> float:
        """Seconds a group with `prefix` cells in training."""
        if not 0 < prefix <= self.num_splits:
            return NEVER
        return max(self._rollout_s(prefix), self._training_s / prefix)

    @property
    def _training_s(self) -> float:
        return self._outlook.micro_steps_per_group * self._outlook.micro_step_s

    def _rollout_s(self, prefix: int) -> float:
        config, outlook = self._config, self._outlook
        capacity = self._state.capacity_beyond(prefix, config)
        served = min(self._in_flight, capacity)
        if served == 0:
            return NEVER
        now = max(self._state.serving_capacity(config), 1)
        stretch = outlook.stretch(min(self._in_flight / now, 1.0), served / capacity)
        return config.executions_per_group * outlook.execution_s * stretch / served


# Without lag: one burst ------------------------------


def _by_burst(state: SchedulerState, config: SchedulerConfig, outlook: Outlook) -> int:
    num_training = len(state.training_cells)
    burst = _Burst(state, config, outlook)
    lowest = 0 if state.at_boundary else num_training
    highest = num_training
    if state.groups_to_dispatch(config) == 0:
        highest = max(_covered_prefix(state, config), num_training)
    best = min(range(lowest, highest + 1), key=lambda k: (burst.seconds(k), abs(k - num_training)))
    if best > num_training:
        return burst.longest_that_pays(num_training, best)
    gain = burst.seconds(num_training) - burst.seconds(best)
    return best if gain >= outlook.leave_s + outlook.return_s else num_training


class _Burst:
    """Expected time to the end of what is outstanding, by the number of cells that train."""

    def __init__(self, state: SchedulerState, config: SchedulerConfig, outlook: Outlook) -> None:
        self._outlook = outlook
        self._num_cells = len(state.roles)
        self._num_training = len(state.training_cells)
        num_new = state.groups_to_dispatch(config) * config.executions_per_group
        self._waterlevel = state.waterlevel + num_new
        self._capacity = [state.capacity_beyond(k, config) for k in range(self._num_cells + 1)]
        group_s = outlook.micro_steps_per_group * outlook.micro_step_s
        missing = state.groups_to_train(config)
        now = min(state.ready_groups, missing)
        self._available_s = state.open_micro_steps * outlook.micro_step_s + now * group_s
        num_coming = max(missing - now, 0)
        self._coming_s = num_coming * group_s
        # One group at least ends last of all, and the tail of the others is as good as last.
        self._in_time_s = max(num_coming - 1, 0) * (1.0 - LAST_SHARE) * group_s
        waiting = self._waterlevel - state.num_running
        rollout = outlook.remaining_s if state.num_running else 0.0
        if waiting > 0:
            slots = max(self._capacity[self._num_training], 1)
            rollout = max(rollout, -(-waiting // slots) * outlook.execution_s)
        self._rollout_s = rollout

    def seconds(self, prefix: int) -> float:
        """Rollout with `prefix` cells in training, then the rest of training by all cells."""
        outlook = self._outlook
        capacity = self._capacity[prefix]
        if self._waterlevel > 0 and capacity == 0:
            return NEVER
        rollout = self._rollout_s
        if self._waterlevel > 0:
            before = self._waterlevel / max(self._capacity[self._num_training], 1)
            after = self._waterlevel / capacity
            rollout *= outlook.stretch(min(before, 1.0), min(after, 1.0))
            rollout *= max(after, 1.0) / max(before, 1.0)
        change = 0.0
        if prefix > self._num_training:
            change = outlook.leave_s
        elif prefix < self._num_training:
            change = outlook.return_s
        while_serving = self._available_s + self._in_time_s
        trained = min(prefix * max(rollout - change, 0.0), while_serving)
        rest = self._available_s + self._coming_s - trained
        joining = outlook.leave_s if prefix < self._num_cells and rest > 0 else 0.0
        return rollout + rest / self._num_cells + joining

    def longest_that_pays(self, current: int, best: int) -> int:
        """The longest prefix up to `best` whose new cells find enough work to repay their move."""
        for prefix in range(best, current, -1):
            if self._has_work_for(current, prefix) and self.seconds(prefix) < self.seconds(current):
                return prefix
        return current

    def _has_work_for(self, current: int, prefix: int) -> bool:
        """Whether what is available now takes the present cells longer than a move takes."""
        if self._available_s == 0:
            return False
        alone = self._available_s / current if current else NEVER
        return alone - self._available_s / prefix > self._outlook.leave_s
