"""A fixed split: the core always trains, every other cell always serves."""

from __future__ import annotations

from gyre_megatron.config.scheduler import SchedulerConfig
from gyre_megatron.scheduler.state import SchedulerState


def core_always_trains(state: SchedulerState, config: SchedulerConfig) -> int:
    """One cell, the core."""
    return 1
