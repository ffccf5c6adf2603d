"""How much slower a call's tokens come when its engine is busier, learnt from calls that ended."""

from __future__ import annotations

MIN_SAMPLES = 16
"""Fewer calls say more about their lengths than about the load."""
MAX_SLOWDOWN = 10.0


class LoadProfile:
    """Least squares of seconds per token over the engine's load when the call began.

    Sums decay, so that the line follows the model and the engine as they are now.
    """

    def __init__(self, keep: float = 0.995) -> None:
        self._keep = keep
        self._count = 0
        self._weight = 0.0
        self._x = 0.0
        self._y = 0.0
        self._xx = 0.0
        self._xy = 0.0

    def add(self, load: float, seconds: float, num_tokens: int) -> None:
        """A call that began at `load` (calls in flight over capacity) has ended."""
        if num_tokens < 1:
            return
        pace = seconds / num_tokens
        keep = self._keep
        self._count += 1
        self._weight = keep * self._weight + 1.0
        self._x = keep * self._x + load
        self._y = keep * self._y + pace
        self._xx = keep * self._xx + load * load
        self._xy = keep * self._xy + load * pace

    @property
    def slowdown(self) -> float:
        """b of seconds proportional to 1 + b * load; 0 before enough is known."""
        spread = self._weight * self._xx - self._x * self._x
        if self._count < MIN_SAMPLES or spread <= 1e-9:
            return 0.0
        slope = (self._weight * self._xy - self._x * self._y) / spread
        base = (self._y - slope * self._x) / self._weight
        if slope <= 0.0:
            return 0.0
        return MAX_SLOWDOWN if base <= slope / MAX_SLOWDOWN else slope / base
