"""Which kernel computes tree attention: `training.attention` names it, or a function of the user's.

Legend: T this rank's queries, S all tokens of the bin, N heads, G key-value heads, D head size.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from gyre_megatron.errors import ConfigError
from gyre_megatron.extensions import ExtensionPoint
from gyre_megatron.ops.tree_attention import tree_attention

if TYPE_CHECKING:
    from gyre_megatron.training.tree_batch import TreeParams

AttentionCore = Callable[
    [torch.Tensor, torch.Tensor, torch.Tensor, "TreeParams", float], torch.Tensor
]
"""(query [N, T, D], key [G, S, D], value [G, S, D], params, scale) -> [N, T, D], with gradient.

`params.nodes` and `params.intervals` say what each query sees; what a core derives from them once
per micro-step it keeps in `params.cache`, under a key of its own."""


def cpu_core(query, key, value, params: TreeParams, scale: float) -> torch.Tensor:
    """The C++ kernel: dense pieces, merged by log-sum-exp."""
    return tree_attention(query, key, value, params.pieces, scale)


def flex_core(query, key, value, params: TreeParams, scale: float) -> torch.Tensor:
    """Compiled FlexAttention with a BlockMask from the tree."""
    from gyre_megatron.training.flex import flex_tree_attention  # imports torch's compiler

    return flex_tree_attention(query, key, value, params, scale)


def auto_core(query, key, value, params: TreeParams, scale: float) -> torch.Tensor:
    """The kernel for the device that the tensors are on."""
    core = flex_core if query.is_cuda else cpu_core
    return core(query, key, value, params, scale)


ATTENTION_CORES: ExtensionPoint[AttentionCore] = ExtensionPoint(
    "training.attention",
    parameters=("query", "key", "value", "params", "scale"),
    builtin={"auto": auto_core, "cpu": cpu_core, "flex": flex_core},
    returns="output [heads, queries, head size]",
)

_CANNOT = {
    ("flex", "cpu"): "FlexAttention has no backward pass on a CPU; set auto or cpu",
    ("cpu", "cuda"): "the C++ kernel reads tensors in host memory; set auto or flex",
}


def load_attention_core(name: str, device_type: str) -> AttentionCore:
    """The attention core of that name, for a model on a kind of device.

    Raises:
        ConfigError: there is no such core, it cannot be called, or it does not run there.
    """
    if reason := _CANNOT.get((name, device_type)):
        raise ConfigError(f"training.attention={name} on {device_type}: {reason}")
    return ATTENTION_CORES.load(name)
