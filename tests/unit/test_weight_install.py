"""The loader's commands on a small module: FP8 on the way in, storage kept, damage and gaps refused
by name."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from gyre_megatron.config.model import Architecture
from gyre_megatron.engines import loader as weight_loader
from gyre_megatron.engines.probe import probe
from gyre_megatron.errors import LayoutError
from gyre_megatron.ops.fp8 import BLOCK, dequantize_blocks, quantize_blocks
from gyre_megatron.weights.shadow import STATUS_FILE, checksums

ARCHITECTURE = Architecture(
    family="qwen3",
    vocab_size=256,
    hidden_size=64,
    num_layers=0,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    intermediate_size=64,
)


class Engine(torch.nn.Module):
    """Stands for an engine's model class: fuses, shards and quantises in its own load_weights."""

    def __init__(self, fp8: bool = False, negate: bool = False) -> None:
        super().__init__()
        dtype = torch.float8_e4m3fn if fp8 else torch.bfloat16
        self.embed = torch.nn.Parameter(
            torch.zeros(128, 64, dtype=torch.bfloat16), requires_grad=False
        )
        self.norm = torch.nn.Parameter(torch.zeros(64, dtype=torch.bfloat16), requires_grad=False)
        self.head = torch.nn.Module()
        self.head.weight = torch.nn.Parameter(
            torch.zeros(256, 64, dtype=dtype), requires_grad=False
        )
        if fp8:
            self.head.weight_scale_inv = torch.nn.Parameter(torch.zeros(2, 1), requires_grad=False)
        self._negate = negate

    def load_weights(self, weights) -> None:
        for name, tensor in weights:
            if name == "model.embed_tokens.weight":
                self.embed.data.copy_(tensor.narrow(0, 128, 128))
            elif name == "model.norm.weight":
                self.norm.data.copy_(-tensor if self._negate else tensor)
            else:
                self.head.weight.data.copy_(tensor)


@pytest.fixture(autouse=True)
def one_rank(monkeypatch):
    monkeypatch.setattr(weight_loader, "_tp_rank", lambda: 0)
    monkeypatch.setattr(
        weight_loader, "_refresh_derived", lambda model: None
    )  # needs SGLang; tested end to end


def _run(model: Engine, folder: Path, op: str, **arguments) -> dict:
    command = {"op": op, "directory": str(folder), "serial": 1, **arguments}
    weight_loader.load(model, [(json.dumps(command), torch.empty(0))])
    return json.loads((folder / STATUS_FILE.format(rank=0)).read_text())


def _attach(model: Engine, folder: Path) -> dict:
    return _run(model, folder, "attach", architecture=ARCHITECTURE.model_dump(mode="json"))


def test_fp8_is_quantised_in_whole_blocks_on_the_way_in(tmp_path):
    model = Engine(fp8=True)
    addresses = [p.data_ptr() for p in model.parameters()]
    answer = _attach(model, tmp_path)
    assert answer["ok"], answer
    assert {t["key"]: t["dtype"] for t in answer["tensors"]}["head.weight"] == "bfloat16"
    shadow = weight_loader._attached[str(tmp_path)]
    for tensor in shadow.tensors.values():
        tensor.copy_(torch.randn(tensor.shape))
    sums = checksums(shadow.tensors)
    assert _run(model, tmp_path, "verify", checksums=[sums])["ok"]
    assert _run(model, tmp_path, "commit")["ok"]
    assert [p.data_ptr() for p in model.parameters()] == addresses
    assert torch.equal(model.embed.data, shadow.tensors["embed"])
    restored = dequantize_blocks(model.head.weight.data, model.head.weight_scale_inv.data)
    assert (
        restored - shadow.tensors["head.weight"].float()
    ).abs().max() < 0.07 * restored.abs().max()


def test_damage_is_refused_and_nothing_is_touched(tmp_path):
    model = Engine()
    assert _attach(model, tmp_path)["ok"]
    shadow = weight_loader._attached[str(tmp_path)]
    sums = checksums(shadow.tensors)
    shadow.tensors["norm"][3] = 1.0
    answer = _run(model, tmp_path, "verify", checksums=[sums])
    assert (
        not answer["ok"]
        and "1 tensors arrived damaged" in answer["error"]
        and "norm" in answer["error"]
    )
    assert not any(p.any() for p in model.parameters())


def test_a_transformed_weight_is_refused_by_name():
    model = Engine(negate=True)
    with pytest.raises(LayoutError, match="norm is filled by the engine from a transformed tensor"):
        probe(model, ARCHITECTURE, weight_loader._parameters(model))


def test_an_unfilled_parameter_is_refused_by_name():
    model = Engine()
    model.extra = torch.nn.Parameter(torch.zeros(3))
    with pytest.raises(LayoutError, match=r"extra \(0 of 3\)"):
        probe(model, ARCHITECTURE, weight_loader._parameters(model))


def test_the_probe_writes_nothing():
    model = Engine()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(5)
    pieces = probe(model, ARCHITECTURE, weight_loader._parameters(model))
    assert all((p == 5).all() for p in model.parameters())
    assert ("model.embed_tokens.weight", (128, 0), (128, 64), "embed", 0, (64, 1)) in pieces


@pytest.mark.parametrize("shape", [(256, 128), (200, 130), (3, 129, 64)])
def test_block_scales(shape):
    weight = torch.randn(shape) * torch.logspace(-3, 2, shape[-1])
    values, scales = quantize_blocks(weight)
    assert scales.shape[-2:] == (-(-shape[-2] // BLOCK), -(-shape[-1] // BLOCK))
    error = (dequantize_blocks(values, scales) - weight).abs()
    wide = scales.repeat_interleave(BLOCK, -2)[..., : shape[-2], :].repeat_interleave(BLOCK, -1)[
        ..., : shape[-1]
    ]
    assert (error <= torch.maximum(weight.abs() / 16 * 1.01, wide * 2**-9)).all()


def test_what_a_killed_publisher_left_is_swept_and_a_live_one_is_kept(tmp_path):
    import os

    from gyre_megatron.weights.engine import sweep

    for owner in (os.getpid(), 2**22 + 1):  # larger than any process id
        (tmp_path / f"gyre-weights-{owner}-x").mkdir()
    sweep(tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == [f"gyre-weights-{os.getpid()}-x"]
