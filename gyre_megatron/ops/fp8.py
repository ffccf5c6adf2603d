"""Block-scaled FP8 weights, as DeepSeek-V3 checkpoints and SGLang's block-wise kernels hold them.

Source: DeepSeek-V3 technical report (arXiv 2412.19437), section 3.3: e4m3 values, one fp32 scale
per 128 x 128 block; `weight_scale_inv` is what a stored value is multiplied with.
"""

from __future__ import annotations

import torch

BLOCK = 128
FP8_MAX = 448.0
"""Largest finite e4m3 value."""


def quantize_blocks(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise the last two dimensions in blocks of 128 x 128; edge blocks may be smaller.

    Args:
        weight: [..., N, K], any floating dtype.

    Returns:
        float8_e4m3fn [..., N, K] and float32 scales [..., ceil(N / 128), ceil(K / 128)]; `value *
        scale` restores.
    """
    *lead, rows, columns = weight.shape
    down = -(-rows // BLOCK)
    across = -(-columns // BLOCK)
    padded = weight.new_zeros(*lead, down * BLOCK, across * BLOCK, dtype=torch.float32)
    padded[..., :rows, :columns] = weight
    blocks = padded.view(*lead, down, BLOCK, across, BLOCK)
    scales = blocks.abs().amax(dim=(-3, -1)).clamp(min=1e-12) / FP8_MAX
    values = (blocks / scales[..., :, None, :, None]).clamp(-FP8_MAX, FP8_MAX)
    whole = values.view(*lead, down * BLOCK, across * BLOCK)[..., :rows, :columns]
    return whole.to(torch.float8_e4m3fn).contiguous(), scales


def dequantize_blocks(values: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """float32 weight of `quantize_blocks`' two results."""
    rows, columns = values.shape[-2:]
    wide = scales.repeat_interleave(BLOCK, -2)[..., :rows, :].repeat_interleave(BLOCK, -1)[
        ..., :columns
    ]
    return values.float() * wide
