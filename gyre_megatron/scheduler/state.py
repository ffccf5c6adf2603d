"""What the scheduler knows: cell roles, the three counters and the batch in training. Plain values,
no I/O.

The runtime builds a `SchedulerState` from its components before each decision; the simulator from
its events. Counters are cumulative executions of the whole run: dispatched d(t), started p(t),
finished f(t); the waterlevel is w(t) = d(t) - f(t).
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from gyre_megatron.config.scheduler import SchedulerConfig
from gyre_megatron.errors import PolicyError


class Role(StrEnum):
    """What a cell does, and the two transitions between."""

    ROLLOUT = "rollout"
    LEAVING = "leaving"
    """From rollout to training: its calls move elsewhere, then its engine's memory is released."""
    TRAIN = "train"
    RETURNING = "returning"
    """From training to rollout: its engine takes its memory and the current weights."""


@dataclass(frozen=True)
class SchedulerState:
    """A snapshot for one decision.

    Attributes:
        roles: role of each cell, core first.
        dispatched, started, finished: cumulative executions.
        trained_steps: optimizer steps done in the run.
        published_steps: steps whose weights every engine has; equals the weight version that
            serves.
        total_steps: steps of the whole run.
        ready_groups: finished groups that no step has consumed or admitted yet.
        admitted_groups: groups admitted to the step in progress.
        open_micro_steps: micro-steps of the step in progress that are waiting or running.
    """

    roles: tuple[Role, ...]
    dispatched: int
    started: int
    finished: int
    trained_steps: int
    published_steps: int
    total_steps: int
    ready_groups: int
    admitted_groups: int
    open_micro_steps: int

    def __post_init__(self) -> None:
        if not self.dispatched >= self.started >= self.finished >= 0:
            raise PolicyError(
                f"counters must satisfy dispatched >= started >= finished >= 0, found "
                f"{self.dispatched}, {self.started}, {self.finished}"
            )
        if not self.total_steps >= self.trained_steps >= self.published_steps >= 0:
            raise PolicyError(
                f"steps must satisfy total >= trained >= published >= 0, found "
                f"{self.total_steps}, {self.trained_steps}, {self.published_steps}"
            )
        if not self.roles:
            raise PolicyError("a state needs at least one cell")

    @property
    def waterlevel(self) -> int:
        """Unfinished executions w = d - f."""
        return self.dispatched - self.finished

    @property
    def in_transition(self) -> bool:
        return any(role in (Role.LEAVING, Role.RETURNING) for role in self.roles)

    @property
    def training_cells(self) -> tuple[int, ...]:
        return tuple(cell for cell, role in enumerate(self.roles) if role is Role.TRAIN)

    @property
    def serving_cells(self) -> tuple[int, ...]:
        return tuple(cell for cell, role in enumerate(self.roles) if role is Role.ROLLOUT)

    def step_complete(self, config: SchedulerConfig) -> bool:
        """Whether every group of the step in progress was admitted and all its micro-steps are
        done."""
        return self.admitted_groups == config.groups_per_step and self.open_micro_steps == 0

    def burst_end(self, config: SchedulerConfig) -> int:
        """The trained step at which the current burst is published."""
        return min(self.published_steps + config.steps_per_burst, self.total_steps)

    def dispatch_depth(self, config: SchedulerConfig) -> int:
        """Groups that may have been dispatched by now: (published + phi + mu) * B, within the run.

        Source: dispatch depth at a burst boundary, Q_b = (phi + mu) * B beyond what was trained.
        """
        horizon = self.published_steps + config.max_lag_steps + config.steps_per_burst
        return min(horizon, self.total_steps) * config.groups_per_step
