"""Whether the kernel's clock is kept right, for `gyre doctor`."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

_STA_UNSYNC = 0x0040
_TIME_ERROR = 5


@dataclass(frozen=True)
class ClockState:
    """What adjtimex(2) answers."""

    synchronised: bool
    max_error_ms: float


class _Timex(ctypes.Structure):
    """`struct timex` of <sys/timex.h>, up to the fields read here; the rest is room."""

    _fields_ = (
        ("modes", ctypes.c_uint),
        ("offset", ctypes.c_long),
        ("freq", ctypes.c_long),
        ("maxerror", ctypes.c_long),
        ("esterror", ctypes.c_long),
        ("status", ctypes.c_int),
        ("rest", ctypes.c_byte * 256),
    )


def read() -> ClockState | None:
    """The clock's state, or None where the kernel does not answer (some sandboxes)."""
    about = _Timex()  # modes = 0: read, change nothing
    code = ctypes.CDLL(None, use_errno=True).adjtimex(ctypes.byref(about))
    if code < 0:
        return None
    synchronised = code != _TIME_ERROR and not about.status & _STA_UNSYNC
    return ClockState(synchronised, about.maxerror / 1000)
