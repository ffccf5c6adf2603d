"""What was admitted to one optimizer step, for the records of the run."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass, field


@dataclass
class BatchRecord:
    """Accounts of one step's batch, filled while the step is in progress.

    Attributes:
        group_ids: admitted groups, in order.
        rewards: of the scored executions.
        staleness: per group, versions between the dispatch and the training of it.
        tokens: token counts by fate (captured, trained, shared, context, dropped ...), summed over
            groups.
        micro_step_metrics: metrics of the micro-steps trained so far, summed.
        micro_steps_by_cell: micro-steps that each cell trained.
        training_seconds_by_cell: time that they took there.
        num_bins: bins that were packed.
        statuses: executions by the way they ended.
        excluded: executions that do not count, by reason (`trajectory.fit.Reason`).
    """

    group_ids: list[str] = field(default_factory=list)
    rewards: list[float] = field(default_factory=list)
    staleness: list[int] = field(default_factory=list)
    tokens: Counter[str] = field(default_factory=Counter)
    micro_step_metrics: Counter[str] = field(default_factory=Counter)
    micro_steps_by_cell: Counter[int] = field(default_factory=Counter)
    training_seconds_by_cell: defaultdict[int, float] = field(
        default_factory=lambda: defaultdict(float)
    )
    num_bins: int = 0
    statuses: Counter[str] = field(default_factory=Counter)
    excluded: Counter[str] = field(default_factory=Counter)
