"""From a run's records to figures: seconds a step, transitions, where the time of cells went."""

from __future__ import annotations

import itertools
import statistics
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from benchmarks.common import ratio, spread
from benchmarks.schedule.turns import Turns
from gyre_megatron.observe.files import RunFiles
from gyre_megatron.observe.json_lines import read_lines
from gyre_megatron.scheduler import CellRole

Event = dict[str, Any]


@dataclass(frozen=True)
class Step:
    """One step that counts: not the first of its turn.

    Attributes:
        lap: round of turns that it belongs to.
        start, end: wall-clock times between which it ran, publication before it included.
        record: of metrics.jsonl.
    """

    policy: str
    lap: int
    start: float
    end: float
    record: dict[str, Any]


@dataclass(frozen=True)
class Span:
    """A cell in a role, or the cluster at a waterlevel."""

    cell: int
    value: Any
    start: float
    end: float

    def within(self, step: Step) -> float:
        """Seconds of it inside a step."""
        return max(0.0, min(self.end, step.end) - max(self.start, step.start))


class Measured:
    """The records of one run.

    Args:
        files: of the run.
        num_cells: cells of the cluster.
    """

    def __init__(self, files: RunFiles, turns: Turns, num_cells: int) -> None:
        self.num_cells = num_cells
        self.turns = turns
        records = read_lines(files.metrics_file)
        self.steps = list(_steps(records, turns))
        events = read_lines(files.timeline_file)
        end = records[-1]["time"]
        self._roles = [
            span
            for cell in range(num_cells)
            for span in _spans([e for e in events if e.get("cell") == cell], "role", end)
        ]
        self._levels = list(_spans([e for e in events if "waterlevel" in e], "waterlevel", end))

    def of(self, policy: str) -> list[Step]:
        """The steps of a policy that count."""
        return [step for step in self.steps if step.policy == policy]

    def seconds(self, policy: str) -> list[float]:
        """Mean seconds a step in each turn of a policy."""
        laps: dict[int, list[float]] = defaultdict(list)
        for step in self.of(policy):
            laps[step.lap].append(step.end - step.start)
        return [statistics.fmean(times) for _, times in sorted(laps.items())]

    def transition_seconds(self, policy: str) -> dict[str, dict[str, float]]:
        """Mean and 95th percentile of both role changes in a policy's steps."""
        kinds = {"rollout_to_train": CellRole.LEAVING, "train_to_rollout": CellRole.RETURNING}
        figures = {}
        for name, role in kinds.items():
            times = sorted(
                span.end - span.start
                for span in self._roles
                if span.value == role and any(span.within(s) > 0 for s in self.of(policy))
            )
            if times:
                last = times[min(int(0.95 * len(times)), len(times) - 1)]
                figures[name] = {"mean": statistics.fmean(times), "p95": last, "count": len(times)}
        return figures

    def idle_fraction(self, policy: str) -> float:
        """Share of the cells' time in which they serve while nothing is unfinished, or could train
        and have nothing to claim."""
        busy = total = 0.0
        for step in self.of(policy):
            total += self.num_cells * (step.end - step.start)
            busy += sum(step.record["training_seconds_by_cell"].values())
            for span in self._roles:
                if span.value == CellRole.ROLLOUT:
                    busy += sum(
                        Span(
                            0, None, max(span.start, level.start), min(span.end, level.end)
                        ).within(step)
                        for level in self._levels
                        if level.value > 0 and level.end > span.start and level.start < span.end
                    )
                elif span.value in (CellRole.LEAVING, CellRole.RETURNING):
                    busy += span.within(step)
        return 1.0 - busy / total

    def rewards(self, policy: str) -> list[float]:
        """Mean reward of each step."""
        return [step.record["reward"] for step in self.of(policy)]

    def figures(self) -> dict[str, Any]:
        """Everything that is reported of what was measured."""
        names = list(dict.fromkeys(self.turns.policies))
        seconds = {name: self.seconds(name) for name in names}
        figures: dict[str, Any] = {"seconds": {n: spread(seconds[n]) for n in names}}
        for name in names:
            if name != "gyre":
                figures[f"speedup_vs_{name}"] = ratio(seconds[name], seconds["gyre"])
        splits = [name for name in names if name.startswith("async")]
        if splits:
            best = min(splits, key=lambda name: statistics.median(seconds[name]))
            figures["speedup_vs_async"] = figures[f"speedup_vs_{best}"]
            figures["best_split"] = best
        figures["transition_seconds"] = self.transition_seconds("gyre")
        figures["idle_fraction"] = {name: self.idle_fraction(name) for name in names}
        figures["reward"] = {name: spread(self.rewards(name)) for name in names}
        return figures


def _steps(records: list[dict[str, Any]], turns: Turns) -> Iterator[Step]:
    lap_steps = turns.steps * len(turns.policies)
    for before, record in itertools.pairwise(records):
        step = record["step"]
        if not turns.is_first(step):
            lap = (step - 1) // lap_steps
            yield Step(turns.policy_of(step), lap, before["time"], record["time"], record)


def _spans(events: list[Event], key: str, end: float) -> Iterator[Span]:
    for event, following in zip(events, [*events[1:], {"time": end}], strict=True):
        yield Span(event.get("cell", 0), event[key], event["time"], following["time"])
