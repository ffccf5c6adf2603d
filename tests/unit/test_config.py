"""Configuration: shipped files parse, files compose, and every mistake is named with the mend."""

from __future__ import annotations

from pathlib import Path

import pytest

from gyre_megatron.config.__main__ import main
from gyre_megatron.config.base import Section
from gyre_megatron.config.loader import GyreConfig, load_config, section_type
from gyre_megatron.config.model import Architecture
from gyre_megatron.errors import ConfigError
from gyre_megatron.extensions import load_reference
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


MISTAKES = [
    ("run: {num_step: 3}", r"unknown key run\.num_step; did you mean run\.num_steps\?"),
    ("schedular: {}", "did you mean scheduler"),
    ("training: {gspo: {eps_lo: 1}}", r"did you mean training\.gspo\.eps_low\?"),
    ("run.num_steps: 3", r"unknown key run\.num_steps; write one level a line: run: {num_steps"),
    ("run: {num_steps: 0}", "run.num_steps: .*greater than or equal to 1.*got 0"),
    ("run: {num_steps: many}", "run.num_steps: .*valid integer"),
    ("run: {num_steps: yes}", "run.num_steps: a number was expected, found true"),
    ("run: {num_steps: .inf}", "run.num_steps: .*finite number"),
    ("run: {num_steps: .nan}", "run.num_steps: .*finite number"),
    ("engine: {mem_fraction_static: .nan}", "engine.mem_fraction_static: .*finite number"),
    ("training: {gspo: {max_log_ratio: .inf}}", "training.gspo.max_log_ratio: .*finite number"),
    ("model: {tiny: {initializer_range: .nan}}", "model.tiny.initializer_range: .*finite number"),
    ("run: {name: a/b}", "run.name"),
    ("run: {name: 5}", "run.name: .*valid string .put it in quotes. .got 5"),
    ("run: {name: 2024-01-01}", "run.name: .*put it in quotes"),
    ("run: {name: 2024-13-45}", "cannot be read as YAML: month must be in 1..12"),
    ("run: {num_steps: {a: 1}}", "run.num_steps takes one value.*found run.num_steps.a"),
    ("run: 5", "run is a section, found 5"),
    ("run:", "run is a section, found nothing"),
    ("run: [num_steps]", "run is a section, found"),
    ("model: {tiny: 3}", "model.tiny is a section, found 3"),
    ("model: {checkpoint: /x, tiny: {}}", "exactly one of model.checkpoint"),
    ("model: {}", "names no weights: set exactly one of model.checkpoint"),
    ("scheduler: {policy: async}\ncluster: {num_cells: 1}", "async needs cluster.num_cells >= 2"),
    ("training: {vpp: 2}", "^training: vpp=2 needs pp > 1"),
    (
        "base: [missing.yaml]",
        r"no configuration file .*missing.yaml \(named by base: of .*bad.yaml",
    ),
    ("base: [bad.yaml]", "names itself"),
    ("base: 5", "base is 5; the name of a file or a list of names was expected"),
    ("base:", "base is None; the name of a file"),
    ("base: [5]", r"base is \[5\]"),
    ("base: {a: b}", "base is {"),
    ("base: ''", "base is ''"),
    ("base: [.]", "is a directory"),
    ("base: ~nosuchuser/x", "there is no user ~nosuchuser"),
    ("- a\n- b", "holds a list"),
    ("just text", "holds a str"),
    ("run: [", r"cannot be read as YAML: .*line \d"),
    ("run: {name: a}\nrun: {seed: 1}", r"key 'run' stands twice, first in line 2 \(line 3"),
    ("run: {seed: 1, seed: 1}", "key 'seed' stands twice"),
    ("rollout:\n  harness:\n    environment: {A: 1, B: 2, A: 3}", "key 'A' stands twice"),
    ("run: &r {seed: 1}\nx: {<<: *r, <<: *r}", "key '<<' stands twice"),
    ("run: &r {seed: *r}", "an anchor is used inside its own value"),
    ("run: &r [*r]", "an anchor is used inside its own value"),
    ("run: *nowhere", "undefined alias"),
    ("? [a]\n: b", "a list or mapping cannot be a key"),
    ("run: !!python/object:os.system {}", "could not determine a constructor"),
    ("run: " + "[" * 1000, "nested too deeply"),
    ("a: 1\n---\nb: 2", "expected a single document"),
    ("run: {root: ''}", "run.root: a path was expected"),
    ("run: {root: ~nosuchuser/runs}", "run.root: there is no user ~nosuchuser"),
    ("engine: {extra_args: [1]}", "engine.extra_args.*got 1"),
    ("rollout: {harness: {environment: {A: 1}}}", "rollout.harness.environment.A: .*quotes"),
]


@pytest.mark.parametrize(("text", "message"), MISTAKES)
def test_mistakes_are_named_in_one_line(tmp_path: Path, text: str, message: str):
    complete = "model" in text or text[0] in "-j?"
    file = write(tmp_path / "bad.yaml", text if complete else f"model: {{tiny: {{}}}}\n{text}\n")
    with pytest.raises(ConfigError, match=message) as caught:
        load_config(file)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"run: {name: \xff\xfe}", "cannot be read as YAML: .*#x00ff"),
        (b"run: {name: a\x00b}", "cannot be read as YAML: .*special characters"),
        (b"\x80\x04\x95", "cannot be read as YAML"),
    ],
)
def test_a_file_that_is_no_text_is_refused(tmp_path: Path, content: bytes, message: str):
    file = tmp_path / "bad.yaml"
    file.write_bytes(content)
    with pytest.raises(ConfigError, match=message):
        load_config(file)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("num_steps", "not of the form section.key=value"),
        ("=x", "not of the form"),
        (".run=x", "not of the form"),
        ("run..name=x", "not of the form"),
        ("run.name.=x", "not of the form"),
        ("run.name=[oops", "--set run.name: the value '\\[oops' cannot be read as YAML"),
        ("run.name=@here", "put text with special characters in quotes"),
        ("run.name.first=1", "run.name takes one value and has no keys of its own, found"),
        ("run.num_steps.a.b=1", "run.num_steps takes one value"),
        ("run=5", "run is a section, found 5 .from --set run"),
        ("run=", "run is a section, found nothing"),
        ("run.seed=", "run.seed: .*valid integer .got None, from --set run.seed"),
        ("run={seed: 1, seed: 2}", "key 'seed' stands twice"),
        ("run.nam=x", "unknown key run.nam; did you mean run.name.*from --set run.nam"),
        ("base=other.yaml", "unknown key base"),
        ("engine.extra_args=[1]", "engine.extra_args.*from --set engine.extra_args"),
    ],
)
def test_mistakes_of_overrides_are_named(base: Path, override: str, message: str):
    with pytest.raises(ConfigError, match=message) as caught:
        load_config(base, [override])
    assert "\n" not in str(caught.value)


def test_unreadable_files_are_named(tmp_path: Path):
    loop = tmp_path / "loop.yaml"
    loop.symlink_to(loop)
    with pytest.raises(ConfigError, match="cannot be read: Too many levels of symbolic links"):
        load_config(loop)
    with pytest.raises(ConfigError, match="is a directory; name a YAML file"):
        load_config(tmp_path)
    with pytest.raises(ConfigError, match="no configuration file"):
        load_config(write(tmp_path / "file.yaml", "") / "x.yaml")


def test_an_empty_file_is_a_file_without_weights(tmp_path: Path):
    for text in ("", "# nothing\n", "---\n"):
        file = write(tmp_path / "empty.yaml", text)
        with pytest.raises(ConfigError, match="names no weights"):
            load_config(file)
        assert load_config(file, partial=True).config.model.checkpoint is None


def test_an_empty_mapping_keeps_what_a_base_says(tmp_path: Path, base: Path):
    top = write(tmp_path / "top.yaml", "base: base.yaml\nrun: {}\nmodel: {tiny: {}}\n")
    loaded = load_config(top)
    assert (loaded.config.run.num_steps, loaded.config.model.tiny.seed) == (7, 3)
    assert loaded.origin_of("run.num_steps") == str(base)


def test_anchors_merge_and_names_with_dots_stay_whole(tmp_path: Path):
    text = """
    model: {tiny: {}}
    rollout:
      harness:
        environment: &shared {A: "1", "my.app": on-line, "yes": "2"}
        command: {prompt}
    """
    text = text.replace("{prompt}", "'agent {prompt}'")
    first = write(tmp_path / "first.yaml", text)
    more = "base: first.yaml\nrollout: {harness: {environment: {A: 'other', C: '3'}}}\n"
    loaded = load_config(write(tmp_path / "second.yaml", more))
    assert loaded.config.rollout.harness.environment == {
        "A": "other",
        "my.app": "on-line",
        "yes": "2",
        "C": "3",
    }
    sources = loaded.origin_of("rollout.harness.environment")
    assert str(first) in sources and "second.yaml" in sources
    merged = write(tmp_path / "m.yaml", "x: &x {seed: 1, name: x}\nrun: {<<: *x, name: y}\n")
    with pytest.raises(ConfigError, match="unknown key x;"):
        load_config(merged)
    merged.write_text("model: {tiny: &t {seed: 4}}\nrun: {<<: *t, name: y}\n")
    config = load_config(merged).config
    assert (config.run.seed, config.run.name, config.model.tiny.seed) == (4, "y", 4)


def path_fields(section: type[Section] = GyreConfig, prefix: str = "") -> list[str]:
    """Dotted names of all fields that hold a path."""
    found = []
    for name, field in section.model_fields.items():
        kinds = {field.annotation, *getattr(field.annotation, "__args__", ())}
        inner = section_type(field.annotation)
        if inner is not None:
            found += path_fields(inner, f"{prefix}{name}.")
        elif any(Path in (kind, getattr(kind, "__origin__", None)) for kind in kinds):
            found.append(f"{prefix}{name}")
    return found


def test_home_is_expanded_in_every_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    fields = path_fields()
    assert {"run.root", "model.checkpoint", "rollout.harness.tasks"} <= set(fields)
    file = write(tmp_path / "run.yaml", "run: {name: x}\n")
    for name in fields:
        config = load_config("~/run.yaml", [f"{name}=~/here"], partial=True).config
        for part in name.split("."):
            config = getattr(config, part)
        assert config == tmp_path / "here", name
    top = write(tmp_path / "top.yaml", "base: [~/run.yaml]\n")
    assert load_config(top, partial=True).config.run.name == "x"
    assert load_config(file, ["run.root=a~b"], partial=True).config.run.root == Path("a~b")
    (tmp_path / "hooks.py").write_text("def hook(): return 5\n")
    assert load_reference("~/hooks.py:hook", "key")() == 5


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


@pytest.mark.parametrize(
    "file", sorted((ROOT / "configs").rglob("*.yaml")), ids=lambda file: file.stem
)
def test_every_shipped_file_can_be_shown_alone(file: Path, capsys):
    assert main(["show", str(file)]) == 0
    assert f"# {file}" in capsys.readouterr().out


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
        (["training.tp=4"], 8, "does not divide the model's 2 key-value heads"),
        (["training.tp=2"], 2, "give each cell a multiple of 2 ranks"),
        (["training.pp=4"], 8, "does not divide the model's 2 layers"),
        (["training.ep=3"], 6, "does not divide the model's 4 experts"),
        (["engine.tp=3"], 6, "engine.tp=3 does not divide"),
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
