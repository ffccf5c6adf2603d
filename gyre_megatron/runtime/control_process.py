"""Rank 0's handle on the control plane's process: start it, learn its address, wait for its end."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from gyre_megatron.errors import CellError
from gyre_megatron.processes import child_environment
from gyre_megatron.runtime.run_directory import RunDirectory

END_TIMEOUT_S = 60.0


@dataclass(frozen=True)
class Endpoint:
    """Where the control plane listens, and the token that cells show it."""

    url: str
    token: str


class ControlProcess:
    """The control plane in a process of its own; it dies with the process that started it.

    Args:
        config_arguments: words that load the configuration (`--config FILE --set a.b=c`).
        checkpoint: the model's Hugging Face directory, for the tokenizer.
        ranks_per_cell: ranks in a cell.
        resume: go on with the run in `directory`.
        directory: the run's directory; the control plane takes its lock.
    """

    def __init__(
        self,
        config_arguments: list[str],
        checkpoint: Path,
        ranks_per_cell: int,
        resume: bool,
        directory: RunDirectory,
    ) -> None:
        self._directory = directory
        words = [sys.executable, "-m", "gyre_megatron.runtime.service", *config_arguments]
        words += ["--checkpoint", str(checkpoint), "--ranks-per-cell", str(ranks_per_cell)]
        words += ["--resume"] if resume else []
        self._process = subprocess.Popen(words, stdin=subprocess.DEVNULL, env=child_environment())

    def wait_until_ready(self, timeout_s: float) -> Endpoint:
        """Block until the control plane listens.

        Raises:
            CellError: its process ended (it has printed why) or the time limit passed.
        """
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            if self._process.poll() is not None:
                raise CellError("the control plane did not start; its error is above")
            if (endpoint := self._read_endpoint()) is not None:
                return endpoint
            time.sleep(0.05)
        raise CellError(
            f"the control plane was not ready after cluster.start_timeout_s={timeout_s} s"
        )

    def _read_endpoint(self) -> Endpoint | None:
        file = self._directory.endpoint_file
        if not file.exists():
            return None
        value = json.loads(file.read_text())
        return Endpoint(value["url"], value["token"]) if value["pid"] == self._process.pid else None

    def wait(self) -> None:
        """Let the control plane write its last files and end.

        Raises:
            CellError: it ended with an error, or not in time.
        """
        try:
            code = self._process.wait(END_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            raise CellError(
                f"the control plane did not end within {END_TIMEOUT_S} s after the run"
            ) from None
        if code != 0:
            raise CellError(f"the control plane ended with exit code {code}; its error is above")

    def stop(self) -> None:
        """End the process if it still runs."""
        if self._process.poll() is None:
            self._process.terminate()
            try:
                self._process.wait(10)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
