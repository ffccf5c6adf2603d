"""Running other people's programs: own session, clean environment, limits, and nobody left behind.

The child is put into its own process group through util-linux's `setpriv` (dies with the control
plane) and `prlimit`.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

_POLL_S = 0.5
_TERM_GRACE_S = 1.0


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
    command: Sequence[str],
    cwd: Path,
    environment: Mapping[str, str],
    limits: Limits,
    own_prefix: Sequence[str] = (),
) -> Finished:
    """Run to the end or to a limit; the whole process group is gone afterwards.

    Raises:
        OSError: it cannot be started.
    """
    started = time.monotonic()
    process = await asyncio.create_subprocess_exec(
        *_limited(command, limits, own_prefix),
        cwd=cwd,
        env=dict(environment),
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
        await _end_group(process)
        await asyncio.wait(readers, timeout=2.0)
        for reader in readers:
            reader.cancel()
    output = [
        reader.result() if reader.done() and not reader.cancelled() else b"" for reader in readers
    ]
    return Finished(
        process.returncode or 0, reason, output[0], output[1], time.monotonic() - started
    )


def _limited(command: Sequence[str], limits: Limits, prefix: Sequence[str]) -> list[str]:
    words = ["setpriv", "--pdeathsig", "KILL", "prlimit", "--core=0"]
    if limits.cpu_s is not None:
        words.append(f"--cpu={limits.cpu_s}")
    if limits.max_file_mib is not None:
        words.append(f"--fsize={limits.max_file_mib << 20}")
    return [*words, "--", *prefix, *command]


async def _wait(process: asyncio.subprocess.Process, limits: Limits, started: float) -> str:
    while True:
        left = started + limits.wall_s - time.monotonic()
        if left <= 0:
            return "timeout"
        try:
            async with asyncio.timeout(min(left, _POLL_S) if limits.memory_mib else left):
                await process.wait()
            return "exit"
        except TimeoutError:
            if limits.memory_mib and _group_rss(process.pid) > limits.memory_mib << 20:
                return "memory"


async def _end_group(process: asyncio.subprocess.Process) -> None:
    """Ask the whole group to end, then make it."""
    if process.returncode is None:
        _signal_group(process.pid, signal.SIGTERM)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_TERM_GRACE_S):
                await process.wait()
    _signal_group(process.pid, signal.SIGKILL)
    await process.wait()


def _signal_group(group: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(group, number)


async def _read(stream: asyncio.StreamReader | None, cap: int) -> bytes:
    kept = bytearray()
    while stream is not None and (data := await stream.read(65_536)):
        kept += data[: cap - len(kept)]
    return bytes(kept)


def _group_rss(group: int) -> int:
    """Resident bytes of all processes of a group."""
    page = os.sysconf("SC_PAGE_SIZE")
    total = 0
    for entry in os.scandir("/proc"):
        if not entry.name.isdigit():
            continue
        try:
            fields = Path(entry.path, "stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue  # it ended while we looked
        if int(fields[2]) == group:
            total += int(fields[21]) * page
    return total


def end_orphans(variable: str, values: set[str]) -> int:
    """After a crash: kill processes whose environment has `variable` set to one of `values`;
    returns how many."""
    ended = 0
    for entry in os.scandir("/proc"):
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        try:
            environment = Path(entry.path, "environ").read_bytes().split(b"\0")
            name = variable.encode() + b"="
            if any(
                v.startswith(name) and v[len(name) :].decode(errors="replace") in values
                for v in environment
            ):
                os.kill(int(entry.name), signal.SIGKILL)
                ended += 1
        except OSError:
            continue  # it ended, or is not ours
    return ended
