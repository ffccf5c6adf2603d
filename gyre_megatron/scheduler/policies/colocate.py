"""All cells train or all serve. Executions that are unfinished then wait for the engines."""

from __future__ import annotations

from gyre_megatron.config.scheduler import SchedulerConfig
from gyre_megatron.scheduler.state import SchedulerState


def all_cells_together(state: SchedulerState, config: SchedulerConfig) -> int:
    """Every cell once the groups of the whole burst are there; none before they are.

    Cells return at the end of a burst only, so a batch that is complete is not enough.
    """
    if state.training_cells and not state.at_boundary:
        return len(state.training_cells)
    ready = state.trainable_groups(config) >= state.groups_to_train(config)
    return len(state.roles) if ready else 0
