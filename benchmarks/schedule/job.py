"""The run that is measured: the main job on real engines and trainers, with tools whose times have a
long tail, so that tools and not the machine's cores set the pace."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.common import ROOT
from benchmarks.schedule.cell_shares import CellShares
from benchmarks.schedule.rank import GROUPS
from benchmarks.schedule.turns import VARIABLE, Turns
from gyre_megatron.observe.files import RunFiles
from gyre_megatron.observe.json_lines import read_lines

TABLES = ROOT / "examples" / "tables"


@dataclass(frozen=True)
class Job:
    """What is run.

    Attributes:
        folder: tasks and the run's directory are made below it.
        tool_delay_s: shortest tool time; times are Pareto-distributed (1.3) and end at forty times
            this.
        num_files: calls and tools of an execution.
        settings: further `section.key=value`.
    """

    folder: Path
    turns: Turns
    num_laps: int
    num_cells: int
    groups_per_step: int
    executions_per_group: int
    cell_capacity: int
    cores_per_cell: float
    tool_delay_s: float
    num_files: int
    settings: Sequence[str] = ()

    @property
    def num_steps(self) -> int:
        return self.num_laps * len(self.turns.policies) * self.turns.steps

    @property
    def files(self) -> RunFiles:
        """Of the run."""
        return RunFiles(self.folder / "runs" / "schedule")

    def overrides(self) -> list[str]:
        """The configuration beside that of the demo."""
        return [
            "run.name=schedule",
            f"run.root={self.folder / 'runs'}",
            f"run.num_steps={self.num_steps}",
            "run.checkpoint_interval=0",
            "run.tensorboard=false",
            f"cluster.num_cells={self.num_cells}",
            f"scheduler.policy={ROOT / 'benchmarks/schedule/turns.py'}:policy",
            f"scheduler.groups_per_step={self.groups_per_step}",
            f"scheduler.executions_per_group={self.executions_per_group}",
            f"scheduler.cell_capacity={self.cell_capacity}",
            f"rollout.harness.tasks={self.folder / 'tasks'}",
            "rollout.harness.timeout_s=300",
            "rollout.harness.overall_timeout_s=600",
            # The same weights in every turn: what is compared is time, not luck in learning.
            "training.optimizer.lr=0",
            *self.settings,
        ]

    def run(self, time_limit_s: float) -> None:
        """Run to the end.

        Raises:
            SystemExit: the run failed or took too long; its log is shown.
        """
        self._write_tasks()
        words = [f"--set={text}" for text in self.overrides()]
        config = ["--config", str(ROOT / "configs/demo_cpu.yaml"), *words]
        ranks = ["--standalone", "--nproc-per-node", str(self.num_cells)]
        script = str(ROOT / "benchmarks/schedule/rank.py")
        command = [sys.executable, "-m", "torch.distributed.run", *ranks, script, *config]
        log = self.folder / "job.log"
        with CellShares(self.num_cells, self.cores_per_cell).made() as shares:
            environment = {
                **os.environ,
                "OMP_NUM_THREADS": "1",
                VARIABLE: self.turns.to_json(),
                GROUPS: ":".join(map(str, shares.folders)),
            }
            with log.open("w") as output:
                job = subprocess.Popen(
                    command, cwd=ROOT, env=environment, stdout=output, stderr=subprocess.STDOUT
                )
            try:
                self._watch(job, shares, time.monotonic() + time_limit_s)
            finally:
                if job.poll() is None:
                    job.terminate()
                    job.wait(60)
        if job.returncode != 0 or len(read_lines(self.files.metrics_file)) < self.num_steps:
            print(log.read_text()[-4000:], file=sys.stderr)
            raise SystemExit(f"error: the run ended with status {job.returncode}")

    def _watch(self, job: subprocess.Popen[bytes], shares: CellShares, deadline: float) -> None:
        """Free the control plane, hold the cells to their shares once they serve, wait."""
        limited = False
        freed = 0
        while job.poll() is None:
            if time.monotonic() > deadline:
                raise SystemExit("error: the run took longer than --time-limit")
            if not freed and self.files.endpoint_file.exists():
                freed = json.loads(self.files.endpoint_file.read_text())["pid"]
                shares.free(freed)
            # Before that they only import: what takes a minute on whole cores takes five on shares.
            if freed and not limited and read_lines(self.files.timeline_file):
                shares.limit()
                limited = True
            time.sleep(0.2)

    def _write_tasks(self) -> None:
        """The demo's tasks with slow tools, beside its agent and evaluator."""
        self.folder.mkdir(parents=True, exist_ok=True)
        for name in ("agent.py", "evaluate.py"):
            shutil.copy(TABLES / name, self.folder)
        shutil.copytree(TABLES / "tasks", self.folder / "tasks")
        for file in sorted((self.folder / "tasks").glob("*/workspace/spec.json")):
            spec = json.loads(file.read_text())
            names = [f"{spec['files'][0][0]}{index}" for index in range(self.num_files)]
            spec |= {"files": names, "tool_delay_s": self.tool_delay_s}
            file.write_text(json.dumps(spec))
