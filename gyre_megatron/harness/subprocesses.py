"""Running other people's programs: own session, clean environment, limits, and nobody left behind.

The child is put into its own process group through util-linux's `setpriv` (dies with the control
plane) and `prlimit`. Every program carries a mark in its environment, by which also those of its
processes are found that left the group.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
import signal
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from gyre_megatron.processes import group_members, marked, resident_bytes, send

log = logging.getLogger(__name__)

PROGRAM_VARIABLE = "GYRE_PROGRAM"
_POLL_S = 0.5
_TERM_GRACE_S = 1.0
_KILL_TIMEOUT_S = 5.0  # one that waits for a dead disk cannot be killed
_OUTPUT_GRACE_S = 2.0  # a pipe that somebody else holds open is not waited for


@dataclass(frozen=True)
class Limits:
    """What a program may use; None is no limit."""

    wall_s: float
    cpu_s: int | None = None
    memory_mib: int | None = None
    max_file_mib: int | None = None
    max_output_kib: int = 1024


@dataclass(frozen=True)
class Finished:
    """How a program ended.

    Attributes:
        code: Exit status; negative is a signal.
        reason: exit, timeout or memory.
        stdout: At most max_output_kib, the beginning.
    """

    code: int
    reason: str
    stdout: bytes
    stderr: bytes
    wall_s: float


async def run_program(
    command: Sequence[str], cwd: Path, environment: Mapping[str, str], limits: Limits
) -> Finished:
    """Run to the end or to a limit; all that it started is gone afterwards.

    Args:
        command: Program and words; no shell.
        cwd: Where it works.
        environment: All of its variables, but for a mark that is added.

    Raises:
        OSError: it cannot be started.
    """
    started = time.monotonic()
    mark = secrets.token_hex(8)
    process = await asyncio.create_subprocess_exec(
        *_limited(command, limits),
        cwd=cwd,
        env={**environment, PROGRAM_VARIABLE: mark},
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        start_new_session=True,
    )
    cap = limits.max_output_kib << 10
    readers = [
        asyncio.create_task(_read(stream, cap)) for stream in (process.stdout, process.stderr)
    ]
    reason = "exit"
    try:
        reason = await _wait(process, limits, started)
    finally:
        await _end(process, mark)
        await asyncio.wait(readers, timeout=_OUTPUT_GRACE_S)
        for reader in readers:
            reader.cancel()
    output = [
        reader.result() if reader.done() and not reader.cancelled() else b"" for reader in readers
    ]
    return Finished(
        process.returncode or 0, reason, output[0], output[1], time.monotonic() - started
    )


def _limited(command: Sequence[str], limits: Limits) -> list[str]:
    words = ["setpriv", "--pdeathsig", "KILL", "prlimit", "--core=0"]
    if limits.cpu_s is not None:
        words.append(f"--cpu={limits.cpu_s}")
    if limits.max_file_mib is not None:
        words.append(f"--fsize={limits.max_file_mib << 20}")
    return [*words, "--", *command]


async def _wait(process: asyncio.subprocess.Process, limits: Limits, started: float) -> str:
    while True:
        left = started + limits.wall_s - time.monotonic()
        if left <= 0:
            return "timeout"
        try:
            async with asyncio.timeout(min(left, _POLL_S) if limits.memory_mib else left):
                await _exit_of(process)
            return "exit"
        except TimeoutError:
            if limits.memory_mib is None:
                continue
            if await asyncio.to_thread(_resident, process.pid) > limits.memory_mib << 20:
                return "memory"


def _resident(pid: int) -> int:
    return resident_bytes(group_members(pid))


async def _end(process: asyncio.subprocess.Process, mark: str) -> None:
    """Ask everybody to end, then make them: also those that called setsid, or lost their parent."""
    if process.returncode is None:
        send(await asyncio.to_thread(group_members, process.pid), signal.SIGTERM)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_TERM_GRACE_S):
                await _exit_of(process)
    deadline = time.monotonic() + _KILL_TIMEOUT_S
    num_clear = 0
    # Twice: one that is starting a program at this moment shows no environment for an instant.
    while num_clear < 2:
        found = await asyncio.to_thread(_kill, process.pid, mark)
        num_clear = 0 if found else num_clear + 1
        if found and time.monotonic() > deadline:
            log.warning("processes of program %d do not end even when killed", process.pid)
            break
        await asyncio.sleep(0.01)
    while process.returncode is None:  # dead by now; asyncio's own watcher is about to say so
        await asyncio.sleep(0.001)


async def _exit_of(process: asyncio.subprocess.Process) -> None:
    """Wait until the process itself has ended.

    Its own wait() waits for its pipes as well, which a daemon that it left behind keeps open.
    """
    try:
        descriptor = os.pidfd_open(process.pid)
    except ProcessLookupError:  # ended and reaped already
        return
    loop = asyncio.get_running_loop()
    ended = asyncio.Event()
    loop.add_reader(descriptor, ended.set)
    try:
        await ended.wait()
    finally:
        loop.remove_reader(descriptor)
        os.close(descriptor)


def _kill(pid: int, mark: str) -> int:
    return send([*group_members(pid), *marked(PROGRAM_VARIABLE, {mark})], signal.SIGKILL)


async def _read(stream: asyncio.StreamReader | None, cap: int) -> bytes:
    kept = bytearray()
    while stream is not None and (data := await stream.read(65_536)):
        kept += data[: cap - len(kept)]
    return bytes(kept)
