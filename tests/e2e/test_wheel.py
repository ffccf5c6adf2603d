"""The wheel in an environment that knows nothing of the checkout: what README tells to run runs.

The environment's dependencies are those of the tests, joined by a .pth file; every file that a
process of it opens is noted, and none may lie in the checkout.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
DEPENDENCIES = Path(sysconfig.get_path("purelib")).resolve()
pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

WATCH = """
import os, sys

_root, _allowed, _log = {root!r} + os.sep, {allowed!r} + os.sep, {log!r}
_real = os.path.realpath

def _watch(event, arguments):
    if event == "open" and isinstance(arguments[0], str):
        path = _real(arguments[0])
        if path.startswith(_root) and not path.startswith(_allowed):
            with os.fdopen(os.open(_log, os.O_WRONLY | os.O_APPEND | os.O_CREAT), "w") as file:
                file.write(path + chr(10))

sys.addaudithook(_watch)
"""


@dataclass(frozen=True)
class Installed:
    """The wheel's environment.

    Attributes:
        python: its interpreter.
        site: where its packages are.
        log: files of the checkout that its processes opened, one a line.
        wheel, sdist: what was built.
    """

    python: Path
    site: Path
    log: Path
    wheel: Path
    sdist: Path

    def run(self, *words: str, cwd: Path) -> subprocess.CompletedProcess[str]:
        """A program of the environment, in a directory of its own."""
        environment = {"PATH": f"{self.python.parent}:/usr/bin:/bin", "HOME": str(cwd)}
        return subprocess.run(
            [str(self.python.parent / words[0]), *words[1:]],
            cwd=cwd,
            env=environment,
            capture_output=True,
            text=True,
            timeout=240,
        )

    def opened_in_checkout(self) -> list[str]:
        return self.log.read_text().splitlines() if self.log.exists() else []


@pytest.fixture(scope="module")
def installed(tmp_path_factory) -> Installed:
    """Build as `make dist` does, install the wheel and nothing else."""
    folder = tmp_path_factory.mktemp("wheel")
    environment = {k: v for k, v in os.environ.items() if k not in ("GYRE_NATIVE", "PYTHONPATH")}
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(folder / "dist")]
    built = subprocess.run([*command, str(ROOT)], env=environment, capture_output=True, text=True)
    assert built.returncode == 0, built.stdout[-3000:] + built.stderr[-3000:]
    (wheel,) = (folder / "dist").glob("*.whl")
    (sdist,) = (folder / "dist").glob("*.tar.gz")
    venv.create(folder / "venv", with_pip=False)
    python = folder / "venv" / "bin" / "python"
    pip = [sys.executable, "-m", "pip", "--python", str(python), "install", "-q", "--no-deps"]
    subprocess.run([*pip, "--no-index", str(wheel)], env=environment, check=True)
    (site,) = (folder / "venv" / "lib").glob("python*/site-packages")
    log = folder / "opened.txt"
    (site / "dependencies.pth").write_text(f"{DEPENDENCIES}\n")
    (site / "sitecustomize.py").write_text(
        WATCH.format(root=str(ROOT), allowed=str(DEPENDENCIES), log=str(log))
    )
    return Installed(python, site, log, wheel, sdist)


def test_the_watch_sees_a_file_of_the_checkout(installed: Installed, tmp_path: Path) -> None:
    """Else the tests below could not fail."""
    installed.run("python", "-c", f"open({str(ROOT / 'README.md')!r})", cwd=tmp_path)
    assert installed.opened_in_checkout() == [str(ROOT / "README.md")]
    installed.log.unlink()


def test_what_the_archives_hold(installed: Installed) -> None:
    names = zipfile.ZipFile(installed.wheel).namelist()
    for part in ("_C.", "py.typed", "configs/models/qwen3_8b.yaml", "examples/newcomer/harness.py"):
        assert any(name.startswith(f"gyre_megatron/{part}") for name in names), part
    tracked = subprocess.run(
        ["git", "ls-files", "configs", "examples"], cwd=ROOT, capture_output=True, text=True
    ).stdout.split()
    if tracked:  # a source distribution has no git
        missing = {f"gyre_megatron/{file}" for file in tracked} - set(names)
        assert missing <= {"gyre_megatron/examples/ruff.toml"}
    rooms = {name.split("/")[0] for name in names}
    assert {room for room in rooms if not room.endswith(".dist-info")} == {"gyre_megatron"}
    unpacked = subprocess.run(
        ["tar", "-tzf", str(installed.sdist)], capture_output=True, text=True, check=True
    ).stdout.splitlines()
    inside = {line.split("/", 1)[1] for line in unpacked if "/" in line}
    for file in (
        "setup.py",
        "csrc/cpu/boxes.cpp",
        "Makefile",
        "docs/proxy.md",
        "tests/__init__.py",
    ):
        assert file in inside
    assert not [name for name in inside if "_cache/" in name or name.startswith("runs/")]


def test_commands_of_the_readme(installed: Installed, tmp_path: Path) -> None:
    where = installed.run(
        "python", "-c", "import gyre_megatron as g; print(g.__file__)", cwd=tmp_path
    )
    assert where.stdout.strip() == str(installed.site / "gyre_megatron" / "__init__.py")
    layouts = ["--train", "tp4,pp4,ep64,etp1", "--serve", "tp16,ep16", "--json", "plan.json"]
    config = "configs/models/qwen3_8_2_4t_a95b.yaml"
    done = installed.run("gyre", "plan", "--config", config, *layouts, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert json.loads((tmp_path / "plan.json").read_text())["params_total"] > 2e12
    for name in ("configs/demo_cpu.yaml", "examples/newcomer/config.yaml", "demo_cpu"):
        shown = installed.run("gyre", "config", "show", name, cwd=tmp_path)
        assert shown.returncode == 0, shown.stderr
        folder = "newcomer" if "newcomer" in name else "tables"
        tasks = installed.site / "gyre_megatron" / "examples" / folder / "tasks"
        assert f"rollout.harness.tasks: {tasks}" in shown.stdout
    assert installed.opened_in_checkout() == []


@pytest.mark.parametrize("config", ["demo_cpu", "examples/newcomer/config.yaml"])
def test_a_start_reads_all_that_it_needs_and_ends_by_our_message(
    config: str, installed: Installed, tmp_path: Path
) -> None:
    """A real torchrun. Tasks, evaluator and harness are loaded, the tiny model is made, and only
    then the layout is refused."""
    words = ["--nproc-per-node", "1", "--set", "cluster.num_cells=1", "--set", "training.tp=4"]
    done = installed.run("gyre", "train", "--config", config, *words, cwd=tmp_path)
    assert done.returncode == 1
    message = "rank 0: a cell has 1 ranks, training.tp*pp*cp = 4*1*1 = 4 does not divide it"
    assert message in done.stderr, done.stderr
    assert [p.name for p in (tmp_path / "runs").iterdir()] == ["models"]
    assert installed.opened_in_checkout() == []


def test_what_the_directory_holds_comes_before_what_is_shipped(
    installed: Installed, tmp_path: Path
) -> None:
    shutil.copytree(ROOT / "examples" / "newcomer", tmp_path / "examples" / "newcomer")
    (tmp_path / "examples" / "newcomer" / "harness.py").write_text("raise ValueError('mine')\n")
    words = ["--nproc-per-node", "1", "--set", "cluster.num_cells=1"]
    mine = "examples/newcomer/config.yaml"
    (tmp_path / mine).write_text((tmp_path / mine).read_text().replace("../../configs/", ""))
    done = installed.run("gyre", "train", "--config", mine, *words, cwd=tmp_path)
    assert done.returncode == 1 and "ValueError: mine" in done.stderr, done.stderr
