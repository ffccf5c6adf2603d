"""What importing or patching could change in torch, Megatron and the process: taken as a snapshot,
compared by identity. Used in fresh processes by the tests of imports and of `enable_cpu`."""

from __future__ import annotations

import importlib
import logging
import multiprocessing
import os
import sys
import types
from typing import Any

MEGATRON = (
    "megatron.core",
    "megatron.core.dist_checkpointing.strategies.filesystem_async",
    "megatron.core.models.gpt.gpt_layer_specs",
    "megatron.core.optimizer",
    "megatron.core.ssm.gated_delta_net",
    "megatron.core.tensor_parallel",
    "megatron.core.transformer.moe.moe_layer",
    "megatron.core.transformer.multi_latent_attention",
)
_TORCH = (
    "torch",
    "torch.autograd",
    "torch.cuda",
    "torch.cuda.nvtx",
    "torch.cuda.random",
    "torch.distributed",
    "torch.multiprocessing",
    "torch.nn.functional",
    "torch.random",
    "torch.utils.checkpoint",
)

State = dict[str, Any]


def import_megatron() -> None:
    """Import what Gyre uses of Megatron, without Gyre."""
    for name in MEGATRON:
        importlib.import_module(name)


def state() -> State:
    """Attributes of torch and of Megatron's imported modules and their classes, and what a process
    shares."""
    import torch

    found: State = {}
    for name in _TORCH:
        _add(found, sys.modules.get(name) or importlib.import_module(name))
    for owner in (torch.Tensor, torch.nn.Module, torch.nn.Parameter):
        _add(found, owner)
    for name, module in list(sys.modules.items()):
        if name.startswith("megatron.") and module is not None:
            _add(found, module)
            for value in list(vars(module).values()):
                if isinstance(value, type) and value.__module__ == name:
                    _add(found, value)
    found["process.start_method"] = multiprocessing.get_start_method(allow_none=True)
    found["process.sharing"] = torch.multiprocessing.get_sharing_strategy()
    found["process.environ"] = dict(os.environ)
    found["process.path"] = list(sys.path)
    found["process.meta_path"] = [str(type(finder)) for finder in sys.meta_path]
    found["process.logging"] = list(logging.getLogger().handlers)
    found["torch.default_dtype"] = torch.get_default_dtype()
    found["torch.default_device"] = str(torch.get_default_device())
    return found


def _add(found: State, owner: Any) -> None:
    name = (
        owner.__name__
        if isinstance(owner, types.ModuleType)
        else f"{owner.__module__.removesuffix('._tensor')}.{owner.__qualname__}"
    )
    for attribute, value in list(vars(owner).items()):
        if not attribute.startswith("__"):
            found[f"{name}.{attribute}"] = value


def changes(before: State, after: State) -> list[str]:
    """What has another value now, or is gone; names that came with new submodules do not count."""
    missing = object()
    return sorted(
        name for name, value in before.items() if not _same(value, after.get(name, missing))
    )


def _same(old: Any, new: Any) -> bool:
    return old is new or (isinstance(old, str | int | float | list | dict) and old == new)
