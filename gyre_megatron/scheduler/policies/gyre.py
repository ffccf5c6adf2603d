"""Cells leave rollout when those that remain cover the unfinished work, and only if it pays.

The waterlevel says what may leave; the outlook says what should (`burst`). Without an outlook,
before anything has been measured, only the waterlevel speaks. Beyond the waterlevel cells leave in
two cases, both with lag only, where unfinished executions belong to later bursts: a burst that is
ready needs nobody to serve, and executions that wait for a start need no cell yet.
"""

from __future__ import annotations

from gyre_megatron.config.scheduler import SchedulerConfig
from gyre_megatron.scheduler.policies.burst import NEVER, Burst
from gyre_megatron.scheduler.state import SchedulerState


def waterlevel(state: SchedulerState, config: SchedulerConfig) -> int:
    """The number of cells that should train.

    Source: cells may leave while w(t) <= C_R(t) - C_e, core first; after a burst they stay as far
    as the next batch is ready and the capacity that remains covers what is about to be dispatched.
    """
    if state.outlook is None:
        return _by_waterlevel(state, config)
    burst = Burst(state, config, state.outlook)
    num_training = len(state.training_cells)
    if state.at_boundary and num_training > 0:
        staying = _staying(burst, num_training, state.groups_to_dispatch(config) > 0)
        if staying < num_training:
            return staying
    if state.groups_to_dispatch(config) > 0:
        return num_training
    return _leaving(state, config, burst)


def _staying(burst: Burst, num_training: int, published: bool) -> int:
    """How many of the training cells should stay between two bursts.

    Args:
        published: the last burst has just ended, so no cell has just left for this one.
    """
    if burst.is_ready and not published:
        return num_training
    least = max(burst.lowest_useful(), int(burst.is_ready))
    best = min(range(least, num_training + 1), key=lambda k: (burst.seconds(k), -k))
    gain = burst.seconds(num_training) - burst.seconds(best)
    return best if gain > (0.0 if published else burst.trip_s) else num_training


def _leaving(state: SchedulerState, config: SchedulerConfig, burst: Burst) -> int:
    """The prefix that ends the burst soonest, among those whose new cells find work."""
    num_training = len(state.training_cells)
    covered = _covered_prefix(state, config)
    candidates = []
    for prefix in range(num_training + 1, len(state.roles) + 1):
        may = prefix <= covered
        if config.max_lag_steps > 0:
            everyone = burst.is_ready and prefix == len(state.roles)
            may = may or everyone or burst.has_room(prefix)
        if may and burst.has_work_for(prefix):
            candidates.append(prefix)
    if not candidates:
        return num_training
    best = min(candidates, key=lambda k: (burst.seconds(k), -k))
    seconds = burst.seconds(best)
    return best if seconds < NEVER and seconds <= burst.seconds(num_training) else num_training


# Before anything is measured ------------------------------


def _by_waterlevel(state: SchedulerState, config: SchedulerConfig) -> int:
    num_training = len(state.training_cells)
    work = state.trainable_groups(config) > 0 or state.open_micro_steps > 0
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
