"""Cells leave rollout one by one, as soon as the cells that remain cover the unfinished work."""

from __future__ import annotations

from gyre_megatron.config.scheduler import SchedulerConfig
from gyre_megatron.scheduler.state import SchedulerState


def waterlevel(state: SchedulerState, config: SchedulerConfig) -> int:
    """The training prefix that the waterlevel allows.

    Source: the next cell e may leave when w(t) <= C_R(t) - C_e; after a burst the core stays when
    the next batch is ready and the remaining capacity covers the executions about to be dispatched.
    """
    num_training = len(state.training_cells)
    num_new = state.groups_to_dispatch(config) * config.executions_per_group
    if num_new > 0:
        return int(num_training > 0 and _core_may_stay(state, config, num_new))
    remaining = (len(state.serving_cells) - 1) * config.cell_capacity
    return num_training + 1 if state.waterlevel <= remaining else num_training


def _core_may_stay(state: SchedulerState, config: SchedulerConfig, num_new: int) -> bool:
    capacity = (len(state.roles) - 1) * config.cell_capacity
    num_ready = state.ready_groups + state.admitted_groups
    return num_ready > 0 and state.waterlevel + num_new <= capacity
