"""Whole training runs as a user starts them: torchrun in a process of its own, watched and ended by
process id."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil

ROOT = Path(__file__).parents[2]
TORCHRUN = Path(sys.executable).with_name("torchrun")


class TrainingRun:
    """One `torchrun launch/train_gyre.py` with everything it started."""

    def __init__(
        self, root: Path, *arguments: str, ranks: int = 2, config: str = "configs/demo_cpu.yaml"
    ) -> None:
        self.directory = root / "demo"
        command = [
            str(TORCHRUN),
            "--standalone",
            "--nproc-per-node",
            str(ranks),
            "launch/train_gyre.py",
        ]
        command += ["--config", config, "--set", f"run.root={root}", *arguments]
        environment = os.environ | {
            "PATH": f"{TORCHRUN.parent}:{os.environ['PATH']}",
            "OMP_NUM_THREADS": "1",
        }
        self.output_file = root / f"output-{time.monotonic_ns()}.txt"
        with self.output_file.open("wb") as output:
            self.process = subprocess.Popen(
                command,
                cwd=ROOT,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
            )
        self._seen: dict[int, psutil.Process] = {}

    @property
    def output(self) -> str:
        return self.output_file.read_text(errors="replace")

    def records(self) -> list[dict[str, Any]]:
        """Complete lines of metrics.jsonl."""
        file = self.directory / "metrics.jsonl"
        lines = file.read_text().splitlines(keepends=True) if file.exists() else []
        return [json.loads(line) for line in lines if line.endswith("\n")]

    def wait(self, timeout_s: float) -> int:
        """The exit status; ends everything and fails if it takes too long."""
        deadline = time.monotonic() + timeout_s
        while self.process.poll() is None:
            self.note_processes()
            if time.monotonic() > deadline:
                self.kill_everything()
                raise AssertionError(
                    f"the run did not end within {timeout_s} s:\n{self.output[-4000:]}"
                )
            time.sleep(0.2)
        return self.process.returncode

    def wait_for_steps(self, count: int, timeout_s: float) -> None:
        """Block until `count` steps are in metrics.jsonl."""
        self._wait_until(lambda: len(self.records()) >= count, f"{count} steps", timeout_s)

    def wait_for_file(self, name: str, timeout_s: float) -> None:
        """Block until the run directory holds `name`."""
        self._wait_until((self.directory / name).exists, name, timeout_s)

    def _wait_until(self, reached: Callable[[], bool], what: str, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        while not reached():
            self.note_processes()
            if self.process.poll() is not None or time.monotonic() > deadline:
                self.kill_everything()
                raise AssertionError(f"no {what} within {timeout_s} s:\n{self.output[-4000:]}")
            time.sleep(0.1)

    def note_processes(self) -> None:
        """Remember what the run has started so far."""
        with contextlib.suppress(psutil.NoSuchProcess):
            for child in psutil.Process(self.process.pid).children(recursive=True):
                self._seen[child.pid] = child

    def kill_everything(self) -> None:
        """`kill -9` every process of the run at once."""
        self.note_processes()
        for process in [*self._seen.values(), psutil.Process(self.process.pid)]:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        self.process.wait()

    def survivors(self, grace_s: float = 20.0) -> list[str]:
        """Processes of the run that are still there after `grace_s`."""
        _, alive = psutil.wait_procs(list(self._seen.values()), timeout=grace_s)
        return [f"{process.pid} {process.name()}" for process in alive if process.is_running()]


@contextlib.contextmanager
def training_run(root: Path, *arguments: str, **options: Any) -> Iterator[TrainingRun]:
    """A run that is ended when the block is left, however it is left."""
    run = TrainingRun(root, *arguments, **options)
    try:
        yield run
    finally:
        if run.process.poll() is None:
            run.kill_everything()
