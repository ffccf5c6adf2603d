"""Other processes: ties the life of a child to its parent's, and finds what a program has started,
so that a run leaves nothing behind.

Used by the rooms that start programs (engines, harness, runtime). Invariant: a process is told by
its id together with its start, so one that took over an id is never hit.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
from collections.abc import Collection, Iterable

import psutil

PARENT_PID = "GYRE_PARENT_PID"
_PR_SET_PDEATHSIG = 1
_GONE = (psutil.NoSuchProcess, psutil.AccessDenied, ProcessLookupError, PermissionError)


def child_environment() -> dict[str, str]:
    """Environment of a child that will call `die_with_parent`."""
    return os.environ | {PARENT_PID: str(os.getpid())}


def die_with_parent() -> None:
    """Ask Linux to end this process when the process that started it ends, however it ends."""
    expected = os.environ.pop(PARENT_PID, None)
    if expected is None:
        return
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != int(expected):
        sys.exit("the process that started this one has ended already")


def group_members(group: int) -> list[psutil.Process]:
    """Live processes of a process group, whether its leader still lives or not."""
    members = []
    for pid in psutil.pids():
        with contextlib.suppress(*_GONE):
            if os.getpgid(pid) == group and (process := psutil.Process(pid)).status() != "zombie":
                members.append(process)
    return members


def marked(variable: str, values: Collection[str]) -> list[psutil.Process]:
    """Processes that were started with an environment variable set to one of `values`.

    Finds what has left its group and its parents (`setsid`, daemons), unless it cleared its
    environment. Never this process.
    """
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(*_GONE):
            if process.pid != os.getpid() and process.environ().get(variable) in values:
                found.append(process)
    return found


def send(processes: Iterable[psutil.Process], number: signal.Signals) -> int:
    """Send a signal to those that still live; returns how many."""
    count = 0
    for process in processes:
        with contextlib.suppress(*_GONE):
            process.send_signal(number)
            count += 1
    return count


def resident_bytes(processes: Iterable[psutil.Process]) -> int:
    """Resident memory of those that still live, shared pages counted for each."""
    total = 0
    for process in processes:
        with contextlib.suppress(*_GONE):
            total += process.memory_info().rss
    return total
