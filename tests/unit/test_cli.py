"""The program `gyre`: its commands, exit codes and errors, and what it may not import."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from gyre_megatron import cli
from gyre_megatron.commands import train
from gyre_megatron.config.loader import load_config
from gyre_megatron.errors import CellError, ConfigError

ROOT = Path(__file__).parents[2]


def gyre(*words: str, cwd: Path = ROOT, **environment: str) -> subprocess.CompletedProcess[str]:
    """`gyre WORDS` in a process of its own, without torchrun's variables."""
    inherited = {name: value for name, value in os.environ.items() if name != "RANK"}
    return subprocess.run(
        [sys.executable, "-m", "gyre_megatron", *words],
        cwd=cwd,
        env=inherited | {"PYTHONPATH": str(ROOT)} | environment,
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_help_lists_every_command_and_each_exists():
    shown = gyre("--help")
    assert shown.returncode == 0
    for name, (module, text) in cli.COMMANDS.items():
        assert f"  {name}" in shown.stdout and text in shown.stdout
        assert callable(importlib.import_module(module).main)


def test_help_imports_nothing_heavy():
    program = (
        "import sys; from gyre_megatron import cli\n"
        "try: cli.main(['--help'])\n"
        "except SystemExit: pass\n"
        "heavy = {'torch', 'numpy', 'pydantic', 'yaml', 'rich', 'megatron', 'sglang'}\n"
        "print(sorted(heavy & set(sys.modules)), file=sys.stderr)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert done.stderr.splitlines()[-1] == "[]", done.stderr


@pytest.mark.parametrize("command", list(cli.COMMANDS))
def test_each_command_shows_its_own_help(command, capsys):
    with pytest.raises(SystemExit) as ended:
        cli.main([command, "--help"])
    assert ended.value.code == 0
    assert capsys.readouterr().out.startswith(f"usage: gyre {command}")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "arguments are required: COMMAND"),
        (["trian"], "unknown command 'trian'; did you mean train?"),
        (["zzz"], "unknown command 'zzz' Commands: train,"),
        (["train"], "required: --config"),
        (
            ["plan", "--config", "nowhere"],
            "no configuration file nowhere; shipped ones are demo_cpu",
        ),
        (["plan", "--config", "qwen3_8b", "--train", "zz2"], "'zz2' in layout 'zz2' is not one of"),
        (
            ["plan", "--config", "qwen3_8b", "--train", "pp5,vpp2"],
            "training.pp*vpp=10 does not divide",
        ),
        (["config", "show", "demo_cpu", "--set", "run.num_step=1"], "did you mean run.num_steps?"),
        (
            ["train", "--config", "nowhere", "--nproc-per-node", "2"],
            "no configuration file nowhere",
        ),
        (
            ["train", "--config", "demo_cpu", "--nproc-per-node", "x"],
            "a number of ranks was expected",
        ),
        (
            ["train", "--config", "demo_cpu", "--nproc-per-node", "0"],
            "a number of ranks was expected",
        ),
    ],
)
def test_wrong_usage_is_one_error_and_exit_2(words, message, monkeypatch, capsys):
    monkeypatch.delenv("RANK", raising=False)
    try:
        code = cli.main(words)
    except SystemExit as ended:
        code = ended.code
    assert code == 2 and message in capsys.readouterr().err


def test_as_a_process_it_ends_with_that_code_and_no_traceback():
    done = gyre("config", "show", "demo_cpu", "--set", "run.num_step=1")
    assert done.returncode == 2
    assert (
        done.stderr.startswith("error: unknown key run.num_step") and done.stderr.count("\n") == 1
    )


def test_train_outside_torchrun_says_what_to_type():
    done = gyre("train", "--config", "demo_cpu", "--set", "run.num_steps=3", "--resume")
    assert done.returncode == 2
    assert (
        "torchrun --nproc-per-node N -m gyre_megatron train --config demo_cpu "
        "--set run.num_steps=3 --resume" in done.stderr
    )


@pytest.mark.parametrize("error", [ConfigError("c"), CellError("d")])
def test_errors_of_ours_are_one_line(error, monkeypatch, capsys):
    def fail(_):
        raise error

    monkeypatch.setattr("gyre_megatron.commands.plan.main", fail)
    assert cli.main(["plan"]) == (2 if isinstance(error, ConfigError) else 1)
    assert capsys.readouterr().err == f"error: {error}\n"


def test_a_missing_package_is_named_but_our_own_mistakes_keep_their_traceback(monkeypatch, capsys):
    def miss(name: str):
        def main(_):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

        return main

    monkeypatch.setattr("gyre_megatron.commands.plan.main", miss("sglang.srt"))
    assert cli.main(["plan"]) == 1
    assert "No module named 'sglang.srt'; `gyre doctor`" in capsys.readouterr().err
    monkeypatch.setattr("gyre_megatron.commands.plan.main", miss("gyre_megatron.nothing"))
    with pytest.raises(ModuleNotFoundError):
        cli.main(["plan"])


def test_a_file_that_cannot_be_written_is_named(tmp_path, capsys):
    words = ["plan", "--config", "qwen3_8b", "--json", str(tmp_path / "no" / "plan.json")]
    assert cli.main(words) == 1
    said = capsys.readouterr().err
    assert said == f"error: {tmp_path}/no/plan.json: No such file or directory\n"


def test_a_reader_that_went_away_is_no_error():
    command = f"{sys.executable} -m gyre_megatron config show demo_cpu | head -1"
    done = subprocess.run(
        ["bash", "-o", "pipefail", "-c", command],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0 and done.stderr == ""


# Shipped configurations


def test_shipped_configurations_are_found_by_name_from_anywhere(tmp_path: Path):
    shown = gyre("config", "show", "demo_cpu", cwd=tmp_path)
    assert shown.returncode == 0 and "run.num_steps: 24" in shown.stdout
    assert gyre("config", "show", "configs/demo_cpu.yaml", cwd=tmp_path).returncode == 0
    mine = tmp_path / "mine.yaml"
    mine.write_text("base: [demo_cpu]\nrun: {num_steps: 3}\n")
    assert load_config(mine).config.run.num_steps == 3
    assert load_config(mine).config.model == load_config("demo_cpu").config.model
    (tmp_path / "demo_cpu").write_text("base: [nowhere.yaml]\n")
    with pytest.raises(ConfigError, match=r"no configuration file .*nowhere.yaml"):
        load_config(mine)  # the file beside wins over the shipped one


def test_plan_needs_no_layouts(tmp_path: Path):
    done = gyre("plan", "--config", "qwen3_8b", "--json", str(tmp_path / "plan.json"), cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    result = json.loads((tmp_path / "plan.json").read_text())
    assert result["params_total"] == 8_190_735_360 and result["bytes_in_max"] == 0


# What the ranks are given


@pytest.mark.parametrize("overrides", [[], ["training.optimizer.lr=1e-6", "run.root=~/x"]])
def test_ranks_and_control_plane_load_the_same_configuration(overrides, monkeypatch):
    config = load_config("demo_cpu", overrides).config
    seen = []

    def run_rank(given, words, resume):
        assert words[0] == "--config"
        seen.append((given, load_config(words[1]).config, resume))

    monkeypatch.setenv("RANK", "0")
    monkeypatch.setattr("gyre_megatron.runtime.rank.run_rank", run_rank)
    train.run(config, resume=True)
    ((given, loaded, resume),) = seen
    assert given == loaded == config and resume


def test_run_outside_torchrun_is_refused(monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(ConfigError, match="no torchrun rank"):
        train.run(load_config("demo_cpu").config)


def test_nproc_per_node_starts_torchrun_with_the_same_words(monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    commands = []

    def execv(program, words):
        commands.append(words)
        raise SystemExit  # the real one does not come back either

    monkeypatch.setattr(os, "execv", execv)
    words = ["--config", "demo_cpu", "--set", "run.num_steps=2", "--nproc-per-node", "2"]
    with pytest.raises(SystemExit):
        train.main(words)
    assert " ".join(commands[0][1:]) == (
        "-m torch.distributed.run --standalone --nproc-per-node 2 -m gyre_megatron train "
        "--config demo_cpu --set run.num_steps=2"
    )


def test_only_rank_0_says_what_all_know():
    for rank, expected in (("0", "no configuration file nowhere"), ("1", "")):
        done = gyre("train", "--config", "nowhere", RANK=rank)
        assert done.returncode == 2
        assert expected in done.stderr and bool(done.stderr) == bool(expected)
    done = gyre("train", "--config", "demo_cpu", "--nproc-per-node", "2", RANK="0")
    assert done.returncode == 2 and "--nproc-per-node is torchrun's here" in done.stderr
