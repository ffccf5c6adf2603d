"""What every benchmark shares: the record of where it ran, interleaved repeats, median and range.

Invariants: the two sides of a comparison run in turns in the same processes, so that a busy moment
of the machine weighs on both; a ratio is formed per round and then summarised; nothing is reported
without its number of runs.

A result file holds `environment`, `config`, the benchmark's own keys with every measured figure as
its median, and under `spreads` the median, range and number of runs of each, by dotted path.
"""

from __future__ import annotations

import json
import os
import platform
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import psutil

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("torch", "megatron-core", "sglang", "numpy")


@dataclass(frozen=True)
class _Usage:
    """CPU time used until now, by everybody and by this benchmark, and the clock."""

    wall: float
    all_busy: float
    own: float

    @classmethod
    def now(cls) -> _Usage:
        times = psutil.cpu_times()
        # Children count once they have ended: write results after that.
        kinds = (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
        usages = [resource.getrusage(kind) for kind in kinds]
        own = sum(usage.ru_utime + usage.ru_stime for usage in usages)
        idle = times.idle + getattr(times, "iowait", 0.0)
        return cls(time.perf_counter(), sum(times[:8]) - idle, own)


_at_start = _Usage.now()


def spread(values: Iterable[float]) -> dict[str, float]:
    """Median and range of the runs of one figure.

    Raises:
        ValueError: there is no run.
    """
    runs = [float(value) for value in values]
    if not runs:
        raise ValueError("a figure needs at least one run, got none")
    return {
        "median": statistics.median(runs),
        "min": min(runs),
        "max": max(runs),
        "num_runs": len(runs),
    }


def ratio(numerators: Iterable[float], denominators: Iterable[float]) -> dict[str, float]:
    """Median and range of the quotient of two sides, formed round by round."""
    return spread(a / b for a, b in zip(numerators, denominators, strict=True))


def seconds_of(action: Callable[[], Any]) -> float:
    """Wall-clock seconds of one call."""
    start = time.perf_counter()
    action()
    return time.perf_counter() - start


def interleaved(
    actions: Mapping[str, Callable[[], float]], num_runs: int, *, num_warmups: int = 1
) -> dict[str, list[float]]:
    """Run each action once a round; the order is reversed every other round.

    Args:
        actions: each returns the figure of one run (often `lambda: seconds_of(...)`).
        num_warmups: rounds whose figures are dropped (first touch of memory, compilation).

    Returns:
        Per action the figures of `num_runs` rounds, index by index from the same round.
    """
    figures: dict[str, list[float]] = {name: [] for name in actions}
    for round_index in range(num_warmups + num_runs):
        # Reversed every other round, so that neither side always runs on what the other left behind.
        names = list(actions) if round_index % 2 == 0 else list(actions)[::-1]
        for name in names:
            figure = actions[name]()
            if round_index >= num_warmups:
                figures[name].append(figure)
    return figures


def environment() -> dict[str, Any]:
    """Commit, machine and versions, so that a figure can be judged later."""
    return {
        "commit": _commit(),
        "date": time.strftime("%Y-%m-%d"),
        "cpu": _cpu_model(),
        "num_cores": os.cpu_count() or 1,
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "versions": {name: found for name in PACKAGES if (found := _version(name))},
        "command": " ".join(["python", *_arguments()]),
    }


def write_results(
    path: Path,
    environment: Mapping[str, Any],
    config: Mapping[str, Any],
    figures: Mapping[str, Any],
) -> None:
    """Write one result file (JSON); paths in `config` are left out.

    Call it at the end, when child processes have been joined: the environment is completed by
    `cores_busy_otherwise`, the cores that other programs kept busy on average since the start.

    Args:
        figures: nested dictionaries; a dictionary made by `spread` is one figure.
    """
    spreads: dict[str, dict[str, float]] = {}
    result = {
        "environment": {**environment, "cores_busy_otherwise": _cores_busy_otherwise()},
        "config": {key: value for key, value in config.items() if not isinstance(value, Path)},
        **_medians(figures, "", spreads),
        "spreads": spreads,
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, indent=1) + "\n")


def _cores_busy_otherwise() -> float:
    now = _Usage.now()
    others = (now.all_busy - _at_start.all_busy) - (now.own - _at_start.own)
    return round(max(0.0, others) / (now.wall - _at_start.wall), 2)


def is_spread(value: Any) -> bool:
    """Whether `spread` made this dictionary."""
    return isinstance(value, dict) and "num_runs" in value


def _medians(
    figures: Mapping[str, Any], prefix: str, spreads: dict[str, dict[str, float]]
) -> dict[str, Any]:
    """`figures` with each spread replaced by its median; the spreads go into `spreads`."""
    plain: dict[str, Any] = {}
    for key, value in figures.items():
        if is_spread(value):
            spreads[f"{prefix}{key}"] = value
            plain[key] = value["median"]
        elif isinstance(value, dict):
            plain[key] = _medians(value, f"{prefix}{key}.", spreads)
        else:
            plain[key] = value
    return plain


def show(figures: Mapping[str, Any], indent: int = 0) -> None:
    """Print nested figures, a spread as `median [min, max]`."""
    for key, value in figures.items():
        name = f"{'':{indent}}{key}"
        if is_spread(value):
            print(f"{name:36} {value['median']:.4g} [{value['min']:.4g}, {value['max']:.4g}]")
        elif isinstance(value, dict):
            print(name)
            show(value, indent + 2)
        else:
            print(f"{name:36} {value:.4g}" if isinstance(value, float) else f"{name:36} {value}")


def _commit() -> str:
    """Hash of the tree as measured; `+changes` when files differ from it."""

    def git(*arguments: str) -> str:
        done = subprocess.run(
            ["git", "-C", str(ROOT), *arguments], capture_output=True, text=True, check=False
        )
        return done.stdout.strip()

    changed = git(
        "status", "--porcelain", "--untracked-files=no", "--", ".", ":!benchmarks/results"
    )
    return (git("rev-parse", "HEAD") or "unknown") + ("+changes" if changed else "")


def _cpu_model() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    names = (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor() or "unknown")


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _arguments() -> list[str]:
    """The command line, without where results went and where the checkout lies."""
    arguments = list(sys.argv)
    script = Path(arguments[0]).resolve()
    if script.is_relative_to(ROOT):
        arguments[0] = str(script.relative_to(ROOT))
    if "--json" in arguments:
        at = arguments.index("--json")
        del arguments[at : at + 2]
    return arguments
