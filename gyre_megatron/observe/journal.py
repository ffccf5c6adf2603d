"""What a person sees of a run: one record a step, the timeline of roles, TensorBoard, Prometheus,
the progress line.

metrics.jsonl holds one object per optimizer step; timeline.jsonl holds every change of a role and
of the waterlevel with its time. On resume, records after the checkpoint's step are dropped, so no
step appears twice.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tensorboard.summary import Writer

from gyre_megatron import metrics
from gyre_megatron.observe.batch_record import BatchRecord
from gyre_megatron.observe.files import RunFiles
from gyre_megatron.observe.progress import Progress
from gyre_megatron.scheduler import Role


class Journal:
    """Writes the records of one run.

    Args:
        files: the run's files.
        num_steps: steps of the run, for the progress display.
        resumed_step: records of later steps are dropped; 0 for a new run.
        tensorboard: also write TensorBoard events.
    """

    def __init__(
        self, files: RunFiles, num_steps: int, resumed_step: int, tensorboard: bool
    ) -> None:
        self.records = _kept(files.metrics_file, resumed_step)
        self._metrics_file = files.metrics_file.open("w")
        for record in self.records:
            self._write(self._metrics_file, record)
        self._timeline_file = files.timeline_file.open("a")
        self._tensorboard = Writer(str(files.path / "tensorboard")) if tensorboard else None
        self._progress = Progress(num_steps)
        self._role_switches = self.records[-1]["role_switches"] if self.records else 0
        self._carried = {name: self.records[-1][name] if self.records else 0 for name in _CARRIED}
        self._roles: list[Role] = []
        self._waterlevel = -1
        self._gap = 0.0
        self._publish_seconds = 0.0
        self._step_started = time.monotonic()

    def close(self) -> None:
        """Flush and close the files."""
        self._progress.close()
        self._metrics_file.close()
        self._timeline_file.close()
        if self._tensorboard is not None:
            self._tensorboard.close()

    def step(
        self,
        step: int,
        batch: BatchRecord,
        optimizer: dict[str, float],
        micro_steps: dict[int, int],
        status: dict[str, Any],
    ) -> None:
        """One optimizer step is done."""
        now = time.monotonic()
        record = {
            "step": step,
            "time": time.time(),
            "seconds": now - self._step_started,
            "reward": sum(batch.rewards) / len(batch.rewards) if batch.rewards else None,
            "groups": batch.group_ids,
            "statuses": dict(batch.statuses),
            "staleness": max(batch.staleness, default=0),
            "bins": batch.num_bins,
            "micro_steps_by_cell": {
                str(cell): count for cell, count in sorted(micro_steps.items())
            },
            "tokens": dict(batch.tokens),
            "logprob_gap": self._gap,
            "publish_seconds": self._publish_seconds,
            "role_switches": self._role_switches,
            **{name: status[name] + self._carried[name] for name in _CARRIED},
            **{f"train/{name}": value for name, value in sorted(batch.micro_step_metrics.items())},
            **{f"optimizer/{name}": value for name, value in sorted(optimizer.items())},
        }
        self._step_started = now
        self.records.append(record)
        self._write(self._metrics_file, record)
        self._export(record)
        self._progress.step(record, [str(role) for role in self._roles], self._waterlevel)

    def roles(self, roles: Sequence[Role], waterlevel: int) -> None:
        """Roles after a change; a change that completes a transition counts as a switch."""
        if not self._roles:
            self._step_started = (
                time.monotonic()
            )  # the first step's time does not include the start of the job
        for cell, role in enumerate(roles):
            before = self._roles[cell] if self._roles else None
            if role is before:
                continue
            self._write(self._timeline_file, {"time": time.time(), "cell": cell, "role": str(role)})
            for name in Role:
                metrics.cell_role.labels(cell, str(name)).set(name is role)
            if before in (Role.LEAVING, Role.RETURNING):
                self._role_switches += 1
                metrics.role_switches.inc()
        self._roles = list(roles)
        self._progress.state([str(role) for role in roles], waterlevel)

    def waterlevel(self, counters: tuple[int, int, int]) -> None:
        """The waterlevel after a change."""
        dispatched, _, finished = counters
        if dispatched - finished == self._waterlevel:
            return
        self._waterlevel = dispatched - finished
        metrics.waterlevel.set(self._waterlevel)
        self._write(self._timeline_file, {"time": time.time(), "waterlevel": self._waterlevel})
        self._progress.state([str(role) for role in self._roles], self._waterlevel)

    def published(self, version: int, seconds: float) -> None:
        """Weights of `version` are in every engine that serves."""
        self._publish_seconds = seconds
        metrics.weight_version.set(version)

    def logprob_gap(self, gap: float) -> None:
        """A parity check was made."""
        self._gap = gap
        metrics.logprob_gap.set(gap)

    def totals(self) -> dict[str, Any]:
        """Sums over the whole run, resumed parts included."""
        return {"role_switches": self._role_switches, "logprob_gap": self._gap}

    def summary(self, status: dict[str, Any]) -> dict[str, Any]:
        """What the run came to, for summary.json and the last line."""
        rewards = [record["reward"] for record in self.records if record["reward"] is not None]
        first, last = rewards[:5], rewards[-5:]
        return {
            "steps": len(self.records),
            "reward_first5": sum(first) / len(first) if first else 0.0,
            "reward_last5": sum(last) / len(last) if last else 0.0,
            "role_switches": self._role_switches,
            **{name: status[name] + self._carried[name] for name in _CARRIED},
            "max_logprob_gap": max((record["logprob_gap"] for record in self.records), default=0.0),
        }

    def _export(self, record: dict[str, Any]) -> None:
        metrics.step.set(record["step"])
        if record["reward"] is not None:
            metrics.reward.set(record["reward"])
        if self._tensorboard is not None:
            for name, value in record.items():
                if isinstance(value, (int, float)) and name not in ("step", "time"):
                    self._tensorboard.add_scalar(name, value, record["step"])

    @staticmethod
    def _write(file, record: dict[str, Any]) -> None:
        file.write(json.dumps(record) + "\n")
        file.flush()


_CARRIED = ("rerouted_calls", "lost_calls", "harness_errors")


def _kept(file: Path, step: int) -> list[dict[str, Any]]:
    if not file.exists():
        return []
    records = []
    for line in file.read_text().splitlines():
        try:
            record = json.loads(line)
        except json.JSONDecodeError:
            break  # the last line of a run that was killed while writing it
        if record["step"] <= step:
            records.append(record)
    return records
