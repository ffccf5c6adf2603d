"""Live FP8 parameters of an engine: what can be installed, and how.

They arrive as bf16 and are quantised here, where whole blocks are at hand.
"""

from __future__ import annotations

import torch

from gyre_megatron.errors import LayoutError
from gyre_megatron.ops.fp8 import BLOCK, quantize_blocks

SCALE_SUFFIX = "_scale_inv"
"""SGLang names the scales of `x.weight` `x.weight_scale_inv`."""

_BLOCK_ROWS = 16
"""Rows of blocks that are quantised at a time, which bounds the workspace."""


def check_fp8(model: torch.nn.Module) -> None:
    """Check that every FP8 parameter can be installed.

    Raises:
        LayoutError: a parameter has no block scales beside it, or scales of other blocks or another
            dtype than are quantised here.
    """
    tensors = {name: parameter.data for name, parameter in model.named_parameters()}
    for name, tensor in tensors.items():
        if tensor.dtype != torch.float8_e4m3fn:
            continue
        scales = tensors.get(name + SCALE_SUFFIX)
        if scales is None:
            raise LayoutError(
                f"{name} is FP8 without {SCALE_SUFFIX}; only {BLOCK} x {BLOCK} block scales can be "
                "installed"
            )
        *lead, rows, columns = tensor.shape
        expected = (*lead, -(-rows // BLOCK), -(-columns // BLOCK))
        if tuple(scales.shape) != expected or scales.dtype != torch.float32:
            raise LayoutError(
                f"{name}{SCALE_SUFFIX} is {scales.dtype} {tuple(scales.shape)}, but blocks of "
                f"{BLOCK} x {BLOCK} have float32 scales of shape {expected}; serve a checkpoint "
                "with such blocks, or one in bf16"
            )


def as_received(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor of the shape and dtype in which a parameter's next version arrives."""
    return tensor.to("meta", torch.bfloat16) if tensor.dtype == torch.float8_e4m3fn else tensor


def install_fp8(arrived: torch.Tensor, values: torch.Tensor, scales: torch.Tensor) -> None:
    """Quantise `arrived` (bf16, on the host) into a live parameter and its block scales."""
    *_, rows, columns = values.shape
    sources = arrived.reshape(-1, rows, columns)
    targets = values.view(-1, rows, columns)
    blocks = scales.view(-1, *scales.shape[-2:])
    for index in range(len(sources)):
        for first in range(0, blocks.shape[1], _BLOCK_ROWS):
            some = slice(first * BLOCK, (first + _BLOCK_ROWS) * BLOCK)
            quantized, found = quantize_blocks(sources[index, some].to(values.device))
            targets[index, some].copy_(quantized)
            blocks[index, first : first + _BLOCK_ROWS].copy_(found)
