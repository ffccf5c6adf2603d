"""`gyre export` refuses what it cannot do before it imports Megatron or writes anything."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from gyre_megatron import cli
from gyre_megatron.commands.export import ExportPlan, plan_export
from gyre_megatron.config.loader import GyreConfig, load_config
from gyre_megatron.runtime.run_directory import RunDirectory
from gyre_megatron.training.export import copy_description

DEMO = Path(__file__).parents[2] / "configs" / "demo_cpu.yaml"


def make_run(root: Path, steps: list[int], **model: Path) -> Path:
    """A run's directory as a run leaves it, with empty checkpoints."""
    config = load_config(DEMO, [f"run.root={root}"]).config
    base = root / "base"
    base.mkdir(parents=True)
    (base / "config.json").write_text("{}")
    if not model:
        config = config.model_copy(
            update={"model": config.model.model_copy(update={"tiny": None, "checkpoint": base})}
        )
    directory = RunDirectory(root / "demo")
    directory.path.mkdir()
    directory.write_json(directory.config_file, config.model_dump(mode="json"))
    for step in steps:
        directory.make_staging(step)
        directory.commit_checkpoint(step, {}, keep=9)
    return directory.path


def test_the_latest_checkpoint_or_the_one_of_a_step(tmp_path: Path) -> None:
    run = make_run(tmp_path, [4, 8, 12])
    plan = plan_export(run, tmp_path / "out")
    assert (plan.source.step, plan.base, plan.dtype) == (12, tmp_path / "base", "fp32")
    assert plan_export(run, tmp_path / "out", step=4).source.directory.name == "step_000004"


def test_one_process_holds_the_model_whole_and_several_hold_it_as_the_run_did() -> None:
    layout = {"tp": 2, "pp": 2, "vpp": 2, "ep": 2, "etp": 1, "sequence_parallel": True}
    config = GyreConfig.model_validate({"training": layout})
    plan = ExportPlan(config, None, Path(), Path(), "fp32")
    alone = plan.training(1)
    assert (alone.min_ranks, alone.vpp, alone.ep, alone.expert_tp) == (1, None, 1, 1)
    assert not alone.uses_sequence_parallel
    assert plan.training(4) == config.training


def spoil_config(run: Path) -> None:
    (run / "config.json").write_text(json.dumps({"training": {"tq": 2}}))


def damage_config(run: Path) -> None:
    (run / "config.json").write_text('{"run": ')


def remove_base(run: Path) -> None:
    (run.parent / "base" / "config.json").unlink()


def remove_latest(run: Path) -> None:
    (run / "checkpoints" / "step_000008" / "state.json").unlink()


def make_output(run: Path) -> None:
    (run.parent / "out").symlink_to(run.parent / "nowhere")


@pytest.mark.parametrize(
    ("spoil", "words", "message", "code"),
    [
        (spoil_config, [], "was not written by this version of Gyre: training.tq", 1),
        (damage_config, [], "config.json is damaged", 1),
        (remove_base, [], "is no Hugging Face checkpoint any more", 1),
        (remove_latest, [], "missing or incomplete", 1),
        (make_output, [], "exists; remove it", 1),
        (None, ["--step", "7"], "no checkpoint of step 7; those it keeps are [4, 8]", 1),
        (None, ["--step", "-1"], "--step", 2),
        (None, ["--step", "x"], "a number of optimizer steps was expected", 2),
    ],
)
def test_what_cannot_be_exported_is_refused_by_name(
    tmp_path: Path, capsys, spoil, words, message, code
) -> None:
    run = make_run(tmp_path, [4, 8])
    if spoil is not None:
        spoil(run)
    before = sorted(tmp_path.rglob("*"))
    try:
        ended = cli.main(["export", str(run), str(tmp_path / "out"), *words])
    except SystemExit as exit_:
        ended = exit_.code
    assert ended == code
    assert message in capsys.readouterr().err
    assert sorted(tmp_path.rglob("*")) == before


def test_a_directory_without_a_run_and_a_run_without_a_checkpoint(tmp_path: Path, capsys) -> None:
    assert cli.main(["export", str(tmp_path), str(tmp_path / "out")]) == 1
    assert "is no run directory: it has no config.json" in capsys.readouterr().err
    run = make_run(tmp_path / "runs", [])
    assert cli.main(["export", str(run), str(tmp_path / "out")]) == 1
    assert "has no checkpoint yet" in capsys.readouterr().err
    assert cli.main(["export", str(run), str(tmp_path / "out"), "--step", "3"]) == 1
    assert "it has none yet" in capsys.readouterr().err


def test_the_tiny_base_is_found_beside_the_run(tmp_path: Path) -> None:
    run = make_run(tmp_path, [4], tiny=tmp_path)
    config = load_config(DEMO).config
    base = config.model.tiny.directory(tmp_path)
    base.mkdir(parents=True)
    (base / "config.json").write_text("{}")
    assert plan_export(run, tmp_path / "out").base == base


@pytest.mark.parametrize("key", ["dtype", "torch_dtype"])
def test_all_but_the_base_models_weights_is_copied(tmp_path: Path, key: str) -> None:
    base = tmp_path / "base"
    base.mkdir()
    (base / "config.json").write_text(json.dumps({"model_type": "qwen3", key: "float16"}))
    kept = ["tokenizer.json", "chat_template.jinja", "generation_config.json", "merges.txt"]
    weights = ["model.safetensors", "model.safetensors.index.json", "pytorch_model.bin", "q4.gguf"]
    for name in kept + weights:
        (base / name).write_text(name)
    (base / "onnx").mkdir()
    (tmp_path / "copy").mkdir()
    copy_description(base, tmp_path / "copy", "bf16")
    assert sorted(p.name for p in (tmp_path / "copy").iterdir()) == sorted(["config.json", *kept])
    config = json.loads((tmp_path / "copy" / "config.json").read_text())
    assert config == {"model_type": "qwen3", key: "bfloat16"}
