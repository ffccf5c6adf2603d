"""Commands to the loader inside one SGLang server, and the order in which an install holds and
frees the engine.

An install ends in one of three ways, and says in which: committed, not committed, or unknown. The
permit decides: a file that either an engine rank renames as it commits, or the publisher as it
gives up, never both.
"""

from __future__ import annotations

import base64
import contextlib
import io
import os
import time
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing

from gyre_megatron.config.model import Architecture
from gyre_megatron.config.weights import WeightsConfig
from gyre_megatron.errors import EngineError
from gyre_megatron.weights.direct import Sums
from gyre_megatron.weights.engine import Outcome, ServingEngine, State
from gyre_megatron.weights.messages import (
    CLAIMED_FILE,
    PERMIT_FILE,
    REVOKED_FILE,
    STATUS_FILE,
    Command,
    Status,
    decode_status,
    encode,
)
from gyre_megatron.weights.shared_memory import OwnedDirectory, sweep

_PREFIX = "gyre-weights-"
_POLL_S = 0.01
_SHORTEST_CALL_S = 2.0
"""Also after the time limit: what frees the engine must be asked for."""
_RESERVED_S = 3.0
"""Of the time to settle, for asking the engine to go on and what it serves."""


class EngineInstaller:
    """Talks to one server; used by the cell's leader only.

    Args:
        engine: the server.
        config: time limit, shared memory, and how generation is held.
    """

    def __init__(self, engine: ServingEngine, config: WeightsConfig) -> None:
        self._engine = engine
        self._config = config
        self._serial = 0
        self._commit_serial = 0
        self._owned: OwnedDirectory | None = None
        self._deadline = 0.0

    @property
    def directory(self) -> Path:
        """Where the shadow and the answers lie while this publisher is attached."""
        if self._owned is None:
            raise EngineError("the engine's memory is not attached; attach first")
        return self._owned.path

    def attach(self, architecture: Architecture) -> list[Status]:
        """Have every rank describe its parameters and make its shadow. Generation is held
        meanwhile: a command to an engine that generates would wait for all its calls.

        Returns:
            Each rank's answer: its tensors and local boxes.

        Raises:
            EngineError: the engine cannot take these weights, or does not answer.
        """
        self.discard()
        self._start_clock(self._config.timeout_s)
        sweep(self._config.shared_memory_dir, _PREFIX)
        self._owned = OwnedDirectory(self._config.shared_memory_dir, _PREFIX)
        self._post("/pause_generation", {"mode": self._config.pause_mode})
        try:
            self._begin_session()
            try:
                return self.command("attach", architecture=architecture.model_dump(mode="json"))
            finally:
                self._post("/end_weight_update", {})
        finally:
            self._post("/continue_generation", {})

    def install(
        self, version: int, sums: list[Sums] | None, limit_s: float, settle_s: float
    ) -> Outcome:
        """Verify what was assembled, then commit it on every rank and only then record the version.

        Args:
            sums: every rank's checksums, of every tensor; None leaves the comparison out.
            limit_s: seconds within which it commits, or gives up.
            settle_s: seconds more to learn how a commit ended whose answer did not come.
        """
        self._start_clock(limit_s)
        permit = self.directory / PERMIT_FILE
        for file in (PERMIT_FILE, CLAIMED_FILE, REVOKED_FILE):  # of the install before
            (self.directory / file).unlink(missing_ok=True)
        problem = ""
        try:
            self._post("/pause_generation", {"mode": self._config.pause_mode})
            self._begin_session()
            self.command("verify", checksums=sums)
            if time.monotonic() > self._deadline:
                raise EngineError("the time limit passed before the commit")
            permit.touch()
            self._commit_serial = self._serial + 1
            self.command("commit")
            self._seal(version)
        except EngineError as error:
            problem = str(error)
        self._start_clock(settle_s)
        state: State = self._settle(version) if problem else "committed"
        return self._resume(state, problem, version)

    def unlink(self) -> None:
        """Remove the shadow's files once all have mapped them; the memory lives on with the
        mappings."""
        for file in self.directory.glob("shadow.*"):
            file.unlink()

    def discard(self) -> None:
        """Forget the shadow; commands that the engine has not run yet become stale, and the next
        install attaches afresh."""
        if self._owned is not None:
            self._owned.close()
            self._owned = None

    # -- commands ---------------------------------------------------

    def command(
        self,
        op: str,
        weight_version: str | None = None,
        architecture: dict[str, Any] | None = None,
        checksums: list[Sums] | None = None,
    ) -> list[Status]:
        """Run one loader command on every rank and collect the answers.

        Raises:
            EngineError: the server refused, or a rank answered with an error; the message holds it.
        """
        self._serial += 1
        body = Command(op, str(self.directory), self._serial, architecture, checksums)
        payload = io.BytesIO()
        ForkingPickler(payload).dump([(encode(body).decode(), torch.empty(0))])
        text = base64.b64encode(payload.getvalue()).decode()
        request: dict[str, Any] = {
            "serialized_named_tensors": [text] * self._engine.tp,
            "load_format": self._engine.loader,
            "flush_cache": weight_version is not None,
        }
        if weight_version is not None:
            request["weight_version"] = weight_version
        self._post("/update_weights_from_tensor", request)
        return [self._answer(op, rank) for rank in range(self._engine.tp)]

    def _answer(self, op: str, rank: int) -> Status:
        answer = self._status(rank)
        if answer is None or answer.serial != self._serial:
            raise EngineError(
                f"engine rank {rank} did not run {op}; start the server with "
                f"--custom-weight-loader {self._engine.loader} and share "
                f"{self._config.shared_memory_dir} with it"
            )
        if not answer.ok:
            raise EngineError(f"engine rank {rank} refused {op}: {answer.error}")
        return answer

    def _status(self, rank: int) -> Status | None:
        try:
            return decode_status((self.directory / STATUS_FILE.format(rank=rank)).read_bytes())
        except FileNotFoundError:
            return None

    def _begin_session(self) -> None:
        """Open a weight-update session of SGLang; one that was left open is closed first."""
        try:
            self._post("/begin_weight_update", {})
        except EngineError as error:
            if "already open" not in str(error):
                raise
            self._post("/end_weight_update", {})
            self._post("/begin_weight_update", {})

    def _seal(self, version: int) -> None:
        self.command("seal", weight_version=str(version))
        self._post("/end_weight_update", {})

    # -- after a problem ---------------------------------------------------

    def _settle(self, version: int) -> State:
        """How an install ended in which something went wrong."""
        try:
            os.rename(self.directory / PERMIT_FILE, self.directory / REVOKED_FILE)
            return "not committed"
        except FileNotFoundError:
            if not (self.directory / CLAIMED_FILE).exists():
                return "not committed"  # the permit was never given
        answers = self._late_answers()
        if not all(answer is not None and answer.ok for answer in answers):
            return "unknown"
        # All have the new weights. What is missing is the record, or the flush of the old cache.
        with contextlib.suppress(EngineError):
            self._seal(version)
            return "committed"
        return "unknown"

    def _late_answers(self) -> list[Status | None]:
        """Every rank's answer to the commit, where it comes before the time limit."""
        while True:
            answers = [self._status(rank) for rank in range(self._engine.tp)]
            late = [a for a in answers if a is None or a.serial < self._commit_serial]
            if not late or time.monotonic() > self._deadline - _RESERVED_S:
                return [None if a in late else a for a in answers]
            time.sleep(_POLL_S)

    def _resume(self, state: State, problem: str, version: int) -> Outcome:
        """Let generation go on, unless the engine may hold a mixture of two versions."""
        if state == "unknown":
            # Whoever reads the version, of a call or of the server, sees that it is none.
            self._try(
                "/update_weight_version",
                {"new_version": f"{version}-incomplete", "abort_all_requests": False},
            )
            return Outcome(state, problem, self._served(), held=True)
        if problem:
            self._try("/end_weight_update", {})
        failure = self._try("/continue_generation", {})
        if failure:
            failure = self._try("/continue_generation", {})
        if failure:
            problem = f"{problem}; {failure}" if problem else failure
        served = self._served() if problem else None
        return Outcome(state, problem, served, held=bool(failure))

    def _served(self) -> str | None:
        """The version that the engine says it serves."""
        try:
            answer = self._engine.http.get("/model_info", self._seconds_left())
        except EngineError:
            return None
        return str(answer["weight_version"])

    def _try(self, path: str, body: dict[str, Any]) -> str:
        """POST; returns the error as text, empty if there was none."""
        try:
            self._post(path, body)
        except EngineError as error:
            return str(error)
        return ""

    # -- HTTP ---------------------------------------------------

    def _start_clock(self, limit_s: float) -> None:
        self._deadline = time.monotonic() + limit_s

    def _seconds_left(self) -> float:
        return max(_SHORTEST_CALL_S, self._deadline - time.monotonic())

    def _post(self, path: str, body: dict[str, Any]) -> None:
        self._engine.http.post(path, body, self._seconds_left())
