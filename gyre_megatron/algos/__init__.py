"""What a step optimises: pure functions of tensors, without models and process groups of their own.

The names below are the public ones; they are loaded (torch with them) when first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gyre_megatron.algos.extensions import OBJECTIVES
    from gyre_megatron.algos.gspo import gspo_loss
    from gyre_megatron.algos.logprobs import EdgeStatistics, edge_statistics
    from gyre_megatron.algos.objective import EdgeBatch, ObjectiveContext, ObjectiveResult

_HOMES = {
    "OBJECTIVES": "extensions",
    "EdgeBatch": "objective",
    "EdgeStatistics": "logprobs",
    "ObjectiveContext": "objective",
    "ObjectiveResult": "objective",
    "edge_statistics": "logprobs",
    "gspo_loss": "gspo",
}

__all__ = [
    "OBJECTIVES",
    "EdgeBatch",
    "EdgeStatistics",
    "ObjectiveContext",
    "ObjectiveResult",
    "edge_statistics",
    "gspo_loss",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
