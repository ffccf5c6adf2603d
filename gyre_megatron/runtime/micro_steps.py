"""The queue of micro-steps that training cells claim.

Cells that joined earlier or run faster take more, and all finish together. Invariant: a micro-step
is waiting, claimed by exactly one cell, or done; the order of admission is the order of claims.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from gyre_megatron.errors import CellError


class MicroStepQueue:
    """First in, first out; one entry is the bins of one micro-step (`PackedBin.to_bytes`)."""

    def __init__(self) -> None:
        self._waiting: deque[list[bytes]] = deque()
        self._claimed: dict[int, int] = {}
        self._next_claim = 0

    def put(self, micro_steps: Iterable[list[bytes]]) -> None:
        """Add micro-steps of the step in progress."""
        self._waiting.extend(micro_steps)

    def claim(self, cell: int) -> tuple[int, list[bytes]] | None:
        """Give the oldest waiting micro-step to `cell`: (claim number, bins), or None if none
        waits."""
        if not self._waiting:
            return None
        claim = self._next_claim
        self._next_claim += 1
        self._claimed[claim] = cell
        return claim, self._waiting.popleft()

    def done(self, claim: int, cell: int) -> None:
        """The claimed micro-step was trained.

        Raises:
            CellError: `cell` does not hold that claim.
        """
        if self._claimed.get(claim) != cell:
            raise CellError(f"cell {cell} reported micro-step {claim}, which it did not claim")
        del self._claimed[claim]

    @property
    def num_open(self) -> int:
        """Micro-steps waiting or claimed."""
        return len(self._waiting) + len(self._claimed)
