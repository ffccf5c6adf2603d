"""What a user gets wrong: one clear error, a non-zero exit, nothing half-written, nothing left
running."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.training_runs import ROOT, training_run

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(480)]


def launch(*arguments: str) -> subprocess.CompletedProcess[str]:
    """launch/train_gyre.py as torchrun's first rank would start it."""
    environment = os.environ | {"RANK": "0"}
    command = [sys.executable, "launch/train_gyre.py", *arguments]
    return subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=60
    )


@pytest.mark.parametrize("arguments", [[], ["--confg", "x"], ["--config"]])
def test_no_argument_or_a_wrong_one_gives_a_usage_line_and_exit_2(arguments):
    result = launch(*arguments)
    assert result.returncode == 2
    assert result.stderr.startswith("usage: gyre train --nproc-per-node N --config FILE")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--config", "missing.yaml"], "no configuration file missing.yaml"),
        (
            ["--config", "configs/demo_cpu.yaml", "--set", "run.num_step=1"],
            "did you mean run.num_steps?",
        ),
    ],
)
def test_a_wrong_configuration_gives_exit_2(arguments, message):
    result = launch(*arguments)
    assert result.returncode == 2
    assert message in result.stderr


def test_starting_without_torchrun_says_how_to_start():
    environment = {name: value for name, value in os.environ.items() if name != "RANK"}
    command = [sys.executable, "launch/train_gyre.py", "--config", "configs/demo_cpu.yaml"]
    result = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=60
    )
    assert result.returncode == 2
    assert "torchrun --nproc-per-node N -m gyre_megatron train --config" in result.stderr


@pytest.mark.parametrize(
    ("words", "ranks", "message"),
    [
        ("cluster.num_cells=2", 1, "1 ranks cannot be divided into 2 equal cells"),
        ("model.tiny=null model.checkpoint=/nowhere", 2, "no checkpoint at /nowhere"),
        (
            "cluster.num_cells=1 training.tp=2 model.tiny.num_attention_heads=3 "
            "model.tiny.num_key_value_heads=1",
            2,
            "training.tp=2 does not divide the model's 3 attention heads",
        ),
        ("engine.context_length=9999", 2, "engine.context_length=9999 exceeds the model's"),
        ("engine.max_running_requests=4", 2, "less than scheduler.cell_capacity=12"),
        ("cluster.num_cells=1 training.ep=4", 2, "does not divide the 2 ranks of a pipeline"),
        ("rollout.harness.tasks=/nowhere", 2, "no task in /nowhere"),
        ("rollout.processor.advantage=mea", 2, "rollout.processor.advantage: unknown name 'mea'"),
        ("scheduler.policy=gyer", 2, "scheduler.policy: unknown name 'gyer'"),
    ],
)
def test_what_cannot_work_is_refused_before_anything_starts(
    tmp_path: Path, words: str, ranks: int, message: str
):
    with training_run(
        tmp_path, *[w for word in words.split() for w in ("--set", word)], ranks=ranks
    ) as run:
        assert run.wait(180) != 0
        assert message in run.output
        assert run.survivors() == []
    assert not run.directory.exists()


def test_a_port_in_use_is_named(tmp_path: Path):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with training_run(tmp_path, "--set", f"cluster.port={port}") as run:
            assert run.wait(120) != 0
            assert f"cannot listen on 127.0.0.1:{port}" in run.output
            assert run.survivors() == []
            assert not run.directory.exists()


def test_a_start_that_failed_can_be_mended_and_started_again(tmp_path: Path):
    """An engine that dies at start shows its last log lines; nothing was dispatched, so the mended
    start needs neither --resume nor another name."""
    with training_run(tmp_path, "--set", "engine.extra_args=[--no-such-flag]") as run:
        assert run.wait(120) != 0
        assert "unrecognized arguments: --no-such-flag" in run.output
        assert "its last log lines" in run.output
        assert run.survivors() == []
    with training_run(tmp_path, "--set", "run.num_steps=1") as mended:
        assert mended.wait(200) == 0, mended.output[-4000:]


def test_a_gap_between_trainer_and_engine_stops_the_run(tmp_path: Path):
    with training_run(tmp_path, "--set", "run.logprob_gap_limit=1e-12") as run:
        assert run.wait(120) != 0
        assert (
            "trainer and engine differ by" in run.output
            and "run.logprob_gap_limit is 1e-12" in run.output
        )
        assert run.survivors() == []


def test_a_second_run_in_the_same_directory_is_refused(tmp_path: Path):
    with training_run(tmp_path, "--set", "run.num_steps=50") as first:
        first.wait_for_steps(1, 120)
        with training_run(tmp_path, "--resume") as second:
            assert second.wait(180) != 0
            assert "is in use by another run" in second.output
        assert first.process.poll() is None, "the first run must go on"
        first.kill_everything()
    with training_run(tmp_path) as third:
        assert third.wait(180) != 0
        assert "holds a run already; continue it with --resume" in third.output


def test_resuming_nothing_is_refused(tmp_path: Path):
    with training_run(tmp_path, "--resume") as run:
        assert run.wait(180) != 0
        assert "nothing to resume" in run.output
    assert not run.directory.exists()


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting a small file system needs root")
def test_a_full_disk_stops_the_run_with_a_clear_error_and_loses_nothing(tmp_path: Path):
    disk = tmp_path / "disk"
    disk.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=24m", "tmpfs", str(disk)], check=True)
    try:
        words = [
            "--set",
            "run.num_steps=4",
            "--set",
            "run.checkpoint_interval=1",
            "--set",
            "run.tensorboard=false",
        ]
        with training_run(disk, *words) as run:
            run.wait_for_steps(1, 120)
            ballast = disk / "ballast"
            with pytest.raises(OSError), ballast.open("wb") as file:
                while True:
                    file.write(b"\0" * 4096)
                    file.flush()
            assert run.wait(180) != 0
            assert "full" in run.output or "No space left" in run.output
            assert run.survivors() == []
        ballast.unlink()
        with training_run(disk, *words, "--resume") as resumed:
            assert resumed.wait(180) == 0, resumed.output[-4000:]
        assert [record["step"] for record in resumed.records()] == [1, 2, 3, 4]
    finally:
        subprocess.run(["umount", "-l", str(disk)], check=True)
