"""TensorBoard events, one scalar for each number of a step record.

Invariant: the folder holds each step once. Event files can only be appended to, so a resumed run
writes the records that it keeps again, into a file of its own, and removes the older ones.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tensorboard.summary import Writer

_NO_SCALARS = ("step", "time")


class TensorBoardEvents:
    """Writes the scalars of one run.

    Args:
        folder: where event files go; those of earlier processes are replaced.
        records: step records that the run goes on from.
    """

    def __init__(self, folder: Path, records: Iterable[dict[str, Any]]) -> None:
        older = list(folder.glob("events.out.tfevents.*"))
        self._writer = Writer(str(folder))
        for record in records:
            self.step(record)
        self._writer.flush()
        for file in older:  # only now: a kill in between leaves steps twice rather than never
            file.unlink()

    def step(self, record: dict[str, Any]) -> None:
        """Add one step record."""
        for name, value in record.items():
            if isinstance(value, (int, float)) and name not in _NO_SCALARS:
                self._writer.add_scalar(name, value, record["step"], wall_time=record["time"])

    def close(self) -> None:
        """Flush and close."""
        self._writer.close()
