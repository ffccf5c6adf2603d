"""`gyre export`: what a run holds in any layout comes out as one Hugging Face checkpoint, bit for
bit, from the run's own ranks and from one process alike."""

from __future__ import annotations

import functools
import json
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file

from gyre_megatron.commands.export import ExportPlan, plan_export, write
from gyre_megatron.config.loader import GyreConfig
from gyre_megatron.config.training import TrainingConfig
from gyre_megatron.runtime.run_directory import RunDirectory
from gyre_megatron.weights.checkpoint import CheckpointReader, FLOAT32_SUFFIXES
from tests.dist.gradients import make_trainer
from tests.dist.test_against_hf import hf_model
from tests.dist.tiny import CONFIGS, VOCAB, make_checkpoint

STEP = 3
FACTOR = 1.25  # what training has made of every weight; exact in binary


def train_and_save(run: Path, base: Path, training: TrainingConfig) -> None:
    """Leave a run's directory as the core cell leaves it, optimizer included."""
    trainer = make_trainer(base, training, with_optimizer=True)
    directory = RunDirectory(run)
    if dist.get_rank() == 0:
        directory.make_staging(STEP)
    dist.barrier()
    with torch.no_grad():
        for _, parameter in trainer.named_parameters():
            parameter.mul_(FACTOR)
    trainer.save_checkpoint(directory.staging_of(STEP))
    dist.barrier()
    if dist.get_rank() == 0:
        config = GyreConfig.model_validate({"model": {"checkpoint": base}, "training": training})
        directory.write_json(directory.config_file, config.model_dump(mode="json"))
        directory.commit_checkpoint(STEP, {}, keep=1)


def export(plan: ExportPlan) -> None:
    """In a fresh layout of the pool's ranks."""
    from megatron.core import parallel_state as mpu

    mpu.destroy_model_parallel()
    write(plan)


@pytest.fixture(scope="session")
def bases(tmp_path_factory):
    root = tmp_path_factory.mktemp("export")
    return functools.cache(lambda kind: make_checkpoint(kind, root / kind))


def trained(base: Path) -> dict[str, torch.Tensor]:
    return {n: w * FACTOR for n, w in load_file(base / "model.safetensors").items()}


def exported(path: Path) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    for file in path.glob("*.safetensors"):
        found |= load_file(file)
    assert CheckpointReader(path).names == found.keys()  # the index names them all
    return found


def assert_same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, values in expected.items():
        assert found[name].dtype == values.dtype and torch.equal(found[name], values), name


LAYOUTS = [
    ("dense", 2, dict(tp=2)),
    ("dense", 4, dict(tp=2, pp=2)),
    ("dense", 2, dict(pp=2, vpp=2)),
    ("dense", 2, dict(cp=2)),
    ("tied", 2, dict(pp=2)),
    ("moe", 1, {}),
    ("moe", 2, dict(tp=2)),
    ("moe", 2, dict(ep=2)),
    ("moe", 4, dict(tp=2, pp=2, ep=2, etp=1)),
    ("hybrid", 2, dict(tp=2)),
    ("hybrid", 4, dict(pp=2, ep=2)),
]


@pytest.mark.parametrize(
    ("kind", "size", "layout"),
    LAYOUTS,
    ids=["-".join([kind, *(f"{k}{v}" for k, v in layout.items())]) for kind, _, layout in LAYOUTS],
)
def test_every_bit_of_a_run_is_in_the_checkpoint(
    kind: str, size: int, layout: dict, ranks, bases, tmp_path: Path
) -> None:
    base = bases(kind)
    run = tmp_path / "run"
    ranks(size).run(train_and_save, run, base, TrainingConfig(**layout))
    ranks(size).run(export, plan_export(run, tmp_path / "by_its_ranks"))
    ranks(1).run(export, plan_export(run, tmp_path / "by_one_process"))
    for name in ("by_its_ranks", "by_one_process"):
        assert_same(exported(tmp_path / name), trained(base))
        assert json.loads((tmp_path / name / "config.json").read_text())["dtype"] == "float32"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["by_its_ranks", "by_one_process", "run"]


@pytest.mark.parametrize("kind", ["dense", "tied", "moe", "hybrid"])
def test_transformers_reads_it_and_answers_as_the_weights_do(
    kind: str, ranks, bases, tmp_path: Path
) -> None:
    import transformers

    base = bases(kind)
    run, output = tmp_path / "run", tmp_path / "exported"
    ranks(1).run(train_and_save, run, base, TrainingConfig())
    ranks(1).run(export, plan_export(run, output))
    model = transformers.AutoModelForCausalLM.from_pretrained(
        output, experts_implementation="eager"
    )
    assert model.dtype == torch.float32  # read off the exported config.json
    tokens = torch.arange(40)[None] % VOCAB
    with torch.no_grad():
        logits = model.double()(tokens).logits
        assert torch.equal(logits, hf_model(kind, trained(base))(tokens).logits)
        assert not torch.equal(logits, hf_model(kind, load_file(base / "model.safetensors"))(tokens).logits)


def test_another_type_is_rounded_once_and_named_in_the_config(ranks, bases, tmp_path: Path) -> None:
    base = bases("hybrid")
    run, output = tmp_path / "run", tmp_path / "exported"
    ranks(1).run(train_and_save, run, base, TrainingConfig())
    ranks(1).run(export, plan_export(run, output, dtype="bf16"))
    expected = {
        name: w if name.endswith(FLOAT32_SUFFIXES) else w.bfloat16()
        for name, w in trained(base).items()
    }
    assert_same(exported(output), expected)
    assert json.loads((output / "config.json").read_text())["dtype"] == "bfloat16"


@pytest.mark.parametrize("other", ["moe", "wide"])
def test_another_models_base_is_refused_and_nothing_is_left(
    other: str, ranks, bases, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    ranks(2).run(train_and_save, run, bases("dense"), TrainingConfig(pp=2))
    base = bases("moe")
    if other == "wide":
        base = tmp_path / "wide"
        base.mkdir()
        (base / "config.json").write_text(json.dumps(CONFIGS["dense"] | {"intermediate_size": 128}))
    plan = plan_export(run, tmp_path / "exported", base=base)
    with pytest.raises(RuntimeError, match="step_000003 cannot be read into this model: .*linear"):
        ranks(1).run(export, plan)
    assert not list(tmp_path.glob("exported*"))


def test_ranks_that_do_not_fit_the_runs_layout_are_refused(ranks, bases, tmp_path: Path) -> None:
    run = tmp_path / "run"
    ranks(4).run(train_and_save, run, bases("dense"), TrainingConfig(tp=2, pp=2))
    with pytest.raises(RuntimeError, match="a cell has 2 ranks, training.tp.pp.cp = 2.2.1 = 4"):
        ranks(2).run(export, plan_export(run, tmp_path / "exported"))
