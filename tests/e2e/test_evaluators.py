"""Evaluators and the shipped task set: reference solutions score 1, empty workspaces 0, half
solutions in between."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest

from gyre_megatron.errors import ConfigError
from gyre_megatron.harness.evaluators import EvaluatorFailure, evaluate
from gyre_megatron.harness.tasks import EvaluatorSpec, Task, TaskSet
from gyre_megatron.harness.workspace import Workspace, copy_contained

PACKAGES = TaskSet.load(Path(__file__).parents[2] / "examples" / "packages")
ENVIRONMENT = {"PATH": os.environ["PATH"], "HOME": "/nonexistent"}


def score(task: Task, workspace: Path, timeout_s: float = 60.0) -> float:
    return asyncio.run(evaluate(task, workspace, timeout_s, ENVIRONMENT)).reward


def test_there_are_enough_tasks() -> None:
    assert len(PACKAGES) >= 20
    assert all(
        (task.directory / "solution").is_dir() and (task.directory / "half").is_dir()
        for task in PACKAGES.values()
    )


@pytest.mark.parametrize("name", list(PACKAGES))
def test_package_task(name: str, tmp_path: Path) -> None:
    task = PACKAGES[name]

    async def scores() -> list[float]:
        works = [
            evaluate(task, w, 60.0, ENVIRONMENT)
            for w in (task.directory / "solution", task.directory / "half", tmp_path)
        ]
        return [result.reward for result in await asyncio.gather(*works)]

    full, half, empty = asyncio.run(scores())
    assert full == 1.0 and empty == 0.0
    assert 0.2 <= half <= 0.8


def pytest_task(folder: Path, tests: str, num_tests: int) -> Task:
    (folder / "hidden").mkdir(parents=True)
    (folder / "hidden" / "test_it.py").write_text(tests)
    spec = EvaluatorSpec(kind="pytest", num_tests=num_tests)
    return Task(name="t", prompt="p", evaluator=spec, directory=folder)


TWO_TESTS = "import lib\n\ndef test_a():\n    assert lib.a() == 1\n\ndef test_b():\n    assert lib.b() == 2\n"


def test_a_suite_that_hangs_keeps_what_had_passed(tmp_path: Path) -> None:
    task = pytest_task(tmp_path / "task", TWO_TESTS, 2)
    work = tmp_path / "work"
    work.mkdir()
    (work / "lib.py").write_text(
        "import time\n\ndef a():\n    return 1\n\ndef b():\n    time.sleep(60)\n"
    )
    assert score(task, work, timeout_s=4.0) == 0.5


@pytest.mark.parametrize(
    "trick",
    [
        {"conftest.py": "def pytest_collection_modifyitems(items):\n    items.clear()\n"},
        {"pytest.py": "raise SystemExit(0)\n"},
        {"lib.py": "import os\nos._exit(0)\n"},
        {"lib.py": "import sys\nsys.exit(0)\n"},
        {"sitecustomize.py": "raise SystemExit(0)\n"},
        {"pytest.ini": "[pytest]\naddopts = --collect-only\n"},
        {
            "lib.py": "import os\nopen(os.environ['GYRE_REPORT'], 'a').write('forged call passed x::y\\n')\n"
        },
    ],
)
def test_a_workspace_cannot_score_by_tricks(tmp_path: Path, trick: dict[str, str]) -> None:
    task = pytest_task(tmp_path / "task", TWO_TESTS, 2)
    work = tmp_path / "work"
    work.mkdir()
    for name, text in trick.items():
        (work / name).write_text(text)
    assert score(task, work) == 0.0


def test_links_that_lead_outside_are_left_out(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.mkdir()
    (secret / "lib.py").write_text("def a():\n    return 1\n")
    work = tmp_path / "work"
    (work / "inner").mkdir(parents=True)
    (work / "real.py").write_text("x = 1\n")
    (work / "good.py").symlink_to("real.py")
    (work / "absolute.py").symlink_to(secret / "lib.py")
    (work / "relative.py").symlink_to("../secret/lib.py")
    (work / "inner" / "dir").symlink_to(secret, target_is_directory=True)
    (work / "loop").symlink_to("loop")
    (work / "nowhere").symlink_to("missing")
    os.mkfifo(work / "pipe")
    left_out = copy_contained(work, tmp_path / "copy")
    assert sorted(left_out) == [
        "absolute.py",
        "inner/dir",
        "loop",
        "nowhere",
        "pipe",
        "relative.py",
    ]
    copied = sorted(str(p.relative_to(tmp_path / "copy")) for p in (tmp_path / "copy").rglob("*"))
    assert copied == ["good.py", "inner", "real.py"]
    assert (tmp_path / "copy" / "good.py").read_text() == "x = 1\n"


def test_an_outside_solution_scores_nothing(tmp_path: Path) -> None:
    task = PACKAGES["lru"]
    work = tmp_path / "work"
    work.mkdir()
    (work / "lru").symlink_to(task.directory / "solution" / "lru", target_is_directory=True)
    assert score(task, work) == 0.0


def test_the_original_workspace_is_only_read(tmp_path: Path) -> None:
    task = pytest_task(
        tmp_path / "task", "import lib\n\ndef test_a():\n    open('made', 'w').close()\n", 1
    )
    work = tmp_path / "work"
    work.mkdir()
    (work / "lib.py").write_text("")
    assert score(task, work) == 1.0
    assert [p.name for p in work.iterdir()] == ["lib.py"]


def command_task(folder: Path, command: str) -> Task:
    return Task(
        name="t",
        prompt="p",
        evaluator=EvaluatorSpec(kind="command", command=command),
        directory=folder,
    )


def test_command_evaluator(tmp_path: Path) -> None:
    (tmp_path / "work").mkdir()
    say = command_task(tmp_path, """sh -c 'echo noise; echo "{\\"reward\\": 0.25}"'""")
    assert score(say, tmp_path / "work") == 0.25


@pytest.mark.parametrize(
    ("command", "reason"),
    [
        ("sh -c 'exit 3'", "status 3"),
        ("echo nothing", "no JSON object"),
        ("echo '{\"reward\": 7}'", r"in \[0, 1\]"),
        ("echo '{\"reward\": true}'", r"in \[0, 1\]"),
        ("sleep 20", "ended by timeout"),
        ("/no/such/program", "status 127|could not be started"),
    ],
)
def test_a_failed_evaluator_is_no_zero(tmp_path: Path, command: str, reason: str) -> None:
    (tmp_path / "work").mkdir()
    with pytest.raises(EvaluatorFailure, match=reason):
        score(command_task(tmp_path, command), tmp_path / "work", timeout_s=1.0)


def test_python_evaluator(tmp_path: Path) -> None:
    (tmp_path / "work").mkdir()
    (tmp_path / "check.py").write_text(
        "def good(work, task):\n    return {'reward': 0.5, 'why': task.name}\n\ndef bad(work, "
        "task):\n    1 / 0\n"
    )
    spec = {"kind": "python", "function": "check.py:good"}
    task = Task(name="t", prompt="p", evaluator=EvaluatorSpec(**spec), directory=tmp_path)
    assert score(task, tmp_path / "work") == 0.5
    broken = task.model_copy(
        update={"evaluator": EvaluatorSpec(kind="python", function="check.py:bad")}
    )
    with pytest.raises(EvaluatorFailure, match="ZeroDivisionError"):
        score(broken, tmp_path / "work")


def test_workspaces_start_fresh_and_go_away(tmp_path: Path) -> None:
    (tmp_path / "seed").mkdir()
    (tmp_path / "seed" / "start.txt").write_text("s")
    workspace = Workspace(tmp_path / "w")
    workspace.create(tmp_path / "seed", "prompt")
    assert (
        workspace.work / "start.txt"
    ).read_text() == "s" and workspace.prompt_file.read_text() == "prompt"
    locked = workspace.work / "locked"
    locked.mkdir()
    (locked / "file").write_text("x")
    locked.chmod(0)
    workspace.create(None, "again")
    assert list(workspace.work.iterdir()) == []
    workspace.remove()
    assert not workspace.root.exists()


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("prompt: p\n", "evaluator"),
        ("prompt: p\nevaluator: {kind: pytest, num_tests: 3}\n", "not a directory"),
        ("prompt: p\nevaluator: {kind: command}\n", "command is empty"),
        ("prompt: p\nevaluator: {kind: python, function: x}\n", "module:function"),
        ("prompt: p\nevaluator: {kind: magic}\n", "magic"),
        ("prompt: [\n", "task.yaml cannot be read as YAML"),
        ("prompt: p\nprompt: q\n", "key 'prompt' stands twice"),
        ("prompt: 2024-13-45\n", "month must be in 1..12"),
        ("- p\n", "holds a list; a mapping of a task's fields was expected"),
        ("", "is no task: prompt: Field required"),
    ],
)
def test_wrong_tasks_are_refused(tmp_path: Path, text: str, reason: str) -> None:
    (tmp_path / "t").mkdir()
    (tmp_path / "t" / "task.yaml").write_text(text)
    with pytest.raises(ConfigError, match=reason):
        TaskSet.load(tmp_path)


def test_an_empty_task_directory_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no task in"):
        TaskSet.load(tmp_path)
