"""What a policy answers."""

from __future__ import annotations

from typing import NamedTuple


class Wanted(NamedTuple):
    """A policy's wish for this moment.

    Attributes:
        prefix: number of cells that should train.
        max_waterlevel: unfinished executions beyond which nothing more is dispatched than the next
            burst needs; None dispatches to the full depth.
    """

    prefix: int
    max_waterlevel: int | None = None
