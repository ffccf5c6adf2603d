"""One execution: a workspace, a harness in it, a score of what it left, and how it all ended.

The harness knows a base URL and a key. Whatever ends it (its own exit, its timeout, a limit), the
workspace is scored.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gyre_megatron.config.rollout import RolloutConfig
from gyre_megatron.harness.commands import fill_words
from gyre_megatron.harness.evaluators import EvaluatorFailure, evaluate
from gyre_megatron.harness.extensions import command_words
from gyre_megatron.harness.harnesses import (
    HarnessNotStarted,
    HarnessRequest,
    load_harness,
    run_harness,
)
from gyre_megatron.harness.subprocesses import Finished, Limits
from gyre_megatron.harness.task_spec import Task
from gyre_megatron.harness.workspace import Workspace
from gyre_megatron.processes import marked, send
from gyre_megatron.trajectory.records import ExecutionRecord, Outcome
from gyre_megatron.trajectory.store import TrajectoryStore

log = logging.getLogger(__name__)

EXECUTION_VARIABLE = "GYRE_EXECUTION"
# What shells and container runtimes say when a program or an image is not to be had.
_NOT_STARTED = (125, 126, 127)


@dataclass(frozen=True)
class HarnessContext:
    """What all executions of a run share."""

    store: TrajectoryStore
    tasks: Mapping[str, Task]
    config: RolloutConfig
    base_url: str
    model_name: str = "gyre"

    @property
    def workspaces(self) -> Path:
        """Where workspaces are made."""
        return self.config.harness.workspaces or self.store.path.parent / "workspaces"


async def run_execution(context: HarnessContext, execution_id: str) -> Outcome:
    """Start a queued execution, run its harness, score it and record how it ended.

    Raises:
        StoreError: it is not queued.
    """
    token = await asyncio.to_thread(context.store.start_execution, execution_id)
    execution = context.store.execution(execution_id)
    workspace = Workspace((context.workspaces / f"{execution_id}.{execution.attempt}").absolute())
    try:
        async with asyncio.timeout(context.config.harness.overall_timeout_s):
            outcome = await _run_and_score(context, execution, workspace, token)
    except TimeoutError:
        outcome = Outcome("dropped", None, {"reason": "the overall timeout passed"})
    await asyncio.to_thread(context.store.finish_execution, execution_id, outcome)
    if not context.config.harness.keep_workspaces:
        await asyncio.to_thread(workspace.remove)
    return outcome


def end_orphaned_harnesses(store: TrajectoryStore) -> int:
    """After a crash, before `requeue_running`: end harnesses of executions that still count as
    running."""
    running = {
        _label(store, execution.execution_id) for execution in store.executions(states=["running"])
    }
    return send(marked(EXECUTION_VARIABLE, running), signal.SIGKILL) if running else 0


async def _run_and_score(
    context: HarnessContext, execution: ExecutionRecord, workspace: Workspace, token: str
) -> Outcome:
    task = context.tasks[context.store.group(execution.group_id).query["task"]]
    detail: dict[str, Any] = {}
    try:
        await asyncio.to_thread(workspace.create, task.directory / "workspace", task.prompt)
        request = _request(context, execution, task, workspace, token)
        finished = await run_harness(load_harness(context.config.harness.kind), request)
        detail["harness"] = _summary(finished)
        _keep_output(execution, workspace, finished)
    except (OSError, HarnessNotStarted) as error:
        # Nothing ran, so there is nothing to score: a placeholder, not a verdict on the policy.
        log.warning("execution %s could not start: %s", execution.execution_id, error)
        return Outcome("placeholder", 0.0, {"reason": str(error)})
    if finished.code in _NOT_STARTED and not context.store.calls(execution.execution_id):
        said = finished.stderr.decode(errors="replace")[-500:]
        return Outcome("placeholder", 0.0, {**detail, "reason": f"the harness never began: {said}"})
    return await _score(context, task, workspace, detail)


def _request(
    context: HarnessContext,
    execution: ExecutionRecord,
    task: Task,
    workspace: Workspace,
    token: str,
) -> HarnessRequest:
    config = context.config.harness
    timeout_s = task.timeout_s or config.timeout_s
    return HarnessRequest(
        base_url=context.base_url,
        key=token,
        model=context.model_name,
        prompt=task.prompt,
        workspace=workspace.work,
        timeout_s=timeout_s,
        command=tuple(_command(context, task, workspace)),
        environment=_environment(context, execution, task, workspace, token),
        limits=Limits(
            timeout_s, config.cpu_s, config.memory_mib, config.max_file_mib, config.max_output_kib
        ),
    )


def _keep_output(execution: ExecutionRecord, workspace: Workspace, finished: Finished) -> None:
    (workspace.root / "stdout.log").write_bytes(finished.stdout)
    (workspace.root / "stderr.log").write_bytes(finished.stderr)
    if finished.code != 0:
        tail = finished.stderr.decode(errors="replace")[-500:]
        log.warning(
            "harness of %s: %s, status %d: %s",
            execution.execution_id,
            finished.reason,
            finished.code,
            tail,
        )


def _command(context: HarnessContext, task: Task, workspace: Workspace) -> list[str]:
    values = {
        "prompt": task.prompt,
        "prompt_file": workspace.prompt_file,
        "workspace": workspace.work,
        "task": task.directory,
        "model": context.model_name,
        "base_url": context.base_url,
    }
    return fill_words(command_words(task, context.config.harness), values)


def _environment(
    context: HarnessContext,
    execution: ExecutionRecord,
    task: Task,
    workspace: Workspace,
    token: str,
) -> dict[str, str]:
    config = context.config.harness
    passed = {name: os.environ[name] for name in config.pass_environment if name in os.environ}
    return {
        **passed,
        "HOME": str(workspace.home),
        "TMPDIR": str(workspace.tmp),
        "TERM": "dumb",
        "ANTHROPIC_BASE_URL": context.base_url,
        "ANTHROPIC_AUTH_TOKEN": token,
        "OPENAI_BASE_URL": f"{context.base_url}/v1",
        "OPENAI_API_KEY": token,
        "GYRE_MODEL": context.model_name,
        "GYRE_PROMPT_FILE": str(workspace.prompt_file),
        "GYRE_ATTEMPT": str(execution.attempt),
        "GYRE_POSITION": str(execution.position),
        EXECUTION_VARIABLE: _label(context.store, execution.execution_id),
        **config.environment,
        **task.environment,
    }


def _label(store: TrajectoryStore, execution_id: str) -> str:
    """Unique on the machine: two runs may have executions of the same name."""
    return f"{store.path.resolve()}#{execution_id}"


async def _score(
    context: HarnessContext, task: Task, workspace: Workspace, detail: dict[str, Any]
) -> Outcome:
    config = context.config.evaluator
    passed = {n: os.environ[n] for n in context.config.harness.pass_environment if n in os.environ}
    environment = {**passed, "HOME": str(workspace.tmp), "TMPDIR": str(workspace.tmp)}
    failures: list[str] = []
    for _ in range(config.retries + 1):
        try:
            score = await evaluate(task, workspace.work, config.timeout_s, environment)
            return Outcome(
                "scored", score.reward, {**detail, "evaluator": score.detail, "failures": failures}
            )
        except EvaluatorFailure as failure:
            failures.append(str(failure))
    return Outcome(
        "excluded", None, {**detail, "reason": "the evaluator failed", "failures": failures}
    )


def _summary(finished: Finished) -> dict[str, Any]:
    return {"code": finished.code, "ended_by": finished.reason, "wall_s": round(finished.wall_s, 3)}
