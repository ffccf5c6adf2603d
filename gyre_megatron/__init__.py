"""Gyre-Megatron: a Megatron-Core plugin for elastic reinforcement learning of coding agents."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gyre_megatron.commands.train import run
    from gyre_megatron.config.loader import GyreConfig, load_config

__version__ = "0.1.0"
__all__ = ["GyreConfig", "__version__", "load_config", "run"]

_HOMES = {
    "GyreConfig": "gyre_megatron.config.loader",
    "load_config": "gyre_megatron.config.loader",
    "run": "gyre_megatron.commands.train",
}


def __getattr__(name: str) -> Any:
    """Import a public name when it is first asked for: `import gyre_megatron` alone costs nothing,
    and a subprocess that needs one room does not pay for the others."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
