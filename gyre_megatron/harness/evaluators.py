"""Scoring what is left in a workspace: a hidden pytest suite, a command, or a function of your own.

The extension point `evaluator.kind` of a task. An evaluator that cannot do its work raises
EvaluatorFailure; that is never a zero. Scores are in [0, 1].
"""

from __future__ import annotations

import asyncio
import inspect
import json
import math
import os
import secrets
import sys
import tempfile
import threading
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from gyre_megatron.errors import GyreError
from gyre_megatron.extensions import ExtensionPoint
from gyre_megatron.harness.commands import fill_words, split_command
from gyre_megatron.harness.subprocesses import Limits, run_program
from gyre_megatron.harness.task_spec import Task
from gyre_megatron.harness.workspace import copy_contained

EVALUATOR_PLACEHOLDERS = ("task", "workspace")
_PYTEST_USAGE_ERROR = 4


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
        score = await load_evaluator(task)(task, copy, limit, environment)
    if not left_out:
        return score
    return Score(score.reward, {**score.detail, "left_out": left_out[:20]})


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
    # -P -s, -c, --rootdir, --confcutdir: nothing of the workspace's is imported before the suite.
    command = [sys.executable, "-P", "-s", "-m", "pytest", "-q", "-c", os.devnull]
    command += ["-p", "no:cacheprovider", "-p", recorder.stem]
    command += ["--rootdir", str(suite), "--confcutdir", str(suite), str(suite)]
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
    if not report.exists() or finished.code == _PYTEST_USAGE_ERROR:
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
    """Names of the tests that passed and that failed; lines without the nonce are forged."""
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
    words = fill_words(
        split_command(task.evaluator.command, "evaluator.command"),
        {"task": task.directory, "workspace": workspace},
    )
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


async def _function(
    function: Callable[[Path, Path], Any],
    task: Task,
    workspace: Path,
    timeout_s: float,
    environment: dict[str, str],
) -> Score:
    """A trusted function, called with (workspace, task directory); it gives a reward, or a dict
    with one."""
    try:
        async with asyncio.timeout(timeout_s):
            if inspect.iscoroutinefunction(function):
                result = await function(workspace, task.directory)
            else:
                result = await _in_own_thread(partial(function, workspace, task.directory))
    except Exception as error:  # whatever somebody's function raises
        name = getattr(function, "__name__", task.evaluator.kind)
        raise EvaluatorFailure(f"{name} failed: {type(error).__name__}: {error}") from error
    if not isinstance(result, dict):
        return Score(_reward(result))
    detail = {key: value for key, value in result.items() if key != "reward"}
    return Score(_reward(result.get("reward")), detail)


async def _in_own_thread(work: Callable[[], Any]) -> Any:
    """Run blocking work in a daemon thread of its own.

    Work that never returns must neither take a place in the pool that everything else shares, nor
    keep the process from ending.
    """
    loop = asyncio.get_running_loop()
    done = loop.create_future()

    def settle(result: Any, error: BaseException | None) -> None:
        if done.cancelled():  # the timeout has passed
            return
        if error is None:
            done.set_result(result)
        else:
            done.set_exception(error)

    def run() -> None:
        result: Any = None
        error: BaseException | None = None
        try:
            result = work()
        except BaseException as raised:  # SystemExit too is a failure of the evaluator only
            error = raised if isinstance(raised, Exception) else RuntimeError(repr(raised))
        if not loop.is_closed():
            loop.call_soon_threadsafe(settle, result, error)

    threading.Thread(target=run, name="evaluator", daemon=True).start()
    return await done


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


Evaluator = Callable[..., Any]
"""Ours are coroutines of (task, workspace, timeout_s, environment)."""

_OURS: dict[str, Evaluator] = {"pytest": _pytest, "command": _command}

EVALUATORS: ExtensionPoint[Callable[..., Any]] = ExtensionPoint(
    key="evaluator.kind",
    parameters=("workspace", "task"),  # of your own; ours, which are told by name, take more
    builtin=_OURS,
    returns="a reward in [0, 1], or a dict with `reward`",
)


def load_evaluator(task: Task) -> Evaluator:
    """The evaluator that a task names; a file is looked for beside its task.yaml.

    Raises:
        ConfigError: there is none, or it cannot be called with (workspace, task directory).
    """
    spec = task.evaluator
    if spec.kind in _OURS:
        return _OURS[spec.kind]
    point = EVALUATORS
    name = spec.kind
    if name == "python":
        point = replace(EVALUATORS, key="evaluator.function", builtin={})
        name = spec.function
    where, colon, function = name.rpartition(":")
    if where.endswith(".py"):
        name = f"{task.directory / where}{colon}{function}"
    return partial(_function, point.load(name))
