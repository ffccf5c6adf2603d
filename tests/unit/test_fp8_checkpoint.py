"""FP8 checkpoints are loaded with their scales, or refused by name."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from gyre_megatron.errors import CheckpointError
from gyre_megatron.ops.fp8 import FP8_MAX, quantize_blocks
from gyre_megatron.weights.boxes import LocalBox
from gyre_megatron.weights.checkpoint import CheckpointReader

SHAPE = (300, 200)
BOXES = [((0, 0), SHAPE), ((100, 50), (130, 90)), ((127, 0), (2, 200)), ((299, 199), (1, 1))]


def _weight() -> torch.Tensor:
    """As a trained one, with rows of very different size."""
    generator = torch.Generator().manual_seed(3)
    return torch.randn(SHAPE, generator=generator) * 0.02 * torch.logspace(-2, 1, SHAPE[0])[:, None]


def _read(folder: Path, start: tuple[int, int], shape: tuple[int, int]) -> torch.Tensor:
    box = LocalBox("x.weight", start, shape, "mine", 0, (shape[1], 1))
    return next(iter(CheckpointReader(folder).read([box])))[1]


def _check(folder: Path, weight: torch.Tensor, tolerance: float) -> None:
    for start, shape in BOXES:
        rows, columns = (slice(s, s + n) for s, n in zip(start, shape, strict=True))
        found = _read(folder, start, shape)
        error = (found - weight[rows, columns]).abs()
        assert (error <= tolerance * weight[rows, columns].abs() + 1e-3 * weight.std()).all()


def test_blocks_with_scales_in_another_file(tmp_path):
    weight = _weight()
    values, scales = quantize_blocks(weight)
    assert values.float().std() > 50  # what was loaded before
    save_file({"x.weight": values}, tmp_path / "a.safetensors")
    save_file({"x.weight_scale_inv": scales}, tmp_path / "b.safetensors")
    _check(tmp_path, weight, 0.07)


def test_scales_that_are_powers_of_two(tmp_path):
    """UE8M0, as DeepSeek-V3.1 has them."""
    weight = _weight()
    _, scales = quantize_blocks(weight)
    powers = torch.exp2(scales.log2().ceil())
    wide = powers.repeat_interleave(128, 0)[:300].repeat_interleave(128, 1)[:, :200]
    values = (weight / wide).to(torch.float8_e4m3fn)
    stored = {"x.weight": values, "x.weight_scale_inv": powers.to(torch.float8_e8m0fnu)}
    save_file(stored, tmp_path / "a.safetensors")
    _check(tmp_path, weight, 0.07)


@pytest.mark.parametrize("shape", [(), (1,), (300,), (300, 1)])
def test_a_scale_for_the_tensor_or_for_each_row(tmp_path, shape):
    weight = _weight()
    largest = weight.abs().amax() if shape in ((), (1,)) else weight.abs().amax(1, keepdim=True)
    scales = largest / FP8_MAX
    values = (weight / scales).to(torch.float8_e4m3fn)
    stored = {"x.weight": values, "x.weight_scale": scales.reshape(shape).contiguous()}
    save_file(stored, tmp_path / "a.safetensors")
    _check(tmp_path, weight, 0.07)


def test_without_scales_it_is_refused_by_name(tmp_path):
    save_file({"x.weight": _weight().to(torch.float8_e4m3fn)}, tmp_path / "a.safetensors")
    with pytest.raises(CheckpointError, match=r"x.weight is FP8, but .* no x.weight_scale_inv"):
        _read(tmp_path, *BOXES[1])


def test_scales_of_other_blocks_are_refused_by_name(tmp_path):
    values = _weight().to(torch.float8_e4m3fn)
    stored = {"x.weight": values, "x.weight_scale_inv": torch.ones(5, 4)}
    save_file(stored, tmp_path / "a.safetensors")
    with pytest.raises(CheckpointError, match=r"x.weight .* scales of shape \(5, 4\)"):
        _read(tmp_path, *BOXES[1])
