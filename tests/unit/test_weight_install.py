"""The loader's commands on a small module: FP8 on the way in, storage kept, damage and gaps refused
by name."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from gyre_megatron.config.model import Architecture
from gyre_megatron.engines import loader as weight_loader
from gyre_megatron.engines.probe import probe
from gyre_megatron.errors import LayoutError
from gyre_megatron.ops.fp8 import BLOCK, dequantize_blocks, quantize_blocks
from gyre_megatron.weights.boxes import LocalBox
from gyre_megatron.weights.messages import (
    PERMIT_FILE,
    STATUS_FILE,
    Command,
    Status,
    decode_status,
    encode,
)
from gyre_megatron.weights.shadow import checksums
from gyre_megatron.weights.shared_memory import OwnedDirectory, sweep

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


class Draft(Engine):
    """A second model in the same process."""


@pytest.fixture(autouse=True)
def one_rank(monkeypatch):
    monkeypatch.setattr(weight_loader, "_tp_rank", lambda: 0)
    monkeypatch.setattr(weight_loader, "_num_stages", lambda: 1)
    monkeypatch.setattr(
        weight_loader, "_refresh_derived", lambda model: None
    )  # needs SGLang; tested end to end


@pytest.fixture
def folder(tmp_path):
    """The directory of a publisher that is alive."""
    owned = OwnedDirectory(tmp_path, "publisher-")
    yield owned.path
    owned.close()


def _run(model: Engine, folder: Path, op: str, **arguments) -> Status:
    command = Command(op, str(folder), 1, **arguments)
    weight_loader.load(model, [(encode(command).decode(), torch.empty(0))])
    return decode_status((folder / STATUS_FILE.format(rank=0)).read_bytes())


def _attach(model: Engine, folder: Path) -> Status:
    return _run(model, folder, "attach", architecture=ARCHITECTURE.model_dump(mode="json"))


def _commit(model: Engine, folder: Path) -> Status:
    (folder / PERMIT_FILE).touch()
    return _run(model, folder, "commit")


def test_fp8_is_quantised_in_whole_blocks_on_the_way_in(folder):
    model = Engine(fp8=True)
    addresses = [p.data_ptr() for p in model.parameters()]
    answer = _attach(model, folder)
    assert answer.ok, answer
    assert {spec.key: spec.dtype for spec in answer.tensors}["head.weight"] == "bfloat16"
    shadow = weight_loader._attached[str(folder)].shadow
    for tensor in shadow.tensors.values():
        tensor.copy_(torch.randn(tensor.shape))
    sums = checksums(shadow.tensors)
    assert _run(model, folder, "verify", checksums=[sums]).ok
    assert _commit(model, folder).ok
    assert [p.data_ptr() for p in model.parameters()] == addresses
    assert torch.equal(model.embed.data, shadow.tensors["embed"])
    restored = dequantize_blocks(model.head.weight.data, model.head.weight_scale_inv.data)
    assert (
        restored - shadow.tensors["head.weight"].float()
    ).abs().max() < 0.07 * restored.abs().max()


def test_damage_is_refused_and_nothing_is_touched(folder):
    """Also of a tensor that was sent as zeros."""
    model = Engine()
    assert _attach(model, folder).ok
    shadow = weight_loader._attached[str(folder)].shadow
    sums = checksums(shadow.tensors)
    assert sums["norm"] == 0
    shadow.tensors["norm"][3] = 1.0
    answer = _run(model, folder, "verify", checksums=[sums])
    assert not answer.ok
    assert "1 tensors arrived damaged" in answer.error and "norm" in answer.error
    assert not any(p.any() for p in model.parameters())


def test_a_tensor_without_a_checksum_is_refused(folder):
    model = Engine()
    assert _attach(model, folder).ok
    sums = checksums(weight_loader._attached[str(folder)].shadow.tensors)
    del sums["embed"]
    answer = _run(model, folder, "verify", checksums=[sums])
    assert not answer.ok and "without a checksum, first ['embed']" in answer.error


def test_nothing_escapes_into_the_engine(tmp_path, folder, caplog):
    """SGLang's scheduler dies of an exception; whatever the command is, it must not get one."""
    model = Engine()
    gone = OwnedDirectory(tmp_path, "publisher-")
    assert _attach(model, gone.path).ok
    gone.close()
    for op in ("attach", "verify", "commit", "seal"):  # they were queued when the publisher gave up
        weight_loader.load(model, [(encode(Command(op, str(gone.path), 2)).decode(), None)])
        assert f"weight command {op} is stale" in caplog.text
    weight_loader.load(model, [("not JSON", torch.empty(0))])
    assert "was not answered" in caplog.text
    answer = _run(model, folder, "dance")
    assert not answer.ok and "unknown command 'dance'" in answer.error
    (folder / STATUS_FILE.format(rank=0)).unlink()
    (folder / STATUS_FILE.format(rank=0)).mkdir()  # as a full file system: it cannot be written
    weight_loader.load(model, [(encode(Command("seal", str(folder), 3)).decode(), None)])
    assert not any(p.any() for p in model.parameters())


def test_a_model_whose_loading_fails_in_its_own_way_is_an_answer(folder, monkeypatch):
    def broken(self, weights) -> None:
        raise AssertionError("a bare assert of the engine's own")

    monkeypatch.setattr(Engine, "load_weights", broken)
    answer = _attach(Engine(), folder)
    assert not answer.ok and "AssertionError: a bare assert" in answer.error


def test_a_killed_publishers_commands_are_stale(tmp_path, folder):
    model = Engine()
    assert _attach(model, folder).ok
    killed = tmp_path / "killed"
    killed.mkdir()
    (killed / "owner").touch()  # the file is there, and nobody holds it any more
    (killed / PERMIT_FILE).touch()
    weight_loader.load(model, [(encode(Command("commit", str(killed), 2)).decode(), None)])
    assert (killed / PERMIT_FILE).exists()


def test_a_permit_that_was_taken_back_leaves_all_as_it_was(folder):
    model = Engine()
    assert _attach(model, folder).ok
    weight_loader._attached[str(folder)].shadow.tensors["norm"].fill_(3.0)
    answer = _run(model, folder, "commit")
    assert not answer.ok and not answer.changed and "took its permit back" in answer.error
    assert not any(p.any() for p in model.parameters())
    assert _commit(model, folder).ok and (model.norm == 3.0).all()
    assert not (folder / PERMIT_FILE).exists()  # and it cannot be taken back any more


def test_a_commit_that_breaks_says_that_weights_may_have_changed(folder, monkeypatch):
    model = Engine()
    assert _attach(model, folder).ok
    monkeypatch.setattr(weight_loader, "_refresh_derived", lambda model: 1 / 0)
    answer = _commit(model, folder)
    assert not answer.ok and answer.changed and "ZeroDivisionError" in answer.error


def test_a_draft_model_is_refused_by_name(folder):
    """SGLang runs every command for the target and then for the draft, in one process."""
    target, draft = Engine(), Draft()
    assert _attach(target, folder).ok
    answer = _attach(draft, folder)
    assert not answer.ok and "serves two models, Engine and Draft" in answer.error
    assert not _run(target, folder, "verify", checksums=None).ok  # and neither is attached


def test_pipeline_stages_are_refused_by_name(folder, monkeypatch):
    monkeypatch.setattr(weight_loader, "_num_stages", lambda: 2)
    answer = _attach(Engine(), folder)
    assert not answer.ok and "2 pipeline stages" in answer.error


def test_other_fp8_blocks_are_refused_before_anything_changes(folder):
    model = Engine(fp8=True)
    model.head.weight_scale_inv = torch.nn.Parameter(torch.zeros(4, 1), requires_grad=False)
    answer = _attach(model, folder)
    assert not answer.ok and "head.weight_scale_inv is torch.float32 (4, 1)" in answer.error
    assert "blocks of 128 x 128" in answer.error


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
    local_boxes = probe(model, ARCHITECTURE, weight_loader._parameters(model))
    assert all((p == 5).all() for p in model.parameters())
    assert (
        LocalBox("model.embed_tokens.weight", (128, 0), (128, 64), "embed", 0, (64, 1))
        in local_boxes
    )


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
    """Whoever sweeps may not see the owner among its processes (another pid namespace)."""
    mine = OwnedDirectory(tmp_path, "gyre-weights-")
    killed = subprocess.Popen(
        [sys.executable, "-c", OWNER, str(tmp_path)], stdout=subprocess.PIPE, text=True
    )
    left = Path(killed.stdout.readline().strip())
    sweep(tmp_path, "gyre-weights-")
    assert left.is_dir()
    killed.kill()
    killed.wait()
    sweep(tmp_path, "gyre-weights-")
    assert list(tmp_path.iterdir()) == [mine.path]
    mine.close()
    assert not mine.path.exists()


OWNER = """
import sys, time, pathlib
from gyre_megatron.weights.shared_memory import OwnedDirectory
owned = OwnedDirectory(pathlib.Path(sys.argv[1]), "gyre-weights-")
print(owned.path, flush=True)
time.sleep(60)
"""
