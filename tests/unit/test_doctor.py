"""What `gyre doctor` says about machines that lack something."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from gyre_megatron import cli, versions
from gyre_megatron.commands import clock, doctor

ROOT = Path(__file__).parents[2]


def as_process(program: str) -> dict[str, dict[str, str]]:
    """Findings by name of a doctor in a process of its own, after `program`; and its exit code."""
    main = "import sys; from gyre_megatron import cli; sys.exit(cli.main(['doctor', '--json']))"
    done = subprocess.run(
        [sys.executable, "-c", f"{program}\n{main}"],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    answer = json.loads(done.stdout)
    findings = {check["name"]: check for check in answer["checks"]}
    failed = any(check["state"] == "fail" for check in answer["checks"])
    assert answer["ok"] is not failed and done.returncode == int(failed)
    return findings


def test_this_machine_is_described(capsys):
    code = cli.main(["doctor"])
    lines = capsys.readouterr().out.splitlines()
    assert code == int(any(line.startswith("fail") for line in lines))
    names = {line[6:].split(":")[0] for line in lines if not line.startswith(" ")}
    assert {"python", "megatron-core", "sglang", "apex", "devices", "/dev/shm", "clock"} <= names
    for line, following in zip(lines, [*lines[1:], ""], strict=True):
        if line.startswith("fail"):
            assert following.startswith("      -> "), f"no way to mend: {line}"


def test_an_extension_that_does_not_load_fails():
    found = as_process("import sys; sys.modules['gyre_megatron._C'] = None")
    assert found["native extension"]["state"] == "fail"
    assert "make build" in found["native extension"]["mend"]
    assert found["megatron-core"]["state"] == "ok", "the other checks go on"


def test_few_open_files_are_named_with_the_command():
    found = as_process("import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (512, 2048))")
    assert found["open files"]["state"] == "warn"
    assert found["open files"]["mend"] == "ulimit -n 2048"


def package(folder: Path, name: str, inside: str) -> None:
    (folder / name / inside).mkdir(parents=True)
    (folder / name / "__init__.py").write_text("raise RuntimeError('must not be imported')")


@pytest.mark.parametrize(
    ("inside", "state", "words"),
    [
        ("multi_tensor_apply", "ok", "NVIDIA's"),
        ("lib", "fail", "unrelated package of that name on PyPI"),
    ],
)
def test_the_two_packages_called_apex(inside, state, words, tmp_path, monkeypatch):
    package(tmp_path, "apex", inside)
    monkeypatch.syspath_prepend(tmp_path)
    found = doctor.apex()
    assert found.state == state and words in found.found
    assert found.mend == ("pip uninstall apex" if state == "fail" else "")


@pytest.mark.parametrize(
    ("installed", "allowed", "state"),
    [("0.5.23", "0", "ok"), ("0.5.24", "0", "fail"), ("0.5.24", "1", "warn"), (None, "1", "fail")],
)
def test_untested_versions(installed, allowed, state, monkeypatch):
    monkeypatch.setenv(versions.ALLOW_UNTESTED, allowed)
    monkeypatch.setattr(doctor, "installed_version", lambda _: installed)
    for found in doctor.tested_versions():
        if found.name == "sglang":
            assert found.state == state
            assert found.mend == ("" if state == "ok" else "pip install sglang==0.5.23")


def test_missing_and_old_dependencies_are_listed_with_one_command(monkeypatch):
    real = versions.installed_version
    changed = {"aiohttp": None, "rich": "1.0"}
    monkeypatch.setattr(doctor, "installed_version", lambda name: changed.get(name, real(name)))
    monkeypatch.setattr(
        doctor, "requires", lambda _: ["aiohttp>=3", "rich>=13", "numpy", "x; extra == 'dev'"]
    )
    found = doctor.dependencies()
    assert (
        found.state == "fail" and "aiohttp>=3 (found nothing), rich>=13 (found 1.0)" in found.found
    )
    assert found.mend == "pip install 'aiohttp>=3' 'rich>=13'"


class Filesystem:
    """What statvfs says of a file system of `gib` GiB, all free."""

    def __init__(self, gib: float) -> None:
        self.f_frsize = 4096
        self.f_blocks = self.f_bavail = int(gib * 2**30 / 4096)


@pytest.mark.parametrize(("gib", "state"), [(0.0625, "fail"), (2, "warn"), (64, "ok")])
def test_shared_memory(gib, state, monkeypatch):
    monkeypatch.setattr(doctor.os, "statvfs", lambda _: Filesystem(gib))
    found = doctor.shared_memory()
    assert found.state == state and ("--shm-size" in found.mend) == (state != "ok")


def test_rdma_needs_locked_memory(tmp_path, monkeypatch):
    monkeypatch.setattr(doctor, "RDMA_DEVICES", tmp_path / "none")
    assert [found.state for found in doctor.rdma()] == ["ok"]
    (tmp_path / "mlx5_0").mkdir()
    monkeypatch.setattr(doctor, "RDMA_DEVICES", tmp_path)
    for limit, state in ((65536, "warn"), (resource.RLIM_INFINITY, "ok")):
        monkeypatch.setattr(doctor.resource, "getrlimit", lambda _, limit=limit: (limit, limit))
        devices, memory = doctor.rdma()
        assert devices.found == "mlx5_0" and memory.state == state


def test_a_gpu_that_torch_cannot_use_fails(tmp_path, monkeypatch):
    import torch

    if torch.cuda.is_available():
        pytest.skip("torch can use the GPU of this machine")
    monkeypatch.setattr(doctor, "NVIDIA_DEVICE", tmp_path)
    assert doctor.devices().state == "fail"


@pytest.mark.parametrize(
    ("state", "expected"),
    [
        (None, "warn"),
        (clock.ClockState(False, 16000.0), "warn"),
        (clock.ClockState(True, 3.2), "ok"),
    ],
)
def test_clock(state, expected, monkeypatch):
    monkeypatch.setattr(clock, "read", lambda: state)
    assert doctor.system_clock().state == expected


def test_the_kernels_answer_about_its_clock_is_read():
    state = clock.read()
    assert state is None or state.max_error_ms >= 0


def test_a_check_that_breaks_is_a_warning_and_the_others_go_on(monkeypatch):
    def broken_part():
        raise SystemError("whatever a package raises")

    monkeypatch.setattr(doctor, "CHECKS", (broken_part, doctor.python_and_gyre))
    first, *others = doctor.examine()
    assert first.state == "warn" and first.name == "broken part"
    assert "SystemError: whatever a package raises" in first.found and len(others) == 2
