"""Commands to the loader inside one SGLang server, and the order in which an install holds and
frees the engine."""

from __future__ import annotations

import base64
import contextlib
import io
import json
import os
import shutil
import tempfile
import weakref
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.multiprocessing

from gyre_megatron.config.model import Architecture
from gyre_megatron.config.weights import WeightsConfig
from gyre_megatron.errors import EngineError
from gyre_megatron.weights.shadow import STATUS_FILE


class EngineHttp(Protocol):
    """What an install needs of the engine's HTTP client; `engines.client` has the real one."""

    @property
    def url(self) -> str: ...

    def post(
        self, path: str, body: Mapping[str, Any] | None = None, timeout_s: float = 120.0
    ) -> Any:
        """POST a JSON body and wait; EngineError where the engine refuses or does not answer."""


@dataclass(frozen=True)
class ServingEngine:
    """An SGLang server that takes weights.

    Attributes:
        http: its client.
        tp: its tensor-parallel size.
        loader: dotted name of the function that it runs in its own processes, as it was given to
            `--custom-weight-loader`.
    """

    http: EngineHttp
    tp: int
    loader: str


_PREFIX = "gyre-weights-"


def sweep(folder: Path) -> None:
    """Remove what publishers that were killed left in shared memory: their status files."""
    for left in folder.glob(f"{_PREFIX}*"):
        owner = left.name.removeprefix(_PREFIX).split("-")[0]
        if not (owner.isdigit() and Path(f"/proc/{owner}").exists()):
            shutil.rmtree(left, ignore_errors=True)


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
        self.directory: Path | None = None

    def attach(self, architecture: Architecture) -> list[dict[str, Any]]:
        """Have every rank describe its parameters and make its shadow.

        Returns:
            Each rank's answer: its tensors and pieces.
        """
        self.discard()
        sweep(Path(self._config.shared_memory_dir))
        prefix = f"{_PREFIX}{os.getpid()}-"
        self.directory = Path(tempfile.mkdtemp(prefix=prefix, dir=self._config.shared_memory_dir))
        self._finalizer = weakref.finalize(self, shutil.rmtree, self.directory, ignore_errors=True)
        with self._session():
            return self.command("attach", architecture=architecture.model_dump(mode="json"))

    def install(self, version: int, sums: list[dict[str, int]] | None) -> list[dict[str, Any]]:
        """Verify what was assembled, then commit it on every rank and only then record the version.

        Raises:
            EngineError: the engine refused or a rank did not verify; the old version keeps serving.
        """
        with self._paused(), self._session():
            self.command("verify", checksums=sums)
            answers = self.command("commit")
            self.command("seal", weight_version=str(version))
            return answers

    def unlink(self) -> None:
        """Remove the shadow's files once all have mapped them; the memory lives on with the
        mappings."""
        if self.directory is not None:
            for file in self.directory.glob("shadow.*"):
                file.unlink()

    def discard(self) -> None:
        """Forget the shadow; the next install attaches afresh."""
        if self.directory is not None:
            self._finalizer()
            self.directory = None

    def command(
        self, op: str, weight_version: str | None = None, **arguments: Any
    ) -> list[dict[str, Any]]:
        """Run one loader command on every rank and collect the answers.

        Raises:
            EngineError: the server refused, or a rank answered with an error; the message holds it.
        """
        assert self.directory is not None
        self._serial += 1
        body = {"op": op, "directory": str(self.directory), "serial": self._serial, **arguments}
        payload = io.BytesIO()
        ForkingPickler(payload).dump([(json.dumps(body), torch.empty(0))])
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

    def _answer(self, op: str, rank: int) -> dict[str, Any]:
        assert self.directory is not None
        path = self.directory / STATUS_FILE.format(rank=rank)
        answer = json.loads(path.read_text()) if path.is_file() else {}
        if answer.get("serial") != self._serial:
            raise EngineError(
                f"engine rank {rank} did not run {op}; start the server with "
                f"--custom-weight-loader {self._engine.loader} and share "
                f"{self._config.shared_memory_dir} with it"
            )
        if not answer["ok"]:
            raise EngineError(f"engine rank {rank} refused {op}: {answer['error']}")
        return answer

    @contextlib.contextmanager
    def _session(self) -> Iterator[None]:
        """A weight-update session of SGLang; a stale one is closed first, ours is always closed."""
        if not self._try("/begin_weight_update"):
            self._post("/end_weight_update", {})
            self._post("/begin_weight_update", {})
        try:
            yield
        finally:
            self._post("/end_weight_update", {})

    @contextlib.contextmanager
    def _paused(self) -> Iterator[None]:
        """Hold generation; it always goes on afterwards, also after an error."""
        self._post("/pause_generation", {"mode": self._config.pause_mode})
        try:
            yield
        finally:
            self._post("/continue_generation", {})

    def _try(self, path: str) -> bool:
        try:
            self._post(path, {})
        except EngineError as error:
            if "already open" not in str(error):
                raise
            return False
        return True

    def _post(self, path: str, body: dict[str, Any]) -> None:
        self._engine.http.post(path, body, self._config.timeout_s)
