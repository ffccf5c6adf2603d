"""A fixed split: the first cells always train, the others always serve."""

from __future__ import annotations

from gyre_megatron.config.scheduler import SchedulerConfig
from gyre_megatron.scheduler.state import SchedulerState


def fixed_split(state: SchedulerState, config: SchedulerConfig) -> int:
    """`scheduler.async_training_cells` cells."""
    return config.async_training_cells
