"""Pictures of simulated runs: who did what when, and the front of time and staleness."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gyre_megatron.observe.plots import headless_pyplot
from gyre_megatron.simulation.accounts import Accounts

COLOURS = {"serving": "#4c9ed9", "training": "#4caf6d", "transition": "#e8a33c", "idle": "#d9d9d9"}


def draw_gantt(accounts: Accounts, title: str, file: Path) -> None:
    """Cells over time with the waterlevel under them."""
    pyplot = headless_pyplot()
    from matplotlib.patches import Patch

    cells = sorted({span.cell for span in accounts.spans})
    figure, (gantt, level) = pyplot.subplots(
        2, 1, sharex=True, figsize=(11, 2.5 + 0.35 * len(cells)), height_ratios=[len(cells), 3]
    )
    for activity, colour in COLOURS.items():
        for cell in cells:
            bars = [
                (span.start / 3600, (span.end - span.start) / 3600)
                for span in accounts.spans
                if span.cell == cell and span.activity == activity
            ]
            gantt.broken_barh(bars, (cell - 0.4, 0.8), facecolors=colour, linewidth=0)
    gantt.set(yticks=cells, yticklabels=[f"cell {cell}" for cell in cells], title=title)
    gantt.invert_yaxis()
    patches = [Patch(color=colour, label=name) for name, colour in COLOURS.items()]
    gantt.legend(handles=patches, loc="upper right", ncol=len(patches), fontsize="small")
    times = [when / 3600 for when, _ in accounts.waterlevel]
    level.step(times, [unfinished for _, unfinished in accounts.waterlevel], where="post")
    level.set(xlabel="hours", ylabel="waterlevel")
    level.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(file, dpi=110)
    pyplot.close(figure)


def draw_front(points: Sequence[dict[str, Any]], file: Path) -> None:
    """Every point of a sweep by time and staleness, the best ones joined."""
    pyplot = headless_pyplot()
    figure, axes = pyplot.subplots(figsize=(8, 5))
    for point in points:
        axes.scatter(point["hours"], point["staleness_mean"], color="#4c9ed9")
        axes.annotate(point["name"], (point["hours"], point["staleness_mean"]), fontsize=7)
    front = pareto_front(points)
    axes.plot(
        [point["hours"] for point in front],
        [point["staleness_mean"] for point in front],
        color="#4caf6d",
        label="front",
    )
    axes.set(xlabel="hours", ylabel="mean staleness (versions)")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.tight_layout()
    figure.savefig(file, dpi=110)
    pyplot.close(figure)


def pareto_front(points: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Points that no other beats in both time and staleness, fastest first."""
    front: list[dict[str, Any]] = []
    for point in sorted(points, key=lambda p: (p["hours"], p["staleness_mean"])):
        if not front or point["staleness_mean"] < front[-1]["staleness_mean"]:
            front.append(point)
    return front
