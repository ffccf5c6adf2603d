"""Ties the life of a child process to its parent's, so that a killed run leaves nothing behind."""

from __future__ import annotations

import ctypes
import os
import signal
import sys

PARENT_PID = "GYRE_PARENT_PID"
_PR_SET_PDEATHSIG = 1


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
