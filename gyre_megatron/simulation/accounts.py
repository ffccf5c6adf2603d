"""Where the seconds of every cell went, and the history that pictures are drawn from."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field

import numpy as np

ACTIVITIES = ("serving", "training", "transition", "idle", "recomputed")
"""What a cell's time is spent on. `idle`: serving nobody, or training with nothing to claim;
`recomputed`: serving, but on prefixes that had been computed before."""


@dataclass(frozen=True)
class Span:
    """One activity of one cell from `start` to `end`, in virtual seconds."""

    cell: int
    activity: str
    start: float
    end: float


@dataclass
class Accounts:
    """Collects spans and the waterlevel.

    Attributes:
        spans: in order of their ends.
        waterlevel: (time, unfinished executions) after each change.
        step_ends: virtual time at which each optimizer step was done.
        staleness: versions between dispatch and training of every trained group.
        group_seconds: from dispatch to the last execution's end, for every finished group.
    """

    spans: list[Span] = field(default_factory=list)
    waterlevel: list[tuple[float, int]] = field(default_factory=list)
    step_ends: list[float] = field(default_factory=list)
    staleness: list[int] = field(default_factory=list)
    group_seconds: list[float] = field(default_factory=list)
    execution_seconds: list[float] = field(default_factory=list)
    leaves: int = 0
    returns: int = 0
    useless_trips: int = 0
    """Cells that left rollout and came back without having trained, or came back and left again
    without having served."""
    batches_given_up: int = 0
    """Batches whose gradients were dropped because engines died and the cells had to serve."""
    moved_executions: int = 0
    recomputed_s: float = 0.0
    _open: dict[int, tuple[str, float]] = field(default_factory=dict)
    _useless: set[int] = field(default_factory=set)  # cells that have done nothing in their role

    def left(self, cell: int) -> None:
        """A cell leaves rollout for training."""
        self.leaves += 1
        self._changes_role(cell)

    def returned(self, cell: int) -> None:
        """A cell leaves training for rollout."""
        self.returns += 1
        self._changes_role(cell)

    def _changes_role(self, cell: int) -> None:
        self.useless_trips += cell in self._useless
        self._useless.add(cell)

    def begin(self, cell: int, activity: str, now: float) -> None:
        """`cell` does `activity` from now on."""
        if activity in ("serving", "training"):
            self._useless.discard(cell)
        before = self._open.get(cell)
        if before is not None:
            if before[0] == activity:
                return
            if now > before[1]:
                self.spans.append(Span(cell, before[0], before[1], now))
        self._open[cell] = (activity, now)

    def close(self, now: float) -> None:
        """End every open span."""
        for cell in list(self._open):
            self.begin(cell, "end", now)
        self._open.clear()

    def seconds(self) -> dict[str, float]:
        """Cell-seconds by activity; recomputed prefixes are taken out of serving."""
        total: dict[str, float] = defaultdict(float)
        for span in self.spans:
            total[span.activity] += span.end - span.start
        recomputed = min(self.recomputed_s, total["serving"])
        total["serving"] -= recomputed
        total["recomputed"] = recomputed
        return {activity: total[activity] for activity in ACTIVITIES}

    def longest_over_mean(self) -> float:
        """Mean over groups of their time, over the mean time of an execution."""
        return float(np.mean(self.group_seconds) / np.mean(self.execution_seconds))
