"""What a person sees of a run: one record a step, the timeline, TensorBoard, Prometheus, the
progress line.

metrics.jsonl holds one object per optimizer step; its publish_seconds are those of the publication
before the step. On resume, records after the checkpoint's step are dropped, so no step appears
twice; the timeline and its totals go on. Written by the control plane only.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

from gyre_megatron import metrics
from gyre_megatron.observe.batch_record import BatchRecord
from gyre_megatron.observe.files import RunFiles
from gyre_megatron.observe.json_lines import open_to_append, read_lines, replace_lines, write_line
from gyre_megatron.observe.progress import Progress
from gyre_megatron.observe.tensorboard import TensorBoardEvents
from gyre_megatron.observe.timeline import Timeline
from gyre_megatron.scheduler import CellRole

_NUM_ENDS = 5
"""Steps at either end of a run whose mean reward the summary compares."""


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
        kept = [
            r
            for r in read_lines(files.metrics_file)
            if r.get("step", 0) in range(1, resumed_step + 1)
        ]
        replace_lines(files.metrics_file, kept)
        self.records = kept
        self.timeline = Timeline(files.timeline_file)
        self._metrics_file = open_to_append(files.metrics_file)
        self._tensorboard = (
            TensorBoardEvents(files.path / "tensorboard", kept) if tensorboard else None
        )
        self._progress = Progress(num_steps)
        self._roles: list[CellRole] = []
        self._waterlevel = -1
        self._gap = 0.0
        self._transfer_seconds = 0.0
        self._install_seconds = 0.0
        self._step_started = time.monotonic()

    def close(self) -> None:
        """Flush and close the files."""
        self._progress.close()
        self._metrics_file.close()
        self.timeline.close()
        if self._tensorboard is not None:
            self._tensorboard.close()

    def cells_ready(self, roles: Sequence[CellRole]) -> None:
        """All cells serve for the first time: the first step begins."""
        # Otherwise its time would include the start of the job.
        self._step_started = time.monotonic()
        self.roles(roles)

    def step(self, step: int, batch: BatchRecord, optimizer: dict[str, float]) -> None:
        """One optimizer step is done.

        Args:
            batch: what was admitted to it.
            optimizer: what the core reported.
        """
        now = time.monotonic()
        reward = sum(batch.rewards) / len(batch.rewards) if batch.rewards else None
        record = {
            "step": step,
            "time": time.time(),
            "seconds": now - self._step_started,
            "reward": reward,
            "groups": batch.group_ids,
            "statuses": dict(batch.statuses),
            "excluded": dict(batch.excluded),
            "staleness": max(batch.staleness, default=0),
            "bins": batch.num_bins,
            "micro_steps_by_cell": _by_cell(batch.micro_steps_by_cell),
            "training_seconds_by_cell": _by_cell(batch.training_seconds_by_cell),
            "tokens": dict(batch.tokens),
            "logprob_gap": self._gap,
            "publish_seconds": self._transfer_seconds + self._install_seconds,
            **self.timeline.totals,
            **{f"train/{name}": value for name, value in sorted(batch.micro_step_metrics.items())},
            **{f"optimizer/{name}": value for name, value in sorted(optimizer.items())},
        }
        self._step_started = now
        self.records.append(record)
        write_line(self._metrics_file, record)
        metrics.step.set(step)
        if reward is not None:
            metrics.reward.set(reward)
        if self._tensorboard is not None:
            self._tensorboard.step(record)
        self._progress.step(record, [str(role) for role in self._roles], self._waterlevel)

    def roles(self, roles: Sequence[CellRole]) -> None:
        """Roles after a change; a change that completes a transition counts as a switch."""
        for cell, role in enumerate(roles):
            before = self._roles[cell] if self._roles else None
            if role is before:
                continue
            self.timeline.role(cell, role)
            for name in CellRole:
                metrics.cell_role.labels(cell, str(name)).set(name is role)
            if before in (CellRole.LEAVING, CellRole.RETURNING):
                self.timeline.count("role_switches")
        self._roles = list(roles)
        self._progress.state([str(role) for role in roles], self._waterlevel)

    def waterlevel(self, waterlevel: int) -> None:
        """The waterlevel now; only a change is recorded."""
        if waterlevel == self._waterlevel:
            return
        self._waterlevel = waterlevel
        metrics.waterlevel.set(waterlevel)
        self.timeline.waterlevel(waterlevel)
        self._progress.state([str(role) for role in self._roles], waterlevel)

    def published(self, version: int, transfer_seconds: float) -> None:
        """The core's weights, now `version`, are in every trainer.

        Args:
            transfer_seconds: of the cell that waited longest.
        """
        self._transfer_seconds = transfer_seconds
        self._install_seconds = 0.0
        metrics.weight_version.set(version)

    def installed(self, seconds: float) -> None:
        """A cell has put the published weights into its engine, while it served or when it came
        back to serving. The slowest cell counts: `publish_seconds` is transfer and install."""
        self._install_seconds = max(self._install_seconds, seconds)

    def logprob_gap(self, gap: float) -> None:
        """A parity check was made."""
        self._gap = gap
        metrics.logprob_gap.set(gap)

    def totals(self) -> dict[str, Any]:
        """Counts over the whole run, resumed parts included, and the last parity check."""
        return {**self.timeline.totals, "logprob_gap": self._gap}

    def summary(self) -> dict[str, Any]:
        """What the run came to, for summary.json and the last line."""
        return summarize(self.records, self.timeline.totals)


def summarize(records: list[dict[str, Any]], totals: dict[str, int]) -> dict[str, Any]:
    """What a run has come to so far."""
    rewards = [record["reward"] for record in records if record.get("reward") is not None]
    return {
        "steps": len(records),
        "reward_first5": _mean(rewards[:_NUM_ENDS]),
        "reward_last5": _mean(rewards[-_NUM_ENDS:]),
        **totals,
        "max_logprob_gap": max((record.get("logprob_gap", 0.0) for record in records), default=0.0),
    }


def _by_cell(values: Mapping[int, float]) -> dict[str, float]:
    return {str(cell): value for cell, value in sorted(values.items())}


def _mean(values: list[float]) -> float:
    return sum(values) / len(values) if values else 0.0
