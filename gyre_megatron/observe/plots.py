"""timeline.png and reward.png of a run, from its files.

Whatever is in the files is drawn; a run that has only just begun gives empty axes.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from gyre_megatron.observe.files import RunFiles
from gyre_megatron.observe.json_lines import read_lines
from gyre_megatron.observe.progress import ROLE_STYLES

ROLE_COLOURS = dict(zip(ROLE_STYLES, ("#4c9ed9", "#e8c33c", "#4caf6d", "#e09a3c"), strict=True))


def draw(files: RunFiles) -> list[Path]:
    """Write timeline.png and reward.png of a run; returns their paths."""
    timeline = files.path / "timeline.png"
    reward = files.path / "reward.png"
    draw_timeline(read_lines(files.timeline_file), timeline)
    draw_reward(read_lines(files.metrics_file), reward)
    return [timeline, reward]


def draw_reward(records: list[dict[str, Any]], file: Path) -> None:
    """Mean reward of the executions of each step."""
    pyplot = headless_pyplot()
    scored = [r for r in records if r.get("reward") is not None and "step" in r]
    figure, axes = pyplot.subplots(figsize=(8, 4))
    steps = [record["step"] for record in scored]
    axes.plot(steps, [record["reward"] for record in scored], marker="o", markersize=3)
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
    pyplot = headless_pyplot()
    events = [event for event in events if "time" in event]
    end = events[-1]["time"] if events else 0.0
    start = max(events[0]["time"] if events else 0.0, end - window_s)
    num_cells = len({event["cell"] for event in events if "cell" in event})
    figure, (gantt, level) = pyplot.subplots(
        2, 1, sharex=True, figsize=(11, 2.2 + 0.5 * num_cells), height_ratios=[max(num_cells, 1), 2]
    )
    _draw_roles(gantt, events, start, end)
    shown = [e for e in events if "waterlevel" in e and e["time"] >= start]
    times = [event["time"] - start for event in shown]
    level.step(times, [event["waterlevel"] for event in shown], where="post")
    level.set(
        xlabel=f"seconds (last {end - start:.0f} s of the run)",
        ylabel="waterlevel",
        xlim=(0, max(end - start, 1)),
    )
    level.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(file, dpi=120)
    pyplot.close(figure)


def _draw_roles(axes: Any, events: list[dict[str, Any]], start: float, end: float) -> None:
    from matplotlib.patches import Patch

    cells = sorted({event["cell"] for event in events if "cell" in event})
    for cell in cells:
        changes = [event for event in events if event.get("cell") == cell]
        ends = [event["time"] for event in changes[1:]] + [end]
        for change, until in zip(changes, ends, strict=True):
            if until > start:
                begin = max(change["time"], start)
                colour = ROLE_COLOURS.get(str(change.get("role")), "grey")
                axes.barh(cell, until - begin, left=begin - start, color=colour, height=0.7)
    labels = [f"cell {cell}" for cell in cells]
    axes.set(yticks=cells, yticklabels=labels, xlim=(0, max(end - start, 1)))
    axes.invert_yaxis()
    axes.legend(
        handles=[Patch(color=colour, label=role) for role, colour in ROLE_COLOURS.items()],
        loc="lower center",
        bbox_to_anchor=(0.5, 1.0),
        ncol=4,
        frameon=False,
    )


def headless_pyplot() -> Any:
    """pyplot without a display; imported late, because the control plane needs it only at its
    end."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot
