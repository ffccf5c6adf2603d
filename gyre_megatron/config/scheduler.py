"""The waterlevel scheduler: batches, bursts, staleness and the policy."""

from __future__ import annotations

from pydantic import Field

from gyre_megatron.config.base import Section


class SchedulerConfig(Section):
    """When executions are dispatched and when cells change roles."""

    policy: str = "gyre"
    """gyre moves cells as rollout work runs out, when the move pays; colocate moves all at once when
    a burst's groups are there; async keeps the first cells training and the others serving. Your
    own is written package.module:function or path/to/file.py:function: (state, config) -> cells
    that should train."""
    groups_per_step: int = Field(8, ge=1)
    """B: groups consumed by one optimizer step."""
    executions_per_group: int = Field(16, ge=1)
    """N: executions of one query; advantages are relative to their group (16 in the paper)."""
    steps_per_burst: int = Field(1, ge=1)
    """mu: optimizer steps between two publications of the weights."""
    max_lag_steps: int = Field(0, ge=0)
    """phi: how many steps the dispatch may run ahead of training; 0 is on-policy within a burst."""
    cell_capacity: int = Field(16, ge=1)
    """C_e: executions a cell serves at once."""
    async_training_cells: int = Field(1, ge=1)
    """Cells that train under the policy async; the others serve."""
