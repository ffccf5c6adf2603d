"""The real control plane in its own process, with cells that speak the real protocol but hold no
model.

Cells are threads: each fetches orders over HTTP, keeps count of the micro-steps whose gradients it
would hold, and reports. Engines are scripted, harnesses are real processes that call the real proxy.
Everything that a scheduler can get wrong with real cells, it gets wrong here, in seconds.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import requests
import yaml

from gyre_megatron.errors import CellError
from gyre_megatron.runtime.control_client import ControlClient
from gyre_megatron.runtime.protocol import (
    INSTALL_SECONDS,
    LOGPROB_GAP,
    TRANSFER_SECONDS,
    Register,
    Report,
    envelope_decoder,
)
from gyre_megatron.scheduler.orders import (
    CellOrder,
    Checkpoint,
    FinishStep,
    Leave,
    MicroStep,
    Publish,
    Return,
    Stop,
    Sync,
    Wait,
)
from tests.support.checkpoints import make_checkpoint
from tests.support.scripted_engine import ScriptedEngine, chain_policy

ROOT = Path(__file__).parents[2]

HARNESS = """
import json, os, sys, time, urllib.request
index = int(os.environ["GYRE_EXECUTION"].rsplit(".", 1)[1])
history = [{"role": "user", "content": "begin"}]
for _ in range(2):
    body = {"model": "m", "max_tokens": 12, "messages": history}
    request = urllib.request.Request(
        os.environ["ANTHROPIC_BASE_URL"] + "/v1/messages",
        json.dumps(body).encode(),
        {"authorization": "Bearer " + os.environ["ANTHROPIC_AUTH_TOKEN"],
         "content-type": "application/json"},
    )
    answer = json.load(urllib.request.urlopen(request, timeout=60))
    history += [{"role": "assistant", "content": answer["content"]},
                {"role": "user", "content": "go on"}]
    time.sleep(float(os.environ["TOOL_DELAY_S"]) * index)
open("score.txt", "w").write(str(index % 2))
sys.exit(index == 3)
"""
"""Executions of a group end one after another, every second one with a reward, the fourth with an
error of its own."""

SCORE = """
def score(work, task):
    return float((work / "score.txt").read_text())
"""


ARCHITECTURE = {
    "model_type": "qwen3",
    "vocab_size": 512,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    "max_position_embeddings": 8192,
    "tie_word_embeddings": False,
}


class ScriptedCell(threading.Thread):
    """A cell without a model.

    Attributes:
        orders: orders that were carried out, in order.
        gradients: micro-steps whose gradients this cell holds.
    """

    def __init__(self, cluster: ScriptedCluster, cell: int) -> None:
        super().__init__(name=f"cell{cell}", daemon=True)
        self.cluster = cluster
        self.cell = cell
        self.orders: list[CellOrder] = []
        self.gradients = 0
        self.version = cluster.start_step
        self.reason: str | None = None

    def run(self) -> None:
        client = ControlClient(self.cluster.url, self.cluster.token, self.cell, poll_s=1.0)
        engine = self.cluster.engines[self.cell].url
        try:
            client.register(
                Register(engine, self.version, 0.0, self.cluster.pulls and self.cell > 0)
            )
            while self.reason is None:
                envelope = envelope_decoder.decode(client.next_order())
                if isinstance(envelope.order, Stop):
                    self.reason = envelope.order.reason
                elif not isinstance(envelope.order, Wait):
                    metrics = self._carry_out(envelope.order)
                    client.report(Report(envelope.order_id, metrics, 0.01))
        except CellError as error:  # the control plane was killed
            self.reason = str(error)

    def _carry_out(self, order: CellOrder) -> dict[str, float]:
        self.orders.append(order)
        installed = {INSTALL_SECONDS: self.cluster.install_s, LOGPROB_GAP: 0.0}
        match order:
            case MicroStep():
                time.sleep(self.cluster.micro_step_s)
                self.gradients += 1
                return {"loss": 1.0}
            case Leave():
                self.gradients = 0
            case Sync(cells, version):
                if self.cell in cells:
                    self.gradients = 0
                    self.version = version
            case FinishStep(step, _, _):
                with self.cluster.lock:
                    self.cluster.reduced[step] += self.gradients
                self.gradients = 0
                self.version = step if self.cell == 0 else self.version
            case Publish(version, install_in):
                self.version = version
                installed = installed if self.cell in install_in else {}
                return {TRANSFER_SECONDS: self.cluster.transfer_s, **installed}
            case Return(_, version):
                assert version == self.version
                return installed
            case Checkpoint(step):
                staging = self.cluster.directory / "checkpoints" / f"step_{step:06d}.part"
                (staging / "weights").write_text(str(step))
        return {}


class ScriptedCluster:
    """One run with its engines, cells and control plane.

    Attributes:
        reduced: micro-steps whose gradients reached the core, by step.
        pulls: whether satellites take the core's weights without its help.
    """

    def __init__(self, folder: Path, num_cells: int, settings: dict[str, Any]) -> None:
        self.directory = folder / "run"
        self.num_cells = num_cells
        self.micro_step_s = 0.02
        self.transfer_s = 0.25
        self.install_s = 0.5
        self.pulls = False
        self.lock = threading.Lock()
        self.reduced: Counter[int] = Counter()
        self.start_step = 0
        self.cells: list[ScriptedCell] = []
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, daemon=True).start()
        self.engines = [
            self._on_loop(ScriptedEngine(chain_policy(), token_delay_s=0.002).start())
            for _ in range(num_cells)
        ]
        self.checkpoint = make_checkpoint(folder / "checkpoint")
        (self.checkpoint / "config.json").write_text(json.dumps(ARCHITECTURE))
        self.config_file = folder / "run.yaml"
        self._write_config(folder, settings)
        self._process: subprocess.Popen[bytes] | None = None
        self._output = folder / "output.txt"

    def _write_config(self, folder: Path, settings: dict[str, Any]) -> None:
        task = folder / "tasks" / "one"
        task.mkdir(parents=True)
        (task / "harness.py").write_text(HARNESS)
        (task / "score.py").write_text(SCORE)
        evaluator = {"kind": "python", "function": "score.py:score"}
        fields = {"prompt": "p", "command": f"{sys.executable} -S -E {task}/harness.py"}
        (task / "task.yaml").write_text(yaml.safe_dump({**fields, "evaluator": evaluator}))
        config: dict[str, Any] = {
            "model.checkpoint": str(self.checkpoint),
            "run.root": str(folder),
            "run.name": "run",
            "run.tensorboard": True,
            "cluster.num_cells": self.num_cells,
            "cluster.order_poll_s": 1.0,
            "rollout.harness.tasks": str(folder / "tasks"),
            "rollout.harness.environment": {"TOOL_DELAY_S": "0.0"},
            "training.token_budget": 128,
            **settings,
        }
        nested: dict[str, Any] = {}
        for key, value in config.items():
            *path, last = key.split(".")
            section = nested
            for part in path:
                section = section.setdefault(part, {})
            section[last] = value
        self.config_file.write_text(yaml.safe_dump(nested))

    def _on_loop(self, work) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(30)

    @property
    def output(self) -> str:
        return self._output.read_text(errors="replace")

    def start(self, *words: str, start_step: int = 0) -> None:
        """Start the control plane and its cells; `words` are more arguments."""
        self.start_step = start_step
        self.launch(*words)
        endpoint = self.directory / "control_plane.json"
        deadline = time.monotonic() + 60
        while not self._listens(endpoint):
            assert self._process.poll() is None and time.monotonic() < deadline, self.output
            time.sleep(0.05)
        self.cells = [ScriptedCell(self, cell) for cell in range(self.num_cells)]
        for cell in self.cells:
            cell.start()

    def launch(self, *words: str) -> None:
        """Start the control plane's process alone."""
        command = [sys.executable, "-m", "gyre_megatron.runtime.service"]
        command += ["--config", str(self.config_file), "--checkpoint", str(self.checkpoint)]
        command += ["--ranks-per-cell", "1", *words]
        with self._output.open("wb") as output:
            self._process = subprocess.Popen(
                command, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=output, stderr=output
            )

    def _listens(self, endpoint: Path) -> bool:
        if not endpoint.exists():
            return False
        value = json.loads(endpoint.read_text())
        self.url, self.token = value["url"], value["token"]
        return value["pid"] == self._process.pid

    def status(self) -> dict[str, Any]:
        return requests.get(f"{self.url}/status", timeout=5).json()

    def wait_until(self, reached, timeout_s: float = 60.0) -> dict[str, Any]:
        """The first status page for which `reached(status)` holds."""
        deadline = time.monotonic() + timeout_s
        while not reached(status := self.status()):
            assert self._process.poll() is None and time.monotonic() < deadline, self.output
            time.sleep(0.02)
        return status

    def wait(self, timeout_s: float = 90.0) -> int:
        """The exit status of the control plane."""
        code = self._process.wait(timeout_s)
        for cell in self.cells:
            cell.join(10)
        return code

    def kill(self) -> None:
        """Signal 9 to the control plane."""
        self._process.kill()
        self._process.wait()
        for cell in self.cells:
            cell.join(10)

    def lines(self, name: str) -> list[dict[str, Any]]:
        """The records of a file of the run."""
        return [json.loads(line) for line in (self.directory / name).read_text().splitlines()]

    def orders(self, cell: int, kind: type) -> list[Any]:
        """Orders of one kind that a cell was given."""
        return [order for order in self.cells[cell].orders if isinstance(order, kind)]

    def close(self) -> None:
        if self._process is not None and self._process.poll() is None:
            self.kill()
        for engine in self.engines:
            self._on_loop(engine.stop())
        self._loop.call_soon_threadsafe(self._loop.stop)


@contextmanager
def scripted_cluster(
    folder: Path, num_cells: int, settings: dict[str, Any]
) -> Iterator[ScriptedCluster]:
    """A cluster that is ended when the block is left."""
    cluster = ScriptedCluster(folder, num_cells, settings)
    try:
        yield cluster
    finally:
        cluster.close()
