"""Counters in shared memory by which processes of one host wait for each other (csrc: flags)."""

from __future__ import annotations

import torch

import gyre_megatron.ops.library  # noqa: F401  (registers torch.ops.gyre)


def flag_set(flags: torch.Tensor, index: int, value: int) -> None:
    """Publish `value`; everything written before is visible to whoever sees it.

    Args:
        flags: int64 on the CPU, usually in memory shared with other processes.
    """
    torch.ops.gyre.flag_set(flags, index, value)


def flag_get(flags: torch.Tensor, index: int) -> int:
    """The counter's value; everything its writer wrote before is visible."""
    return torch.ops.gyre.flag_get(flags, index)


def flag_wait(flags: torch.Tensor, index: int, value: int, cancel: int, timeout_s: float) -> int:
    """Wait until counter `index` is at least `value`, outside Python's lock.

    Returns:
        1 when reached, 0 after `timeout_s`, -1 when counter `cancel` became non-zero.
    """
    return torch.ops.gyre.flag_wait(flags, index, value, cancel, timeout_s)
