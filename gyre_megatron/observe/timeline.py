"""timeline.jsonl: every change of a role, of the waterlevel and of the run's totals, with its time.

The one owner of the totals: a count is in the file before it is anywhere else, so `/status`, the
step records, the summary and a resumed run read the same numbers. The file is appended to for the
whole life of a run, resumed parts included.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Literal, get_args

from gyre_megatron import metrics
from gyre_megatron.observe.json_lines import Record, open_to_append, read_lines, write_line
from gyre_megatron.scheduler import CellRole

TotalName = Literal["role_switches", "rerouted_calls", "lost_calls", "harness_errors"]
TOTALS: tuple[TotalName, ...] = get_args(TotalName)


class Timeline:
    """Appends to the timeline of one run and keeps its totals.

    Args:
        file: timeline.jsonl; totals go on from the last ones in it.
    """

    def __init__(self, file: Path) -> None:
        self._totals = totals_of(read_lines(file))
        self._output = open_to_append(file)
        for name, value in self._totals.items():
            metrics.totals[name].set(value)

    @property
    def totals(self) -> dict[str, int]:
        """Counts over the whole run."""
        return dict(self._totals)

    def count(self, name: TotalName) -> None:
        """One more of `name`."""
        self._totals[name] += 1
        metrics.totals[name].set(self._totals[name])
        self._write({name: self._totals[name]})

    def role(self, cell: int, role: CellRole) -> None:
        """A cell has a role from now on."""
        self._write({"cell": cell, "role": str(role)})

    def waterlevel(self, waterlevel: int) -> None:
        """The waterlevel changed."""
        self._write({"waterlevel": waterlevel})

    def close(self) -> None:
        """Close the file."""
        self._output.close()

    def _write(self, change: Record) -> None:
        write_line(self._output, {"time": time.time(), **change})


def totals_of(events: list[Record]) -> dict[str, int]:
    """The totals at the end of a timeline."""
    totals: dict[str, int] = dict.fromkeys(TOTALS, 0)
    for event in events:
        totals.update({name: event[name] for name in TOTALS if name in event})
    return totals
