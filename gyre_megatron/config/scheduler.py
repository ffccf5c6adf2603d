"""The waterlevel scheduler: batches, bursts, staleness and the policy."""

from __future__ import annotations

from pydantic import Field, model_validator

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
    max_staleness_steps: int | None = Field(None, ge=0)
    """Largest number of steps between the weights that a group was dispatched under and those that
    it trains; a step waits for a group that would exceed it. At least phi + mu - 1, with which groups
    are trained in the order of dispatch; None is mu - 1 + 2 phi, room for phi steps of stragglers."""
    cell_capacity: int = Field(16, ge=1)
    """C_e: executions a cell serves at once."""
    async_training_cells: int = Field(1, ge=1)
    """Cells that train under the policy async; the others serve."""

    @model_validator(mode="after")
    def _staleness_can_be_kept(self) -> SchedulerConfig:
        asked, least = self.max_staleness_steps, self.max_lag_steps + self.steps_per_burst - 1
        if asked is not None and asked < least:
            raise ValueError(
                f"scheduler.max_staleness_steps={asked} cannot be kept: with max_lag_steps="
                f"{self.max_lag_steps} and steps_per_burst={self.steps_per_burst} the last group "
                f"of a dispatch is trained {least} steps after it at the earliest; set {least} or "
                "more, or dispatch less ahead"
            )
        return self

    @property
    def staleness_bound(self) -> int:
        """Largest t - v of a group dispatched under version v and trained from version t."""
        if self.max_staleness_steps is not None:
            return self.max_staleness_steps
        return self.steps_per_burst - 1 + 2 * self.max_lag_steps
