"""How long executions take, learnt from those that have ended: what is left of those that run.

Kept sorted, so that a question costs a few look-ups however many executions a run has had.
"""

from __future__ import annotations

import bisect
from collections import deque
from collections.abc import Sequence

KEPT = 2048
"""Executions remembered: enough for a tail, few enough to follow a policy that changes."""
BEYOND = 0.1
"""What an execution older than any that ended is expected to take still, as a share of the mean."""


class Durations:
    """Wall times of the executions that ended last, in seconds."""

    def __init__(self, kept: int = KEPT) -> None:
        self._kept = kept
        self._recent: deque[float] = deque()
        self._sorted: list[float] = []
        self._sum = 0.0

    def __len__(self) -> int:
        return len(self._sorted)

    def add(self, seconds: float) -> None:
        """An execution has ended."""
        self._recent.append(seconds)
        bisect.insort(self._sorted, seconds)
        self._sum += seconds
        if len(self._recent) > self._kept:
            oldest = self._recent.popleft()
            del self._sorted[bisect.bisect_left(self._sorted, oldest)]
            self._sum -= oldest

    @property
    def mean(self) -> float:
        """Mean wall time; 0 before anything ended."""
        return self._sum / len(self._sorted) if self._sorted else 0.0

    def remaining(self, elapsed: Sequence[float]) -> float:
        """Expected time until the last of the executions that have run for `elapsed` seconds ends.

        The largest of n draws from a distribution lies near its quantile 1 - 1 / (n + 1); each
        execution's distribution is that of the executions that took longer than it has. The
        youngest, the oldest and the middle one stand for all.
        """
        if not elapsed:
            return 0.0
        ordered = sorted(elapsed)
        samples = (ordered[0], ordered[len(ordered) // 2], ordered[-1])
        return max(self._expected_rest(age, len(ordered)) for age in samples)

    def _expected_rest(self, age: float, num_running: int) -> float:
        first = bisect.bisect_right(self._sorted, age)
        longer = len(self._sorted) - first
        if longer == 0:
            return BEYOND * self.mean
        place = first + min(int(longer * num_running / (num_running + 1)), longer - 1)
        return self._sorted[place] - age
