"""The executions that live on one cell, as a fluid: each has calls left and a speed.

Invariant: between two changes of membership every speed is constant, so the next finish is known.
Plain lists: a cell holds a hundred executions or fewer, where they are faster than arrays.
"""

from __future__ import annotations

from typing import NamedTuple

from gyre_megatron.simulation.serving import ServingModel

NEVER = float("inf")


class Resident(NamedTuple):
    """What an execution still asks for.

    Attributes:
        execution: its number.
        calls: calls that it has still to make; fractions are calls under way.
        tool_s: mean seconds between calls.
        deadline: virtual time at which its harness is ended.
    """

    execution: int
    calls: float
    tool_s: float
    deadline: float


class Residents:
    """Advances the executions of one cell through virtual time.

    Args:
        serving: gives the time of a call by the number of residents.
    """

    def __init__(self, serving: ServingModel) -> None:
        self._serving = serving
        self.ids: list[int] = []
        self._calls_left: list[float] = []
        self._tool_s: list[float] = []
        self._deadlines: list[float] = []
        self._cycle_s: list[float] = []
        self._now = 0.0
        self._running = True
        self._crowding = 1.0

    def __len__(self) -> int:
        return len(self.ids)

    def advance(self, now: float) -> None:
        """Let time pass until `now`."""
        passed = now - self._now
        if self._running and passed > 0.0:
            self._calls_left = [
                calls - passed / cycle
                for calls, cycle in zip(self._calls_left, self._cycle_s, strict=True)
            ]
        self._now = now

    def add(self, resident: Resident) -> None:
        """Put an execution here; call `advance` first."""
        self.ids.append(resident.execution)
        self._calls_left.append(resident.calls)
        self._tool_s.append(resident.tool_s)
        self._deadlines.append(resident.deadline)
        self._changed()

    def remove(self, execution: int) -> Resident:
        """Take an execution away; call `advance` first."""
        place = self.ids.index(execution)
        taken = Resident(
            self.ids.pop(place),
            self._calls_left.pop(place),
            self._tool_s.pop(place),
            self._deadlines.pop(place),
        )
        self._changed()
        return taken

    def remove_all(self) -> list[Resident]:
        """Take every execution away; call `advance` first."""
        columns = (self.ids, self._calls_left, self._tool_s, self._deadlines)
        taken = [Resident(*row) for row in zip(*columns, strict=True)]
        self.ids, self._calls_left, self._tool_s, self._deadlines = [], [], [], []
        self._changed()
        return taken

    def delay(self, seconds: float) -> None:
        """Cost every resident `seconds` of its time (its prefix is computed again)."""
        self._calls_left = [
            calls + seconds / cycle
            for calls, cycle in zip(self._calls_left, self._cycle_s, strict=True)
        ]

    def run(self, running: bool) -> None:
        """Stop or resume generation; call `advance` first."""
        self._running = running

    def crowd(self, crowding: float) -> None:
        """From now on each resident weighs as much as `crowding` on a whole cell, part of whose
        engines are dead; call `advance` first."""
        self._crowding = crowding
        self._changed()

    def cycle_s(self, tool_s: float, num_residents: int) -> float:
        """Seconds of a call and its tool with so many residents."""
        return self._call_s(num_residents) + tool_s

    def next_finish(self) -> tuple[float, int]:
        """When the next execution ends, by its last call or its time-out, and which."""
        if not self.ids:
            return NEVER, -1
        ends = self._deadlines
        if self._running:
            now = self._now
            ends = [
                min(now + calls * cycle, deadline)
                for calls, cycle, deadline in zip(
                    self._calls_left, self._cycle_s, self._deadlines, strict=True
                )
            ]
        first = min(ends)
        return max(first, self._now), self.ids[ends.index(first)]

    def _changed(self) -> None:
        call_s = self._call_s(len(self.ids))
        self._cycle_s = [call_s + tool_s for tool_s in self._tool_s]

    def _call_s(self, num_residents: int) -> float:
        return self._serving.call_s(max(round(num_residents * self._crowding), 1))
