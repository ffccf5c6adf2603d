"""Small agreements between the processes of a swap over torch.distributed's key-value store.

Process 0 collects what everybody says and hands the collection out, so that an exchange costs each
process one write and one read, and all who hear an answer hear the same one.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping
from datetime import timedelta

import msgspec
import torch.distributed as dist

from gyre_megatron.errors import TransferError

_KEPT_KEYS = 16
"""Collections that stay in the store for processes that read late."""
_GRACE_S = 5.0
"""How much longer the others wait than process 0: it is to be heard when it names who is silent."""
_LONGEST_ERROR = 2000


class WaitError(TransferError):
    """A wait for another process ended without what was waited for: somebody else failed first."""


class _Saying(msgspec.Struct, array_like=True):
    """What one process says in an exchange; `error` is empty where it succeeded."""

    payload: bytes = b""
    error: str = ""
    at: float = 0.0
    """When the error happened, in seconds since the epoch."""
    waited: bool = False
    """The error is a `WaitError`: a consequence, not a cause."""


_encode = msgspec.msgpack.Encoder().encode
_decode_one = msgspec.msgpack.Decoder(_Saying).decode
_decode_all = msgspec.msgpack.Decoder(list[_Saying | None]).decode


class Rendezvous:
    """Exchanges among `num_processes`, grouped in numbered undertakings that every process starts
    alike.

    Inside an undertaking all call the same methods in the same order. One that fell behind or gave
    up earlier than the others is back in step with the next `start`. A process that does not answer
    within `timeout_s` counts as failed.
    """

    def __init__(
        self, kv_store: dist.Store, process: int, num_processes: int, timeout_s: float
    ) -> None:
        self.kv_store = kv_store
        self.process = process
        self.num_processes = num_processes
        self.timeout_s = timeout_s
        self.undertaking = 0
        self._deadline: float | None = None
        self._round = 0
        self._handed_out: deque[str] = deque()

    def start(self, number: int | None = None, limit_s: float | None = None) -> None:
        """Begin the next undertaking.

        Args:
            number: its number where the caller counts; greater than all before.
            limit_s: seconds for all its exchanges together; default: `timeout_s` for each.
        """
        self.undertaking = self.undertaking + 1 if number is None else number
        self._deadline = None if limit_s is None else time.monotonic() + limit_s
        self._round = 0

    @property
    def seconds_left(self) -> float:
        """Until an exchange that begins now is given up."""
        if self._deadline is None:
            return self.timeout_s
        return max(0.0, self._deadline - time.monotonic())

    def agree(self, failure: BaseException | None, what: str) -> None:
        """Go on only if no process failed.

        Raises:
            TransferError: the same on all processes; it names the one that failed first.
        """
        self.exchange(what, failure)

    def exchange(
        self,
        what: str,
        failure: BaseException | None = None,
        payload: bytes = b"",
        longer_s: float = 0.0,
    ) -> list[bytes]:
        """Give `payload`, get everyone's, in the order of the processes.

        Args:
            what: what is being done, for the message.
            failure: this process's error, if it failed.
            longer_s: wait so much longer than usual.

        Raises:
            TransferError: a process failed or did not answer; the message names the one that failed
                first.
        """
        said = self._everybody(_saying(failure, payload), what, longer_s)
        silent = [process for process, one in enumerate(said) if one is None]
        failed = {process: one for process, one in enumerate(said) if one is not None and one.error}
        if silent or failed:
            reason = _blame(silent, failed, self.timeout_s)
            raise TransferError(f"{what} was given up: {reason}") from failure
        return [one.payload for one in said if one is not None]

    def _everybody(self, mine: _Saying, what: str, longer_s: float) -> list[_Saying | None]:
        self._round += 1
        key = f"{self.undertaking}.{self._round}."
        deadline = time.monotonic() + self.seconds_left + longer_s
        if self.process != 0:
            self._set(f"{key}{self.process}", _encode(mine))
            everything = self._get(f"{key}all", deadline + _GRACE_S)
            if everything is None:
                raise TransferError(
                    f"{what} was given up: process 0, which collects the answers, did not answer "
                    f"in {self.timeout_s:g} s"
                )
            return _decode_all(everything)
        said: list[_Saying | None] = [mine]
        for process in range(1, self.num_processes):
            answer = self._get(f"{key}{process}", deadline)
            said.append(None if answer is None else _decode_one(answer))
            if answer is not None:
                self.kv_store.delete_key(f"{key}{process}")
        if self.num_processes > 1:
            self._set(f"{key}all", _encode(said))
            self._handed_out.append(f"{key}all")
            if len(self._handed_out) > _KEPT_KEYS:
                self.kv_store.delete_key(self._handed_out.popleft())
        return said

    def _set(self, key: str, value: bytes) -> None:
        self.kv_store.set(key, value)  # type: ignore[arg-type]

    def _get(self, key: str, deadline: float) -> bytes | None:
        left = max(0.01, deadline - time.monotonic())
        try:
            self.kv_store.wait([key], timedelta(seconds=left))
            return self.kv_store.get(key)
        except RuntimeError:  # DistStoreError, or what a FileStore raises at its timeout
            return None


def _saying(failure: BaseException | None, payload: bytes) -> _Saying:
    if failure is None:
        return _Saying(payload)
    text = f"{type(failure).__name__}: {failure}"[:_LONGEST_ERROR]
    return _Saying(b"", text, time.time(), isinstance(failure, WaitError))


def _blame(silent: list[int], failed: Mapping[int, _Saying], timeout_s: float) -> str:
    """Who failed first; those that only waited for it are named where nobody else can be."""
    causes = {process: one for process, one in failed.items() if not one.waited}
    quiet = f"processes {silent} did not answer in {timeout_s:g} s"
    if silent and not causes:
        return quiet
    candidates = causes or dict(failed)
    first = min(candidates, key=lambda process: candidates[process].at)
    reason = f"process {first} failed first: {candidates[first].error}"
    return f"{reason}; {quiet}" if silent else reason
