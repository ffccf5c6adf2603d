"""What a run came to, or has come to so far, from its files: a table, timeline.png, reward.png, and
one line that sums it up.

    gyre report runs/NAME [--expect rise|flat]

Reads a run that has ended well, one that is running and one that crashed alike, and says which it
is. With `--expect` the exit status says whether a run that ended well learnt (1 if it did not do as
expected, or has not ended).
"""

from __future__ import annotations

import argparse
import fcntl
import json
import sys
from enum import StrEnum
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from gyre_megatron.errors import GyreError, RunDirectoryError
from gyre_megatron.observe.files import RunFiles
from gyre_megatron.observe.journal import summarize
from gyre_megatron.observe.json_lines import read_lines
from gyre_megatron.observe.plots import draw
from gyre_megatron.observe.timeline import TOTALS, totals_of

MIN_RISE = 0.2
MIN_RATIO = 2.0

_SUMMARY_NAMES = ("steps", "reward_first5", "reward_last5", *TOTALS)


class RunEnd(StrEnum):
    """How far a run is."""

    WELL = "ended well"
    RUNNING = "is still running; the figures are those so far"
    EARLY = "has not ended well (it crashed or was stopped); the figures are those it got to"


def end_of(files: RunFiles) -> RunEnd:
    """Whether the run has ended.

    Raises:
        RunDirectoryError: this is no run directory.
    """
    known = (files.config_file, files.metrics_file, files.timeline_file)
    if not any(file.is_file() for file in known):
        raise RunDirectoryError(
            f"{files.path} is no run directory: it has no config.json, metrics.jsonl or "
            "timeline.jsonl; name a directory such as runs/NAME"
        )
    if _is_locked(files.lock_file):
        return RunEnd.RUNNING
    return RunEnd.WELL if files.summary_file.is_file() else RunEnd.EARLY


def _is_locked(file: Path) -> bool:
    if not file.is_file():
        return False
    with file.open() as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError:
            return True
    return False


def print_table(records: list[dict[str, Any]], console: Console) -> None:
    """One row for every tenth of the run."""
    table = Table(title="training steps")
    columns = (
        "step",
        "reward",
        "seconds",
        "micro-steps by cell",
        "tokens trained",
        "logprob gap",
        "publish s",
    )
    for name in columns:
        table.add_column(name, justify="right")
    stride = max(len(records) // 10, 1)
    for record in records[::stride]:
        by_cell = record.get("micro_steps_by_cell", {})
        table.add_row(
            str(record.get("step", "-")),
            _number(record.get("reward"), ".3f"),
            _number(record.get("seconds"), ".1f"),
            " ".join(f"{cell}:{count}" for cell, count in by_cell.items()),
            str(record.get("tokens", {}).get("trained", 0)),
            _number(record.get("logprob_gap"), ".1e"),
            _number(record.get("publish_seconds"), ".2f"),
        )
    console.print(table)


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def summary_line(label: str, summary: dict[str, Any]) -> str:
    """The run in one line."""
    values = (
        f"{summary[name]:.4f}" if name.startswith("reward") else str(summary[name])
        for name in _SUMMARY_NAMES
    )
    return f"{label}: " + " ".join(
        f"{name}={value}" for name, value in zip(_SUMMARY_NAMES, values, strict=True)
    )


def learnt(summary: dict[str, Any]) -> bool:
    """Whether the reward at least doubled and rose by 0.2 between the first and the last five
    steps."""
    first, last = summary["reward_first5"], summary["reward_last5"]
    return last >= MIN_RATIO * first and last - first >= MIN_RISE


def _summary(files: RunFiles, records: list[dict[str, Any]], end: RunEnd) -> dict[str, Any]:
    """The run's own summary where it wrote one, else what its records say."""
    if end is RunEnd.WELL:
        try:
            summary = json.loads(files.summary_file.read_text())
        except ValueError:
            summary = {}
        if isinstance(summary, dict) and all(name in summary for name in _SUMMARY_NAMES):
            return summary
    return summarize(records, totals_of(read_lines(files.timeline_file)))


def main(argv: list[str] | None = None) -> int:
    """Print and draw the report of a run; returns the exit status (2: it cannot be made)."""
    parser = argparse.ArgumentParser(prog="gyre report", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("run", type=Path, help="a run directory")
    parser.add_argument(
        "--expect", choices=("rise", "flat"), help="fail unless the reward rose, or stayed flat"
    )
    parser.add_argument("--label", default="run", help="first word of the summary line")
    arguments = parser.parse_args(argv)
    try:
        return _report(RunFiles(arguments.run), arguments.expect, arguments.label)
    except (GyreError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


def _report(files: RunFiles, expect: str | None, label: str) -> int:
    end = end_of(files)
    records = read_lines(files.metrics_file)
    summary = _summary(files, records, end)
    print_table(records, Console())
    for file in draw(files):
        print(f"wrote {file}")
    if end is not RunEnd.WELL:
        print(f"{files.path} {end}")
    problem = _unexpected(summary, end, expect)
    if problem:
        print(f"error: {problem}", file=sys.stderr)
    print(summary_line(label, summary))
    return 1 if problem else 0


def _unexpected(summary: dict[str, Any], end: RunEnd, expect: str | None) -> str:
    """Why the run is not as expected; empty if it is, or nothing was."""
    if expect is None:
        return ""
    if end is not RunEnd.WELL:
        return f"the run {end}; --expect judges a run that has ended well"
    if learnt(summary) == (expect == "rise"):
        return ""
    return f"the reward was expected to {'rise' if expect == 'rise' else 'stay flat'}"


if __name__ == "__main__":
    sys.exit(main())
