"""What a run's start refuses before it makes a process, a port or a file."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from gyre_megatron.config.loader import load_config
from gyre_megatron.errors import ConfigError, GyreError, RunDirectoryError
from gyre_megatron.runtime.checks import check_inputs, check_writable
from gyre_megatron.runtime.run_directory import RunDirectory
from gyre_megatron.trajectory.store import TrajectoryStore

ROOT = Path(__file__).parents[2]


def inputs(root: Path, *overrides: str) -> None:
    check_inputs(
        load_config(ROOT / "configs/demo_cpu.yaml", [f"run.root={root}", *overrides]).config
    )


@pytest.fixture(autouse=True)
def in_the_checkout(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)  # the demo names its tasks relative to it


def test_the_demo_passes_and_nothing_is_made(tmp_path: Path):
    inputs(tmp_path / "runs")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("rollout.harness.tasks=null", "rollout.harness.tasks is not set"),
        ("rollout.harness.tasks=/nowhere", "no task in /nowhere, which is no directory"),
        ("rollout.harness.tasks=configs", "no task in configs"),
        ("scheduler.policy=gyer", "scheduler.policy: unknown name 'gyer'"),
        ("rollout.processor.advantage=mea", "rollout.processor.advantage: unknown name"),
        ("rollout.proxy.harness_profile=claud", "rollout.proxy.harness_profile: unknown name"),
        ("rollout.proxy.tool_call_format=hermse", "rollout.proxy.tool_call_format"),
        ("rollout.proxy.dialects=[antropic]", "rollout.proxy.dialects: unknown name"),
    ],
)
def test_wrong_names_are_refused_and_nothing_is_made(tmp_path: Path, override: str, message: str):
    with pytest.raises(ConfigError, match=message):
        inputs(tmp_path / "runs", override)
    assert list(tmp_path.iterdir()) == []


def test_a_place_that_cannot_hold_a_run_is_refused(tmp_path: Path):
    (tmp_path / "file").write_text("")
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
    for place in ("file/run", "file", "dangling/run"):
        with pytest.raises(RunDirectoryError, match=r"is no directory; set run\.root") as caught:
            check_writable(tmp_path / place)
        assert "\n" not in str(caught.value)
    with pytest.raises(RunDirectoryError, match="is no directory"):
        inputs(tmp_path / "file")
    check_writable(tmp_path / "not" / "there" / "yet")
    assert not (tmp_path / "not").exists()


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_directory_of_somebody_else_is_refused(tmp_path: Path):
    tmp_path.chmod(0o500)
    with pytest.raises(RunDirectoryError, match="is read-only, or belongs to somebody else"):
        check_writable(tmp_path / "run")


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting a read-only file system needs root")
def test_a_read_only_file_system_is_refused(tmp_path: Path):
    subprocess.run(["mount", "-t", "tmpfs", "-o", "ro", "tmpfs", str(tmp_path)], check=True)
    try:
        with pytest.raises(RunDirectoryError, match="is read-only"):
            check_writable(tmp_path / "runs" / "run")
    finally:
        subprocess.run(["umount", "-l", str(tmp_path)], check=True)


def test_a_directory_holds_a_run_once_something_was_dispatched(tmp_path: Path):
    """A start that failed before that, in an engine for example, leaves an empty store."""
    with TrajectoryStore(tmp_path / "store.db"):
        pass
    RunDirectory(tmp_path).open(resume=False)
    with TrajectoryStore(tmp_path / "store.db") as store:
        store.add_group("g", {"task": "t"}, 1, 0)
    with pytest.raises(RunDirectoryError, match="holds a run already"):
        RunDirectory(tmp_path).open(resume=False)


def test_a_store_that_cannot_be_read_counts_as_a_run(tmp_path: Path):
    (tmp_path / "store.db").write_bytes(b"something else" * 1000)
    with pytest.raises(GyreError, match="holds a run already"):
        RunDirectory(tmp_path).open(resume=False)
