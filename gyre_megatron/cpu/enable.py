"""The switch that lets Megatron-Core run on a CPU; entrances call it, imports never do.

State of the process: off until `enable_cpu` is called, then on for good (a forked child inherits
it).
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

import torch

from gyre_megatron.cpu.patches import AppliedPatch
from gyre_megatron.errors import DeviceError
from gyre_megatron.versions import MEGATRON, require

_log = logging.getLogger("gyre_megatron.cpu")
_report: CpuReport | None = None


@dataclass(frozen=True)
class CpuReport:
    """What `enable_cpu` did.

    Attributes:
        enabled: whether Megatron runs on the CPU in this process.
        patches: every attribute that was replaced, with what was there before; empty where CUDA is
            available.
    """

    enabled: bool
    patches: tuple[AppliedPatch, ...] = ()

    def __str__(self) -> str:
        if not self.enabled:
            return "enable_cpu: CUDA is available, so nothing was changed"
        names: dict[str, list[str]] = {}
        for applied in self.patches:
            names.setdefault(applied.patch.owner.replace(":", "."), []).append(applied.patch.name)
        replaced = [f"{owner}: {', '.join(sorted(names[owner]))}" for owner in sorted(names)]
        return (
            "enable_cpu: Megatron-Core runs on the CPU in this process. Replaced (what belongs to "
            f"torch, for calls from megatron.* only): {'; '.join(replaced)}"
        )


def enable_cpu() -> CpuReport:
    """Let Megatron-Core run on this process's CPU, and say what that took (once, at INFO).

    Call it before Megatron is imported where you can: it is then loaded without torch's compiler,
    three seconds sooner. A second call returns the first one's report. Where CUDA is available
    nothing is changed, and the report says so.

    Raises:
        VersionError: megatron-core is missing or was not tested.
    """
    global _report
    require(MEGATRON)
    if _report is None:
        _report = CpuReport(False) if torch.cuda.is_available() else CpuReport(True, _apply())
        _log.info("%s", _report)
    return _report


def _apply() -> tuple[AppliedPatch, ...]:
    from gyre_megatron.cpu.cuda_stand_ins import CUDA_STAND_INS, prepare
    from gyre_megatron.cpu.megatron_assumptions import (
        MEGATRON_ASSUMPTIONS,
        disable_jit_fusion,
        import_megatron,
    )

    prepare()
    # torch first: Megatron reads some of it while it is imported
    applied = [patch.apply() for patch in CUDA_STAND_INS]
    import_megatron()
    applied += disable_jit_fusion()
    applied += [patch.apply() for patch in MEGATRON_ASSUMPTIONS]
    return tuple(applied)


def cpu_enabled() -> bool:
    """Whether `enable_cpu` has put Megatron on the CPU in this process."""
    return _report is not None and _report.enabled


def require_device() -> None:
    """Refuse to build a model that could not run.

    Raises:
        DeviceError: there is no CUDA device and `enable_cpu` was not called.
        VersionError: megatron-core is missing or was not tested.
    """
    require(MEGATRON)
    if not torch.cuda.is_available() and not cpu_enabled():
        raise DeviceError(
            "no CUDA device is available, and Megatron-Core assumes one; call "
            "gyre_megatron.cpu.enable_cpu() first to train on this CPU (it replaces what Megatron "
            "asks of torch.cuda, and reports it)"
        )


def local_device() -> torch.device:
    """Where this process's model lives."""
    if torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")
