"""All cells train or all serve. Executions that are unfinished then wait for the engines."""

from __future__ import annotations

from gyre_megatron.config.scheduler import SchedulerConfig
from gyre_megatron.scheduler.state import SchedulerState


def all_cells_together(state: SchedulerState, config: SchedulerConfig) -> int:
    """Every cell once the groups of the whole burst are there; none before they are.

    Cells return at the end of a burst only, so a batch that is complete is not enough.
    """
    if not state.at_boundary:
        return len(state.training_cells)
    return len(state.roles) if state.ready_groups >= state.groups_to_train(config) else 0
