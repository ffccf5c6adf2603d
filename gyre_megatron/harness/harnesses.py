"""How a harness is run: the configured command, or an async function of your own.

The extension point `rollout.harness.kind`. A harness is given a `HarnessRequest` and works in its
workspace through the proxy's address and key; how it ends decides nothing, the workspace is scored.
Called by the runner, once per execution.
"""

from __future__ import annotations

import asyncio
import inspect
import time
import traceback
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from gyre_megatron.errors import ConfigError, GyreError
from gyre_megatron.extensions import ExtensionPoint
from gyre_megatron.harness.subprocesses import Finished, Limits, run_program

# A command ends by its own limit, which kills it first; a function is given this much longer.
_GRACE_S = 5.0


@dataclass(frozen=True)
class HarnessRequest:
    """One execution, as a harness sees it.

    Attributes:
        base_url: Root of the proxy: Anthropic's clients take it as it is, OpenAI's with /v1.
        key: Bearer token of this execution; it dies with it.
        model: Model name to ask for.
        prompt: What the task asks for.
        workspace: Directory to work in; what is left there is scored.
        timeout_s: Wall time after which the harness is ended.
        command: The configured command with its placeholders filled in; empty if there is none.
        environment: Variables for a program; they hold base_url and key under the names that
            clients know.
        limits: What a program may use.
    """

    base_url: str
    key: str
    model: str
    prompt: str
    workspace: Path
    timeout_s: float
    command: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    limits: Limits = field(default_factory=lambda: Limits(wall_s=3600.0))


Harness = Callable[[HarnessRequest], Awaitable[Finished | None]]


class HarnessNotStarted(GyreError, RuntimeError):
    """Nothing ran, so there is nothing to score."""


async def run_command(request: HarnessRequest) -> Finished:
    """The default harness: the configured command as a program of its own.

    Raises:
        HarnessNotStarted: there is no such program.
    """
    try:
        return await run_program(
            request.command, request.workspace, request.environment, request.limits
        )
    except OSError as error:
        raise HarnessNotStarted(f"the harness could not be started: {error}") from error


HARNESSES: ExtensionPoint[Harness] = ExtensionPoint(
    key="rollout.harness.kind",
    parameters=("request",),
    builtin={"command": run_command},
    returns="None, when it has ended",
)


def load_harness(kind: str) -> Harness:
    """The harness that `rollout.harness.kind` names.

    Raises:
        ConfigError: there is none, or it is not an async function of a request.
    """
    harness = HARNESSES.load(kind)
    if not inspect.iscoroutinefunction(harness):
        raise ConfigError(
            f"{HARNESSES.key}: {kind} is not an async function; it shares its loop with the "
            "proxy, so write `async def` and await what takes time"
        )
    return harness


async def run_harness(harness: Harness, request: HarnessRequest) -> Finished:
    """Run a harness to its end or its timeout; what it raises is how it ended.

    Raises:
        HarnessNotStarted: nothing ran.
    """
    started = time.monotonic()
    code = 0
    reason = "exit"
    said = b""
    try:
        async with asyncio.timeout(request.timeout_s + _GRACE_S) as limit:
            finished = await harness(request)
        if isinstance(finished, Finished):
            return finished
    except HarnessNotStarted:
        raise
    except Exception:  # whatever somebody's function raises: a failed rollout is data
        code = 1
        reason = "timeout" if limit.expired() else "exit"
        said = traceback.format_exc().encode()
    return Finished(code, reason, b"", said, time.monotonic() - started)
