"""Small agreements between the processes of a swap over a torch.distributed store: exchange, vote,
announce."""

from __future__ import annotations

import time
from collections import deque
from datetime import timedelta

import torch.distributed as dist

from gyre_megatron.errors import TransferError

_KEPT_KEYS = 16
"""Keys that stay in the store for processes that read late."""


class Rendezvous:
    """Exchanges among `num_processes`, grouped in numbered undertakings that every process starts
    alike.

    Inside an undertaking all call the same methods in the same order. One that fell behind or gave
    up earlier than the others is back in step with the next `start`. A process that does not answer
    within `timeout_s` counts as failed.
    """

    def __init__(
        self, store: dist.Store, process: int, num_processes: int, timeout_s: float
    ) -> None:
        self.store, self.process, self.num_processes, self.timeout_s = (
            store,
            process,
            num_processes,
            timeout_s,
        )
        self._undertaking, self._round = 0, 0
        self._set: deque[str] = deque()

    def start(self) -> None:
        """Begin the next undertaking."""
        self._undertaking += 1
        self._round = 0

    def exchange(self, mine: bytes) -> list[bytes | None]:
        """Give `mine`, get everyone's; None for a process that stayed silent."""
        self._round += 1
        prefix, deadline = f"{self._undertaking}.{self._round}.", time.monotonic() + self.timeout_s
        self.store.set(f"{prefix}{self.process}", mine)  # type: ignore[arg-type]
        self._set.append(f"{prefix}{self.process}")
        answers: list[bytes | None] = []
        for process in range(self.num_processes):
            left = max(0.01, deadline - time.monotonic())
            try:
                self.store.wait([f"{prefix}{process}"], timedelta(seconds=left))
                answers.append(self.store.get(f"{prefix}{process}"))
            except RuntimeError:  # DistStoreError, or what a FileStore raises at its timeout
                answers.append(None)
        if len(self._set) > _KEPT_KEYS:
            self.store.delete_key(self._set.popleft())
        return answers

    def agree(self, failure: BaseException | None, what: str) -> None:
        """Go on only if no process failed.

        Raises:
            TransferError: the same on all processes, naming those that failed or stayed silent.
        """
        verdicts = self.exchange(b"" if failure is None else repr(failure).encode()[:500])
        silent = [p for p, verdict in enumerate(verdicts) if verdict is None]
        failed = {
            p: verdict.decode(errors="replace") for p, verdict in enumerate(verdicts) if verdict
        }
        if silent or failed:
            why = (
                f"processes {silent} did not answer in {self.timeout_s} s"
                if silent
                else f"failures: {failed}"
            )
            raise TransferError(
                f"{what} was given up: {why}; the previous weights stay in place"
            ) from failure
