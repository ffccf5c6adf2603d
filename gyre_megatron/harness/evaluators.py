"""Scoring what is left in a workspace: a hidden pytest suite, a command, or a Python function.

An evaluator that cannot do its work raises EvaluatorFailure; that is never a zero. Scores are in
[0, 1].
"""

from __future__ import annotations

import asyncio
import importlib
import importlib.util
import json
import math
import os
import secrets
import shlex
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gyre_megatron.errors import GyreError
from gyre_megatron.harness.subprocesses import Limits, run_program
from gyre_megatron.harness.tasks import Task
from gyre_megatron.harness.workspace import copy_contained


class EvaluatorFailure(GyreError, RuntimeError):
    """The evaluator did not do its work: the execution has no score, which is not a score of
    zero."""


@dataclass(frozen=True)
class Score:
    """A reward in [0, 1] with what the evaluator said."""

    reward: float
    detail: dict[str, Any] = field(default_factory=dict)


async def evaluate(
    task: Task, workspace: Path, timeout_s: float, environment: dict[str, str]
) -> Score:
    """Score a copy of `workspace`; the original is only read.

    Raises:
        EvaluatorFailure: no score could be had.
    """
    limit = task.evaluator.timeout_s or timeout_s
    with tempfile.TemporaryDirectory(prefix="gyre-evaluate-") as scratch:
        copy = Path(scratch, "workspace")
        try:
            left_out = await asyncio.to_thread(copy_contained, workspace, copy)
        except OSError as error:
            raise EvaluatorFailure(
                f"the workspace {workspace} could not be copied: {error}"
            ) from error
        score = await _EVALUATORS[task.evaluator.kind](task, copy, limit, environment)
    return Score(
        score.reward, {**score.detail, **({"left_out": left_out[:20]} if left_out else {})}
    )


async def _pytest(
    task: Task, workspace: Path, timeout_s: float, environment: dict[str, str]
) -> Score:
    """Share of the hidden suite that passes; tests that a timeout kept from running have not
    passed."""
    suite = workspace.parent / "suite"
    await asyncio.to_thread(copy_contained, task.directory / task.evaluator.tests, suite)
    report = workspace.parent / f"report-{secrets.token_hex(8)}"
    nonce = secrets.token_hex(16)
    recorder = Path(__file__).with_name("pytest_recorder.py")
    command = [
        sys.executable,
        "-P",
        "-s",
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "-p",
        recorder.stem,
        "--rootdir",
        str(suite),
        "--confcutdir",
        str(suite),
        "-c",
        os.devnull,
        str(suite),
    ]
    variables = {
        **environment,
        "GYRE_WORKSPACE": str(workspace),
        "GYRE_REPORT": str(report),
        "GYRE_NONCE": nonce,
        "PYTHONPATH": str(recorder.parent),
        "PYTHONDONTWRITEBYTECODE": "1",
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
    }
    finished = await run_program(
        command, workspace, variables, Limits(timeout_s, max_output_kib=64)
    )
    if not report.exists() or finished.code == 4:
        said = _tail(finished.stderr or finished.stdout)
        raise EvaluatorFailure(f"pytest failed with status {finished.code}: {said}")
    passed, failed = _outcomes(report.read_text(errors="replace").splitlines(), nonce)
    total = max(task.evaluator.num_tests, len(passed | failed))
    detail = {
        "passed": len(passed - failed),
        "total": total,
        "ended_by": finished.reason,
        "code": finished.code,
    }
    return Score(len(passed - failed) / total, detail)


def _outcomes(lines: list[str], nonce: str) -> tuple[set[str], set[str]]:
    passed: set[str] = set()
    failed: set[str] = set()
    for line in lines:
        found, when, outcome, test = [*line.split(" ", 3), "", "", "", ""][:4]
        if found == nonce:
            (passed if outcome == "passed" and when == "call" else failed).add(test)
    return passed, failed


async def _command(
    task: Task, workspace: Path, timeout_s: float, environment: dict[str, str]
) -> Score:
    """The last line the command prints is a JSON object with `reward`."""
    words = [
        w.format(task=task.directory, workspace=workspace)
        for w in shlex.split(task.evaluator.command)
    ]
    variables = {**environment, "GYRE_WORKSPACE": str(workspace), "GYRE_TASK": str(task.directory)}
    try:
        finished = await run_program(
            words, workspace, variables, Limits(timeout_s, max_output_kib=256)
        )
    except OSError as error:
        raise EvaluatorFailure(f"the evaluator {words[0]} could not be started: {error}") from error
    if finished.code != 0 or finished.reason != "exit":
        raise EvaluatorFailure(
            f"the evaluator ended by {finished.reason} with status {finished.code}: "
            f"{_tail(finished.stderr)}"
        )
    lines = finished.stdout.decode(errors="replace").strip().splitlines()
    try:
        result = json.loads(lines[-1])
        return Score(_reward(result["reward"]), {k: v for k, v in result.items() if k != "reward"})
    except (IndexError, ValueError, KeyError, TypeError) as error:
        raise EvaluatorFailure(
            f"the evaluator's last line is no JSON object with a reward: {lines[-1:]}"
        ) from error


async def _python(
    task: Task, workspace: Path, timeout_s: float, environment: dict[str, str]
) -> Score:
    """A trusted function of ours, called in a thread with (workspace, task directory); returns a
    reward or a Score."""
    try:
        function = _function(task)
        async with asyncio.timeout(timeout_s):
            result = await asyncio.to_thread(function, workspace, task.directory)
    except Exception as error:
        raise EvaluatorFailure(
            f"{task.evaluator.function} failed: {type(error).__name__}: {error}"
        ) from error
    if isinstance(result, dict):
        return Score(
            _reward(result.get("reward")), {k: v for k, v in result.items() if k != "reward"}
        )
    return Score(_reward(result))


def _function(task: Task) -> Callable[[Path, Path], Any]:
    place, _, name = task.evaluator.function.partition(":")
    if not place.endswith(".py"):
        return getattr(importlib.import_module(place), name)
    file = task.directory / place
    spec = importlib.util.spec_from_file_location(f"gyre_task_{task.name}", file)
    if spec is None or spec.loader is None:
        raise ImportError(f"{file} cannot be loaded")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return getattr(module, name)


def _reward(value: Any) -> float:
    if (
        isinstance(value, bool)
        or not isinstance(value, int | float)
        or not math.isfinite(value)
        or not 0 <= value <= 1
    ):
        raise EvaluatorFailure(f"a reward must be a number in [0, 1], found {value!r}")
    return float(value)


def _tail(output: bytes) -> str:
    return output.decode(errors="replace")[-500:]


_EVALUATORS = {"pytest": _pytest, "command": _command, "python": _python}
