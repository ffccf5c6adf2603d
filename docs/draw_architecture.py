"""Draws docs/architecture_light.svg and docs/architecture_dark.svg: the processes and what flows.

python docs/draw_architecture.py [--png FOLDER]    (PNG copies, to look at)
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch

HERE = Path(__file__).parent
WIDTH, HEIGHT = 118, 62
# Text as paths: the same picture whatever fonts the reader has.
matplotlib.rcParams.update({"svg.fonttype": "path", "svg.hashsalt": "gyre", "font.size": 9})


@dataclass(frozen=True)
class Theme:
    """Colours of one variant; the background stays transparent."""

    name: str
    text: str
    faint: str
    frame: str
    rollout: str
    train: str
    swap: str
    control: str
    arrow: str


LIGHT = Theme(
    "light", "#1f2328", "#59636e", "#8c959f", "#cfe8fb", "#d3efdb", "#f6e3c5", "#ebe4f7", "#57606a"
)
DARK = Theme(
    "dark", "#e6edf3", "#9da7b3", "#6e7681", "#173a56", "#1c4429", "#533c14", "#352a50", "#9da7b3"
)


class Picture:
    """Boxes and arrows in units of about a character."""

    def __init__(self, theme: Theme) -> None:
        self.theme = theme
        self.figure, self.axes = plt.subplots(figsize=(11.8, 6.2))
        self.axes.set(xlim=(0, WIDTH), ylim=(0, HEIGHT))
        self.axes.axis("off")
        self.figure.subplots_adjust(0, 0, 1, 1)

    def box(self, x, y, width, height, fill, title, note="", *, dashed=False) -> None:
        """A rounded box with a bold title and a smaller note under it."""
        self.axes.add_patch(
            FancyBboxPatch(
                (x, y),
                width,
                height,
                boxstyle="round,pad=0,rounding_size=1.2",
                facecolor=fill or "none",
                edgecolor=self.theme.frame,
                linewidth=1.0,
                linestyle="--" if dashed else "-",
            )
        )
        middle = y + height / 2 + (1.2 * note.count("\n") + 1.2 if note else 0)
        self.label(x + width / 2, middle, title, weight="bold")
        if note:
            self.label(x + width / 2, middle - 1.6, note, size=7.5, faint=True, va="top")

    def label(
        self, x, y, text, *, size=9.0, weight="normal", faint=False, ha="center", va="center"
    ):
        """Text alone."""
        colour = self.theme.faint if faint else self.theme.text
        self.axes.text(x, y, text, size=size, weight=weight, color=colour, ha=ha, va=va)

    def arrow(self, start, end, text="", at=None, *, both=False, bend=0.0, ha="center") -> None:
        """An arrow; its text stands at `at`."""
        self.axes.add_patch(
            FancyArrowPatch(
                start,
                end,
                arrowstyle="<|-|>" if both else "-|>",
                mutation_scale=9,
                color=self.theme.arrow,
                linewidth=1.1,
                shrinkA=0,
                shrinkB=0,
                connectionstyle=f"arc3,rad={bend}",
            )
        )
        if text:
            x, y = at or ((start[0] + end[0]) / 2, (start[1] + end[1]) / 2 + 1.2)
            self.label(x, y, text, size=7.5, faint=True, ha=ha)


def draw(theme: Theme) -> plt.Figure:
    """The whole picture."""
    p = Picture(theme)
    _harnesses(p)
    _control_plane(p)
    _cell(p, 72, "cell 0: the core", core=True)
    _cell(p, 98, "satellite cells 1 ... K-1", core=False)
    _flows(p)
    return p.figure


def _harnesses(p: Picture) -> None:
    p.box(1, 13, 19, 44, None, "", dashed=True)
    p.label(10.5, 54.6, "harness processes", weight="bold")
    p.label(10.5, 52.2, "unmodified: a base URL, a key", size=7.5, faint=True)
    names = ("Claude Code", "Codex", "mini-swe-agent", "your program")
    for row, name in enumerate(names):
        p.box(3, 42.5 - 9 * row, 15, 6.5, None, name)


def _control_plane(p: Picture) -> None:
    p.box(31, 7, 29, 50, None, "", dashed=True)
    p.label(45.5, 54.6, "control plane: one process", weight="bold")
    control = p.theme.control
    p.box(33, 43, 11, 9, control, "proxy", "three dialects,\ntoken exact")
    p.box(47, 43, 11, 9, control, "router", "moves calls\nin flight")
    p.box(33, 29.5, 11, 9, control, "store", "SQLite: trees\nof tokens")
    p.box(47, 29.5, 11, 9, control, "processor", "picks branches,\npacks bins")
    p.box(
        33,
        14,
        25,
        10,
        control,
        "scheduler",
        "decide(state) -> orders\nwaterlevel: who serves, who trains",
    )
    p.arrow((44, 47.5), (47, 47.5))
    p.arrow((38.5, 43), (38.5, 38.5))
    p.arrow((44, 34), (47, 34))
    p.arrow((38.5, 29.5), (38.5, 24))


def _cell(p: Picture, x: float, title: str, *, core: bool) -> None:
    theme = p.theme
    p.box(x, 7, 19, 50, None, "", dashed=True)
    p.label(x + 9.5, 54.6, title, weight="bold")
    p.box(x + 2, 43, 15, 9, theme.rollout, "SGLang engine", "serves, or sleeps")
    p.box(x + 2, 31, 15, 7.5, theme.swap, "hot swap", "reshard, verify, install")
    p.box(x + 2, 19, 15, 9, theme.train, "Megatron trainer", "trees; gradients")
    if core:
        p.box(x + 2, 9.5, 15, 6, theme.train, "optimizer", "only here")
        p.arrow((x + 9.5, 19), (x + 9.5, 15.5), both=True)
    p.arrow((x + 9.5, 28), (x + 9.5, 31))
    p.arrow((x + 9.5, 38.5), (x + 9.5, 43))


def _flows(p: Picture) -> None:
    p.arrow((20, 47.5), (33, 47.5), both=True, text="HTTP", at=(25.5, 49.2))
    p.label(25.5, 45.8, "Messages\nChat\nResponses", size=7, faint=True, va="top")
    p.arrow((58, 47.5), (74, 47.5), both=True, text="token ids", at=(66, 49.2))
    p.arrow((58, 49.9), (100, 50.6), both=True, bend=-0.13)
    p.arrow((58, 34), (74, 24), text="micro-steps", at=(66.2, 31.5))
    p.arrow((58, 19), (72, 19), text="orders", at=(65, 20.4))
    p.arrow((72, 15.5), (58, 15.5), text="reports", at=(65, 14))
    # Between the cells.
    p.arrow((89, 26), (100, 26), text="weights", at=(94.5, 27.4))
    p.arrow((100, 21.5), (89, 21.5), text="gradients", at=(94.5, 20.0))
    p.label(
        59,
        3,
        "blue serves, green trains; a cell changes its role in seconds, one after another, "
        "and the harnesses never notice",
        size=8,
        faint=True,
    )


def main() -> None:
    """Write both variants."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--png", type=Path, help="also write PNG copies into this folder")
    png = parser.parse_args().png
    for theme in (LIGHT, DARK):
        figure = draw(theme)
        name = f"architecture_{theme.name}"
        # Without a date the file changes only when the picture does.
        figure.savefig(HERE / f"{name}.svg", transparent=True, metadata={"Date": None})
        if png:
            face = "white" if theme is LIGHT else "#0d1117"
            figure.savefig(png / f"{name}.png", dpi=110, facecolor=face)
        plt.close(figure)


if __name__ == "__main__":
    main()
