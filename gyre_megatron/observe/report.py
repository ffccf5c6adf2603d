"""The end of a run, from its files: a table, timeline.png, reward.png, and one line that sums it
up.

    gyre report runs/NAME [--expect rise|flat]

With `--expect` the exit status says whether the run learnt (1 if it did not do as expected).
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from gyre_megatron.errors import RunDirectoryError
from gyre_megatron.observe.progress import ROLE_STYLES

MIN_RISE = 0.2
MIN_RATIO = 2.0


def read_lines(file: Path) -> list[dict[str, Any]]:
    """Records of a JSON-lines file, up to a last line that was cut short."""
    records = []
    for line in file.read_text().splitlines():
        try:
            records.append(json.loads(line))
        except json.JSONDecodeError:
            break
    return records


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
        table.add_row(
            str(record["step"]),
            "-" if record["reward"] is None else f"{record['reward']:.3f}",
            f"{record['seconds']:.1f}",
            " ".join(f"{cell}:{count}" for cell, count in record["micro_steps_by_cell"].items()),
            str(record["tokens"].get("trained", 0)),
            f"{record['logprob_gap']:.1e}",
            f"{record['publish_seconds']:.2f}",
        )
    console.print(table)


def draw_reward(records: list[dict[str, Any]], file: Path) -> None:
    """Mean reward of the executions of each step."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    scored = [
        (record["step"], record["reward"]) for record in records if record["reward"] is not None
    ]
    figure, axes = pyplot.subplots(figsize=(8, 4))
    axes.plot(*zip(*scored, strict=True), marker="o", markersize=3) if scored else None
    axes.set(
        xlabel="step",
        ylabel="mean reward",
        ylim=(0, 1.02),
        title="Reward of the work left in the workspace",
    )
    axes.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(file, dpi=120)
    pyplot.close(figure)


def draw_timeline(events: list[dict[str, Any]], file: Path, window_s: float = 90.0) -> None:
    """Gantt of the cells' roles with the waterlevel under it, for the last `window_s` seconds of
    the run."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot
    from matplotlib.patches import Patch

    end = events[-1]["time"] if events else 0.0
    start = max(events[0]["time"] if events else 0.0, end - window_s)
    cells = sorted({event["cell"] for event in events if "cell" in event})
    figure, (gantt, level) = pyplot.subplots(
        2,
        1,
        sharex=True,
        figsize=(11, 2.2 + 0.5 * len(cells)),
        height_ratios=[max(len(cells), 1), 2],
    )
    for cell in cells:
        changes = [event for event in events if event.get("cell") == cell]
        ends = [event["time"] for event in changes[1:]] + [end]
        for change, until in zip(changes, ends, strict=True):
            if until > start:
                begin = max(change["time"], start)
                gantt.barh(
                    cell,
                    until - begin,
                    left=begin - start,
                    color=ROLE_COLOURS[change["role"]],
                    height=0.7,
                )
    gantt.set(
        yticks=cells, yticklabels=[f"cell {cell}" for cell in cells], xlim=(0, max(end - start, 1))
    )
    gantt.invert_yaxis()
    gantt.legend(
        handles=[Patch(color=c, label=r) for r, c in ROLE_COLOURS.items()],
        loc="lower center",
        bbox_to_anchor=(0.5, 1.0),
        ncol=4,
        frameon=False,
    )
    levels = [
        (event["time"] - start, event["waterlevel"]) for event in events if "waterlevel" in event
    ]
    shown = [(time, value) for time, value in levels if time >= 0]
    if shown:
        level.step(*zip(*shown, strict=True), where="post")
    level.set(
        xlabel=f"seconds (last {end - start:.0f} s of the run)",
        ylabel="waterlevel",
        xlim=(0, max(end - start, 1)),
    )
    level.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(file, dpi=120)
    pyplot.close(figure)


ROLE_COLOURS = dict(zip(ROLE_STYLES, ("#4c9ed9", "#e8c33c", "#4caf6d", "#e09a3c"), strict=True))


def draw(run: Path) -> list[Path]:
    """Write timeline.png and reward.png of a run; returns their paths."""
    reward, timeline = run / "reward.png", run / "timeline.png"
    draw_reward(read_lines(run / "metrics.jsonl"), reward)
    draw_timeline(read_lines(run / "timeline.jsonl"), timeline)
    return [timeline, reward]


def summary_line(label: str, summary: dict[str, Any]) -> str:
    """The run in one line."""
    names = (
        "steps",
        "reward_first5",
        "reward_last5",
        "role_switches",
        "rerouted_calls",
        "lost_calls",
        "harness_errors",
    )
    values = (
        f"{summary[name]:.4f}" if name.startswith("reward") else str(summary[name])
        for name in names
    )
    return f"{label}: " + " ".join(
        f"{name}={value}" for name, value in zip(names, values, strict=True)
    )


def learnt(summary: dict[str, Any]) -> bool:
    """Whether the reward at least doubled and rose by 0.2 between the first and the last five
    steps."""
    first, last = summary["reward_first5"], summary["reward_last5"]
    return last >= MIN_RATIO * first and last - first >= MIN_RISE


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="gyre report", description=__doc__)
    parser.add_argument("run", type=Path, help="a run directory")
    parser.add_argument(
        "--expect", choices=("rise", "flat"), help="fail unless the reward rose, or stayed flat"
    )
    parser.add_argument("--label", default="run", help="first word of the summary line")
    arguments = parser.parse_args(argv)
    summary_file = arguments.run / "summary.json"
    if not summary_file.is_file():
        error = RunDirectoryError(
            f"{summary_file} does not exist: the run has not ended well, or this is no run "
            "directory"
        )
        print(f"error: {error}", file=sys.stderr)
        return 2
    summary = json.loads(summary_file.read_text())
    console = Console()
    print_table(read_lines(arguments.run / "metrics.jsonl"), console)
    for file in draw(arguments.run):
        print(f"wrote {file}")
    as_expected = arguments.expect is None or learnt(summary) == (arguments.expect == "rise")
    if not as_expected:
        print(
            "error: the reward was expected to "
            f"{'rise' if arguments.expect == 'rise' else 'stay flat'}",
            file=sys.stderr,
        )
    print(summary_line(arguments.label, summary))
    return 0 if as_expected else 1


if __name__ == "__main__":
    sys.exit(main())
