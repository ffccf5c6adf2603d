"""The executions that live on one cell, as a fluid: each has calls left and a speed.

Invariant: between two changes of membership every speed is constant, so the next finish is known.
"""

from __future__ import annotations

import numpy as np

from gyre_megatron.simulation.serving import ServingModel

NEVER = float("inf")


class Residents:
    """Advances the executions of one cell through virtual time.

    Args:
        serving: gives the time of a call by the number of residents.
    """

    def __init__(self, serving: ServingModel) -> None:
        self._serving = serving
        self.ids = np.empty(0, np.int64)
        self._calls_left = np.empty(0)
        self._tool_s = np.empty(0)
        self._deadlines = np.empty(0)
        self._cycle_s = np.empty(0)
        self._now = 0.0
        self._halted = False

    def __len__(self) -> int:
        return len(self.ids)

    def advance(self, now: float) -> None:
        """Let time pass until `now`."""
        if not self._halted and len(self.ids):
            self._calls_left -= (now - self._now) / self._cycle_s
        self._now = now

    def add(self, execution: int, calls: float, tool_s: float, deadline: float) -> None:
        """Put an execution here, with `calls` still to make; call `advance` first."""
        self.ids = np.append(self.ids, execution)
        self._calls_left = np.append(self._calls_left, calls)
        self._tool_s = np.append(self._tool_s, tool_s)
        self._deadlines = np.append(self._deadlines, deadline)
        self._changed()

    def remove(self, execution: int) -> tuple[float, float, float]:
        """Take an execution away: (calls left, tool seconds, deadline); call `advance` first."""
        place = int(np.flatnonzero(self.ids == execution)[0])
        taken = (
            float(self._calls_left[place]),
            float(self._tool_s[place]),
            float(self._deadlines[place]),
        )
        self.ids = np.delete(self.ids, place)
        self._calls_left = np.delete(self._calls_left, place)
        self._tool_s = np.delete(self._tool_s, place)
        self._deadlines = np.delete(self._deadlines, place)
        self._changed()
        return taken

    def delay(self, seconds: float) -> None:
        """Cost every resident `seconds` of its time (its prefix is computed again)."""
        if len(self.ids):
            self._calls_left += seconds / self._cycle_s

    def halt(self, halted: bool) -> None:
        """Stop or resume generation; call `advance` first."""
        self._halted = halted

    def cycle_s(self, tool_s: float, residents: int) -> float:
        """Seconds of a call and its tool with so many residents."""
        return self._serving.call_s(max(residents, 1)) + tool_s

    def next_finish(self) -> tuple[float, int]:
        """When the next execution ends, by its last call or its time-out, and which."""
        if not len(self.ids):
            return NEVER, -1
        ends = self._deadlines
        if not self._halted:
            calls = np.maximum(self._calls_left, 0.0)
            ends = np.minimum(self._now + calls * self._cycle_s, self._deadlines)
        place = int(np.argmin(ends))
        return max(float(ends[place]), self._now), int(self.ids[place])

    def _changed(self) -> None:
        self._cycle_s = self._serving.call_s(max(len(self.ids), 1)) + self._tool_s
