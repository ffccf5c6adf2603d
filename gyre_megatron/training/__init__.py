"""Training with Megatron-Core on packed trees. The only room that imports megatron.

Importing this package imports neither megatron nor torch; its names are loaded when they are first
used. On a machine without CUDA call `gyre_megatron.cpu.enable_cpu()` before you build a trainer.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gyre_megatron.training.layer_spec import tree_layer_spec
    from gyre_megatron.training.model import build_model_chunks
    from gyre_megatron.training.trainer import Trainer
    from gyre_megatron.training.tree_batch import TreeBatch, TreeParams, make_batch, padded_length

_HOMES = {
    "Trainer": "trainer",
    "TreeBatch": "tree_batch",
    "TreeParams": "tree_batch",
    "build_model_chunks": "model",
    "make_batch": "tree_batch",
    "padded_length": "tree_batch",
    "tree_layer_spec": "layer_spec",
}

__all__ = [
    "Trainer",
    "TreeBatch",
    "TreeParams",
    "build_model_chunks",
    "make_batch",
    "padded_length",
    "tree_layer_spec",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
