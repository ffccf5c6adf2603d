"""Configuration: shipped files parse, files compose, and every mistake is named with the mend."""

from __future__ import annotations

from pathlib import Path

import pytest

from gyre_megatron.config.__main__ import main
from gyre_megatron.config.loader import GyreConfig, load_config
from gyre_megatron.config.model import Architecture
from gyre_megatron.errors import ConfigError
from gyre_megatron.runtime.checks import check_architecture, check_layout
from gyre_megatron.weights.process_groups import CellTopology

ROOT = Path(__file__).parents[2]


def write(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


@pytest.fixture
def base(tmp_path: Path) -> Path:
    return write(
        tmp_path / "base.yaml", "model: {tiny: {seed: 3}}\nrun: {num_steps: 7, name: base}\n"
    )


@pytest.mark.parametrize(
    "file", sorted((ROOT / "configs").glob("*.yaml")), ids=lambda file: file.name
)
def test_every_shipped_run_file_parses(file: Path):
    assert isinstance(load_config(file).config, GyreConfig)


@pytest.mark.parametrize(
    "file", sorted((ROOT / "configs" / "models").glob("*.yaml")), ids=lambda file: file.stem
)
def test_every_model_overlay_composes_into_a_run(tmp_path: Path, file: Path):
    run = write(
        tmp_path / "run.yaml", f"base: [{file}]\nmodel: {{checkpoint: /models/{file.stem}}}\n"
    )
    architecture = load_config(run).config.model.architecture
    assert architecture is not None and architecture.num_layers > 1


def test_a_checkpoint_of_another_shape_is_refused(tmp_path: Path):
    overlay = ROOT / "configs/models/qwen3_8b.yaml"
    run = write(tmp_path / "run.yaml", f"base: [{overlay}]\nmodel: {{checkpoint: /models/x}}\n")
    config = load_config(run).config
    check_architecture(config, config.model.architecture)
    other = config.model.architecture.model_copy(update={"num_layers": 2})
    with pytest.raises(ConfigError, match="differ in num_layers 36 vs 2"):
        check_architecture(config, other)


def test_files_compose_and_later_wins(tmp_path: Path, base: Path):
    other = write(tmp_path / "other.yaml", "run: {num_steps: 8}\nscheduler: {cell_capacity: 2}\n")
    top = write(
        tmp_path / "top.yaml", "base: [base.yaml, other.yaml]\nscheduler: {groups_per_step: 3}\n"
    )
    loaded = load_config(top, ["run.seed=5", "training.optimizer.lr=1e-4"])
    config = loaded.config
    assert (config.run.num_steps, config.run.name, config.run.seed) == (8, "base", 5)
    assert (config.scheduler.cell_capacity, config.scheduler.groups_per_step) == (2, 3)
    assert config.training.optimizer.lr == 1e-4
    assert loaded.origins["run.num_steps"] == str(other)
    assert loaded.origins["run.name"] == str(base)
    assert loaded.origins["run.seed"] == "--set run.seed"


def test_a_config_cannot_be_changed_after_loading(base: Path):
    config = load_config(base).config
    with pytest.raises(ValueError, match="frozen"):
        config.run.num_steps = 1


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("run: {num_step: 3}", r"unknown key run\.num_step; did you mean run\.num_steps\?"),
        ("schedular: {}", "did you mean scheduler"),
        ("training: {gspo: {eps_lo: 1}}", r"did you mean training\.gspo\.eps_low\?"),
        ("run: {num_steps: 0}", "run.num_steps: .*greater than or equal to 1"),
        ("run: {num_steps: many}", "run.num_steps: .*valid integer"),
        ("run: {name: a/b}", "run.name"),
        ("model: {checkpoint: /x, tiny: {}}", "exactly one of model.checkpoint"),
        (
            "scheduler: {policy: async}\ncluster: {num_cells: 1}",
            "async needs cluster.num_cells >= 2",
        ),
        ("base: [missing.yaml]", "no configuration file .*missing.yaml"),
        ("base: [bad.yaml]", "names itself"),
        ("- a\n- b", "holds a list"),
        ("run: [", "cannot be read as YAML"),
    ],
)
def test_mistakes_are_named(tmp_path: Path, text: str, message: str):
    file = tmp_path / "bad.yaml"
    file.write_text(
        text if "model" in text or text[0] in "-" else f"model: {{tiny: {{}}}}\n{text}\n"
    )
    with pytest.raises(ConfigError, match=message):
        load_config(file)


def test_an_override_must_name_a_key(base: Path):
    with pytest.raises(ConfigError, match="not of the form"):
        load_config(base, ["num_steps"])


def test_show_prints_each_value_with_its_origin(base: Path, capsys):
    assert main(["show", str(base), "--set", "run.seed=9"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert any(line.startswith("run.num_steps: 7") and line.endswith(f"# {base}") for line in lines)
    assert any(
        line.startswith("run.seed: 9") and line.endswith("# --set run.seed") for line in lines
    )
    assert any(
        line.startswith("run.checkpoint_interval: 10") and line.endswith("# default")
        for line in lines
    )


def test_show_fails_on_a_wrong_file(tmp_path: Path, capsys):
    assert main(["show", str(write(tmp_path / "x.yaml", "nonsense: 1"))]) == 2
    assert "unknown key nonsense" in capsys.readouterr().err


TINY = Architecture(
    family="qwen3_moe",
    vocab_size=512,
    hidden_size=64,
    num_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    intermediate_size=128,
    moe={"num_experts": 4, "experts_per_token": 2, "intermediate_size": 64},
    max_position_embeddings=4096,
)


@pytest.mark.parametrize(
    ("overrides", "ranks", "message"),
    [
        (
            ["training.tp=3"],
            6,
            r"training.tp=3 does not divide the model's 4 attention heads; choose one of \[1, 2, "
            r"4\]",
        ),
        (["training.tp=4"], 8, "exceeds the model's 2 key-value heads"),
        (["training.tp=2"], 2, "start 4 ranks"),
        (["training.pp=4"], 8, "does not divide the model's 2 layers"),
        (["training.ep=3"], 6, "does not divide the model's 4 experts"),
        (["engine.tp=3"], 6, "engine.tp=3 does not divide"),
        (["engine.context_length=9999"], 2, "exceeds the model's max_position_embeddings"),
    ],
)
def test_layouts_that_cannot_work_are_refused_before_anything_starts(overrides, ranks, message):
    config = load_config(ROOT / "configs/demo_cpu.yaml", overrides).config
    with pytest.raises(ConfigError, match=message):
        check_layout(config, TINY, CellTopology(ranks, 2))


def test_cells_must_divide_the_ranks():
    with pytest.raises(ValueError, match="3 ranks cannot be divided into 2 equal cells"):
        CellTopology(3, 2)


def test_a_missing_checkpoint_is_named(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"no checkpoint at .*config\.json does not exist"):
        Architecture.from_checkpoint(tmp_path / "nowhere")
