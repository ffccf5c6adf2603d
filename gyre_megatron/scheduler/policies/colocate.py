"""All cells train or all serve: rollout ends before training begins."""

from __future__ import annotations

from gyre_megatron.config.scheduler import SchedulerConfig
from gyre_megatron.scheduler.state import SchedulerState


def all_cells_together(state: SchedulerState, config: SchedulerConfig) -> int:
    """Every cell once a whole batch is ready and nothing runs any more; none before a dispatch."""
    if state.groups_to_dispatch(config) > 0:
        return 0
    batch_ready = state.admitted_groups + state.ready_groups >= config.groups_per_step
    if batch_ready and state.waterlevel == 0:
        return len(state.roles)
    return len(state.training_cells)
