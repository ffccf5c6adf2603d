"""FP8 tensors of a checkpoint as numbers: each with the scales that lie beside it.

Formats: e4m3 or e5m2 values of `x.weight` with `x.weight_scale_inv` (one scale per 128 x 128 block,
float32 or UE8M0: DeepSeek-V3, Qwen3 FP8) or with `x.weight_scale` (one scale per tensor or per
row: compressed-tensors, ModelOpt). In all of them value * scale restores the weight.
"""

from __future__ import annotations

from collections.abc import Collection

import torch

from gyre_megatron.errors import CheckpointError
from gyre_megatron.ops.fp8 import BLOCK
from gyre_megatron.weights.boxes import Box, Index

FP8_DTYPES = (torch.float8_e4m3fn, torch.float8_e5m2)
_SUFFIXES = ("_scale_inv", "_scale")


def scale_name(name: str, names: Collection[str]) -> str:
    """The tensor that holds the scales of FP8 tensor `name`.

    Raises:
        CheckpointError: there is none.
    """
    for suffix in _SUFFIXES:
        if name + suffix in names:
            return name + suffix
    raise CheckpointError(
        f"{name} is FP8, but the checkpoint has no {name}{_SUFFIXES[0]} or {name}{_SUFFIXES[1]} "
        "beside it; train from a checkpoint in bf16, or from one with its scales"
    )


def dequantize_box(
    values: torch.Tensor, scales: torch.Tensor, box: Box, shape: Index, name: str
) -> torch.Tensor:
    """The box of an FP8 tensor as float32.

    Args:
        values: FP8, of the box's shape.
        scales: of the whole tensor, as the checkpoint holds them.
        box: which part of the tensor `values` are.
        shape: of the whole tensor.
        name: for the message.

    Raises:
        CheckpointError: the scales belong to no known format.
    """
    factors = scales.to(torch.float32)
    if factors.numel() == 1:
        return values.float() * factors.reshape(())
    rows, columns = (shape[0], shape[-1]) if len(shape) == 2 else (0, 0)
    blocks = (-(-rows // BLOCK), -(-columns // BLOCK))
    if len(shape) == 2 and tuple(factors.shape) in ((rows,), (rows, 1)):
        first, count = box.start[0], box.shape[0]
        return values.float() * factors.reshape(rows, 1)[first : first + count]
    if len(shape) != 2 or tuple(factors.shape) != blocks:
        raise CheckpointError(
            f"{name} is FP8 of shape {shape} with scales of shape {tuple(scales.shape)}; one for "
            f"the tensor, one per row, or {blocks} for blocks of {BLOCK} x {BLOCK} can be read: "
            "train from a checkpoint in bf16"
        )
    row_blocks, column_blocks = (
        torch.arange(start, start + count) // BLOCK
        for start, count in zip(box.start, box.shape, strict=True)
    )
    return values.float() * factors[row_blocks][:, column_blocks]
