"""Megatron-Core and SGLang on a machine without CUDA. Importing it changes nothing; `enable_cpu`
does, and says what."""

from gyre_megatron.cpu.enable import (
    CpuReport,
    cpu_enabled,
    enable_cpu,
    local_device,
    require_device,
)

__all__ = ["CpuReport", "cpu_enabled", "enable_cpu", "local_device", "require_device"]
