"""What the scheduler knows: roles and weights of the cells, the three counters, the batch in
training.

The runtime builds a `SchedulerState` from its components before each decision; a simulator from its
events. Counters are cumulative executions of the whole run: dispatched d(t), started p(t), finished
f(t); the waterlevel is w(t) = d(t) - f(t). Plain values, no I/O.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property

from gyre_megatron.config.scheduler import SchedulerConfig
from gyre_megatron.errors import PolicyError
from gyre_megatron.scheduler.outlook import Outlook
from gyre_megatron.scheduler.staleness import num_admissible


class CellRole(StrEnum):
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
        ready_versions: weight versions under which those were dispatched, ascending.
        unfinished_versions: the same of the groups that have not finished.
        admitted_groups: groups admitted to the step in progress.
        open_micro_steps: micro-steps of the step in progress that are waiting or running.
        batch_has_bins: whether the groups admitted so far gave anything to train.
        running: executions whose harness runs now; None counts every started one that has not
            finished (which a resumed run cannot, since it starts some a second time).
        max_running: harnesses that the control plane's machine runs at once; None sets no limit.
        cell_versions: weight version of each cell's trainer; None: all hold `trained_steps`.
        checkpointed_steps: steps in the latest checkpoint; 0 if there is none.
        checkpoint_interval: steps between checkpoints; 0 saves at the end of the run only.
        admitting: whether groups are being admitted at this moment.
        busy: whether a serial order (role change, sync, step, publication, checkpoint) is being
            carried out at this moment.
        standalone_capacity: executions that cells outside the prefix order, which never train,
            can serve.
        capacities: executions that each cell's engine can serve as measured, 0 where it is dead;
            None: all serve `scheduler.cell_capacity`.
        outlook: what has been measured so far; None before anything has.
    """

    roles: tuple[CellRole, ...]
    dispatched: int
    started: int
    finished: int
    trained_steps: int
    published_steps: int
    total_steps: int
    ready_groups: int
    admitted_groups: int
    open_micro_steps: int
    batch_has_bins: bool = True
    running: int | None = None
    max_running: int | None = None
    cell_versions: tuple[int, ...] | None = None
    checkpointed_steps: int = 0
    checkpoint_interval: int = 0
    admitting: bool = False
    busy: bool = False
    standalone_capacity: int = 0
    capacities: tuple[int, ...] | None = None
    ready_versions: tuple[int, ...] | None = None
    unfinished_versions: tuple[int, ...] = ()
    outlook: Outlook | None = None

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
        for name, values in (("weight version", self.cell_versions), ("capacity", self.capacities)):
            if values is not None and len(values) != len(self.roles):
                raise PolicyError(
                    f"a state needs one {name} for each of its {len(self.roles)} cells, found "
                    f"{len(values)}"
                )
        if self.ready_versions is not None and len(self.ready_versions) != self.ready_groups:
            raise PolicyError(
                f"a state needs one dispatch version for each of its {self.ready_groups} ready "
                f"groups, found {len(self.ready_versions)}"
            )

    @classmethod
    def at_start(cls, num_cells: int, total_steps: int) -> SchedulerState:
        """A run in which nothing has happened yet: every cell serves."""
        return cls((CellRole.ROLLOUT,) * num_cells, 0, 0, 0, 0, 0, total_steps, 0, 0, 0)

    # rollout ------------------------------

    @property
    def waterlevel(self) -> int:
        """Unfinished executions w = d - f."""
        return self.dispatched - self.finished

    @property
    def num_running(self) -> int:
        """Executions whose harness runs now."""
        return self.started - self.finished if self.running is None else self.running

    @property
    def num_waiting(self) -> int:
        """Unfinished executions whose harness does not run."""
        # An execution counts as finished a moment before its harness counts as gone, hence max.
        return max(self.waterlevel - self.num_running, 0)

    # cells ------------------------------

    @cached_property
    def in_transition(self) -> bool:
        """Whether a serial order is on its way: nothing else may change roles or weights."""
        between = (CellRole.LEAVING, CellRole.RETURNING)
        return self.busy or any(role in between for role in self.roles)

    @cached_property
    def training_cells(self) -> tuple[int, ...]:
        return tuple(cell for cell, role in enumerate(self.roles) if role is CellRole.TRAIN)

    @cached_property
    def serving_cells(self) -> tuple[int, ...]:
        return tuple(cell for cell, role in enumerate(self.roles) if role is CellRole.ROLLOUT)

    def capacity_beyond(self, prefix: int, config: SchedulerConfig) -> int:
        """C_R with cells 0..prefix-1 in training."""
        if self.capacities is None:
            return self.standalone_capacity + (len(self.roles) - prefix) * config.cell_capacity
        return self.standalone_capacity + sum(self.capacities[prefix:])

    def serving_capacity(self, config: SchedulerConfig) -> int:
        """C_R of this moment: cells between roles do not count."""
        if self.capacities is None:
            return self.standalone_capacity + len(self.serving_cells) * config.cell_capacity
        return self.standalone_capacity + sum(self.capacities[c] for c in self.serving_cells)

    @property
    def stale_cells(self) -> tuple[int, ...]:
        """Training cells whose weights are not those of the step in progress."""
        if self.cell_versions is None:
            return ()
        versions = self.cell_versions
        return tuple(cell for cell in self.training_cells if versions[cell] != self.trained_steps)

    # the batch, the burst and the run ------------------------------

    def step_complete(self, config: SchedulerConfig) -> bool:
        """Whether every group of the step in progress was admitted and all its micro-steps are
        done."""
        return self.admitted_groups == config.groups_per_step and self.open_micro_steps == 0

    def has_training_work(self, config: SchedulerConfig) -> bool:
        """Whether the step in progress still has groups to admit or micro-steps to claim."""
        return self.admitted_groups < config.groups_per_step or self.open_micro_steps > 0

    @property
    def batch_in_progress(self) -> bool:
        """Whether gradients exist, or are about to, that a role change would lose."""
        return self.admitting or self.admitted_groups > 0 or self.open_micro_steps > 0

    @property
    def at_boundary(self) -> bool:
        """Whether cells may return: what was trained is published, and no batch has begun."""
        return not self.batch_in_progress and self.trained_steps == self.published_steps

    def burst_end(self, config: SchedulerConfig) -> int:
        """The trained step at which the current burst is published."""
        return min(self.published_steps + config.steps_per_burst, self.total_steps)

    def groups_to_train(self, config: SchedulerConfig) -> int:
        """Groups that the burst still needs beyond those admitted."""
        steps = self.burst_end(config) - self.trained_steps
        return steps * config.groups_per_step - self.admitted_groups

    def admissible_groups(self, config: SchedulerConfig) -> int:
        """Ready groups that the step in progress may take without making another one too old."""
        free = config.groups_per_step - self.admitted_groups
        return self._admissible(self.ready_versions, self.trained_steps, free, config)

    def trainable_groups(self, config: SchedulerConfig) -> int:
        """Ready groups that the burst can train even if no other group finishes."""
        free = config.groups_per_step - self.admitted_groups
        if self.ready_versions is None:
            return min(self.ready_groups, self.groups_to_train(config))
        total = 0
        for step in range(self.trained_steps, self.burst_end(config)):
            taken = self._admissible(self.ready_versions[total:], step, free, config)
            total += taken
            if taken < free:
                break
            free = config.groups_per_step
        return total

    def _admissible(
        self, ready: tuple[int, ...] | None, step: int, free: int, config: SchedulerConfig
    ) -> int:
        if ready is None:
            return min(self.ready_groups, free)
        size, bound = config.groups_per_step, config.staleness_bound
        return num_admissible(ready, self.unfinished_versions, step, free, size, bound)

    def executions_burst_needs(self, config: SchedulerConfig) -> int:
        """Executions that must still end for the burst in progress; the oldest serve it best."""
        missing = self.groups_to_train(config) - self.ready_groups
        return max(missing, 0) * config.executions_per_group

    def groups_burst_lacks(self, config: SchedulerConfig) -> int:
        """Groups that must still be dispatched for the burst in progress to end."""
        target = self.burst_end(config) * config.groups_per_step
        return max(target - self.dispatched // config.executions_per_group, 0)

    def dispatch_is_over(self, config: SchedulerConfig) -> bool:
        """Whether every group of the run has been dispatched."""
        total = self.total_steps * config.groups_per_step
        return self.dispatched // config.executions_per_group >= total

    def groups_to_dispatch(self, config: SchedulerConfig) -> int:
        """Groups that are missing from the dispatch depth; positive only at a burst boundary.

        Source: dispatch depth at a burst boundary, Q_b = (phi + mu) * B beyond what was trained.
        """
        horizon = self.published_steps + config.max_lag_steps + config.steps_per_burst
        depth = min(horizon, self.total_steps) * config.groups_per_step
        return max(depth - self.dispatched // config.executions_per_group, 0)
