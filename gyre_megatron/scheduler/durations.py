"""How long executions take, learnt from those that have ended: what is left of those that run.

Kept sorted, so that a question costs a few look-ups however many executions a run has had.
"""

from __future__ import annotations

import bisect
import math
from collections import deque
from collections.abc import Sequence
from statistics import NormalDist

KEPT = 2048
"""Executions remembered: enough for a tail, few enough to follow a policy that changes."""
BEYOND = 0.1
"""What an execution that is older than it should be takes still, as a share of the mean."""
SPREAD = 0.4
"""Lognormal spread assumed beyond the longest execution that has ended: what ends first in a run
says little of what ends last."""
FEW = 2
"""With fewer ended executions than so many times those that run, the latter count in the mean."""
NORMAL = NormalDist()


class Durations:
    """Wall times of the executions that ended last, in seconds."""

    def __init__(self, kept: int = KEPT) -> None:
        self._kept = kept
        self._recent: deque[tuple[float, float]] = deque()
        self._sorted: list[float] = []
        self._sum = 0.0
        self._sum_of_loads = 0.0

    def __len__(self) -> int:
        return len(self._sorted)

    def add(self, seconds: float, load: float) -> None:
        """An execution has ended; the engines' mean load while it ran was `load` (0 to 1)."""
        self._recent.append((seconds, load))
        self._sum_of_loads += load
        bisect.insort(self._sorted, seconds)
        self._sum += seconds
        if len(self._recent) > self._kept:
            oldest, load = self._recent.popleft()
            self._sum_of_loads -= load
            del self._sorted[bisect.bisect_left(self._sorted, oldest)]
            self._sum -= oldest

    @property
    def mean_load(self) -> float:
        """Mean load under which the executions ran; 0 before anything ended."""
        return self._sum_of_loads / len(self._sorted) if self._sorted else 0.0

    def mean(self, elapsed: Sequence[float]) -> float:
        """Mean wall time; 0 before anything ended.

        Args:
            elapsed: ages of those that run. While few have ended those were the short ones.
        """
        if not self._sorted:
            return 0.0
        mean = self._sum / len(self._sorted)
        if len(self._sorted) >= FEW * len(elapsed):
            return mean
        total = self._sum + sum(age + self._rest(age, elapsed, 0.5) for age in elapsed)
        return total / (len(self._sorted) + len(elapsed))

    def remaining(self, elapsed: Sequence[float], all_elapsed: Sequence[float] = ()) -> float:
        """Expected time until the last of the executions that have run for `elapsed` seconds ends.

        The largest of n draws from a distribution lies near its quantile 1 - 1 / (n + 1); each
        execution's distribution is that of the executions that took longer than it has. The
        youngest, the oldest and the middle one stand for all.

        Args:
            all_elapsed: ages of everything that runs, if there is more.
        """
        if not elapsed:
            return 0.0
        ordered = sorted(elapsed)
        samples = {ordered[0], ordered[len(ordered) // 2], ordered[-1]}
        share = len(ordered) / (len(ordered) + 1)
        return max(self._rest(age, all_elapsed or ordered, share) for age in samples)

    def _rest(self, age: float, running: Sequence[float], share: float) -> float:
        """What an execution of that age takes still: at the quantile `share` of those that took
        longer."""
        first = bisect.bisect_right(self._sorted, age)
        longer = len(self._sorted) - first
        if longer:
            return self._sorted[first + min(int(longer * share), longer - 1)] - age
        if not self._sorted:
            return 0.0
        longest = self._sorted[-1]
        survivors = sum(other >= longest for other in running)
        ended = len(self._sorted) / (len(self._sorted) + max(survivors, 1))
        steps = NORMAL.inv_cdf(ended + (1 - ended) * share) - NORMAL.inv_cdf(ended)
        expected = longest * math.exp(SPREAD * steps)
        return max(expected - age, BEYOND * self._sum / len(self._sorted))


class LoadHistory:
    """How full the serving cells have been: the integral of their load over time."""

    def __init__(self) -> None:
        self._since = 0.0
        self._load = 0.0
        self._integral = 0.0

    def update(self, now: float, running: int, capacity: int) -> None:
        """From `now` on, `running` executions use `capacity` slots."""
        self._integral = self.integral(now)
        self._since = now
        self._load = min(running / capacity, 1.0) if capacity else 1.0

    def integral(self, now: float) -> float:
        """Until now; the mean load between two moments is the difference of their integrals over
        their distance."""
        return self._integral + (now - self._since) * self._load
