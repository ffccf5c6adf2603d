"""The harness runner: a clean room, limits, and every way an execution can end."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import time
from dataclasses import fields
from pathlib import Path

import pytest

from gyre_megatron.config.rollout import EvaluatorConfig, HarnessConfig, RolloutConfig
from gyre_megatron.errors import ConfigError
from gyre_megatron.harness import harnesses
from gyre_megatron.harness.runner import HarnessContext, end_orphaned_harnesses, run_execution
from gyre_megatron.harness.tasks import EvaluatorSpec, Task, TaskSet
from gyre_megatron.trajectory.records import Outcome
from gyre_megatron.trajectory.store import TrajectoryStore

SCORE = """
import json, pathlib
def exists(work, task):
    return float((work / "done.txt").exists())
def always_fails(work, task):
    raise OSError("no")
def fails_once(work, task):
    flag = task / "tried"
    if not flag.exists():
        flag.touch()
        raise OSError("first")
    return 1.0
"""


def run(
    tmp_path: Path, program: str, function: str = "exists", **harness: object
) -> tuple[Outcome, Path]:
    """Run a Python program as the harness; returns the outcome and the workspace's root."""
    (tmp_path / "task" / "workspace").mkdir(parents=True, exist_ok=True)
    (tmp_path / "task" / "workspace" / "given.txt").write_text("given")
    (tmp_path / "task" / "score.py").write_text(SCORE)
    (tmp_path / "harness.py").write_text(program)
    config = RolloutConfig(
        harness=HarnessConfig(
            **{
                "command": f"{sys.executable} {tmp_path / 'harness.py'} {{prompt}}",
                "keep_workspaces": True,
                **harness,
            }
        ),
        evaluator=EvaluatorConfig(retries=1),
    )
    spec = EvaluatorSpec(kind="python", function=f"score.py:{function}")
    task = Task(name="t", prompt="do 'it' $HOME\nnow", evaluator=spec, directory=tmp_path / "task")
    store = TrajectoryStore(tmp_path / "store.db")
    execution_id = store.add_group("g", {"task": "t"}, 1, 0)[0]
    context = HarnessContext(store, TaskSet([task]), config, "http://127.0.0.1:1")
    outcome = asyncio.run(run_execution(context, execution_id))
    assert store.execution(execution_id).outcome == outcome
    store.close()
    return outcome, tmp_path / "workspaces" / "g.00.1"


def test_a_clean_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET", "x")
    program = """
import json, os, sys
json.dump({"env": dict(os.environ), "cwd": os.getcwd(), "argv": sys.argv[1:], "files": os.listdir("."),
           "session": os.getsid(0) == os.getpid(), "stdin": sys.stdin.read()}, open("seen.json", "w"))
open("done.txt", "w").close()
print("said")
"""
    outcome, root = run(tmp_path, program, environment={"EXTRA": "1"})
    assert outcome.status == "scored" and outcome.reward == 1.0
    seen = json.loads((root / "work" / "seen.json").read_text())
    assert seen["argv"] == ["do 'it' $HOME\nnow"] and seen["files"] == ["given.txt"]
    assert seen["cwd"] == str(root / "work") and seen["session"] and seen["stdin"] == ""
    environment = seen["env"]
    assert "SECRET" not in environment and environment["EXTRA"] == "1"
    assert environment["HOME"] == str(root / "home") != os.environ.get("HOME")
    assert environment["ANTHROPIC_BASE_URL"] == "http://127.0.0.1:1"
    assert environment["OPENAI_BASE_URL"] == "http://127.0.0.1:1/v1"
    assert environment["ANTHROPIC_AUTH_TOKEN"] == environment["OPENAI_API_KEY"] != ""
    assert (root / "stdout.log").read_text() == "said\n"


def test_a_timeout_is_still_scored_and_nobody_is_left_behind(tmp_path: Path) -> None:
    program = """
import os, subprocess, time
open("done.txt", "w").close()
child = subprocess.Popen(["sleep", "300"])
open("child", "w").write(str(child.pid))
time.sleep(300)
"""
    started = time.monotonic()
    outcome, root = run(tmp_path, program, timeout_s=1.5)
    assert outcome.status == "scored" and outcome.reward == 1.0
    assert outcome.detail["harness"]["ended_by"] == "timeout" and time.monotonic() - started < 15
    child = int((root / "work" / "child").read_text())
    assert not Path(f"/proc/{child}").exists() or "Z" in Path(f"/proc/{child}/stat").read_text()


@pytest.mark.parametrize(
    ("program", "limits", "ended_by"),
    [
        ("x = bytearray(400 << 20)\nimport time\ntime.sleep(60)", {"memory_mib": 200}, "memory"),
        ("while True: pass", {"cpu_s": 1}, "exit"),
        ("open('big', 'wb').write(b'x' * (3 << 20))", {"max_file_mib": 1}, "exit"),
    ],
)
def test_limits_end_the_harness_and_the_rest_is_scored(
    tmp_path: Path, program: str, limits: dict[str, int], ended_by: str
) -> None:
    outcome, root = run(tmp_path, program, timeout_s=20.0, **limits)
    assert outcome.status == "scored" and outcome.reward == 0.0
    assert (
        outcome.detail["harness"]["ended_by"] == ended_by and outcome.detail["harness"]["code"] != 0
    )
    big = root / "work" / "big"
    assert not big.exists() or big.stat().st_size <= 1 << 20


def test_output_is_read_to_the_end_but_only_the_beginning_is_kept(tmp_path: Path) -> None:
    program = "print('x' * (8 << 20))\nopen('done.txt', 'w').close()"
    outcome, root = run(tmp_path, program, max_output_kib=64)
    assert outcome.reward == 1.0
    assert (root / "stdout.log").stat().st_size == 64 << 10


def test_an_overall_timeout_drops_the_execution(tmp_path: Path) -> None:
    outcome, _ = run(tmp_path, "import time\ntime.sleep(60)", overall_timeout_s=1.0)
    assert outcome.status == "dropped" and outcome.reward is None


def test_an_evaluator_gets_another_try(tmp_path: Path) -> None:
    outcome, _ = run(tmp_path, "", function="fails_once")
    assert (
        outcome.status == "scored"
        and outcome.reward == 1.0
        and len(outcome.detail["failures"]) == 1
    )


def test_an_evaluator_that_never_works_excludes(tmp_path: Path) -> None:
    outcome, _ = run(tmp_path, "", function="always_fails")
    assert (
        outcome.status == "excluded"
        and outcome.reward is None
        and len(outcome.detail["failures"]) == 2
    )


def test_nothing_to_evaluate_is_a_placeholder(tmp_path: Path) -> None:
    outcome, _ = run(tmp_path, "", container_prefix=["/no/such/container-runtime"])
    assert outcome.status == "placeholder" and outcome.reward == 0.0


def test_a_crashed_harness_is_scored(tmp_path: Path) -> None:
    outcome, _ = run(tmp_path, "open('done.txt', 'w').close()\nraise SystemExit(7)")
    assert (
        outcome.status == "scored"
        and outcome.reward == 1.0
        and outcome.detail["harness"]["code"] == 7
    )


def test_what_left_its_group_is_ended_before_the_workspace_is_scored(tmp_path: Path) -> None:
    program = """
import subprocess, sys
later = "import time; time.sleep(1.5); open('done.txt', 'w').close()"
left = subprocess.Popen(["setsid", "--fork", sys.executable, "-c", later])
left.wait()
"""
    outcome, root = run(tmp_path, program, timeout_s=20.0)
    assert outcome.detail["harness"]["ended_by"] == "exit" and outcome.reward == 0.0
    time.sleep(2.0)
    assert not (root / "work" / "done.txt").exists(), "a process went on writing after scoring"


def test_braces_of_json_and_shells_reach_the_harness(tmp_path: Path) -> None:
    program = "import json, sys\njson.dump(sys.argv[1:], open('words.json', 'w'))"
    words = """--settings '{"a": {"b": 1}}' '${HOME}' --in={workspace} {{prompt}}"""
    command = f"{sys.executable} {tmp_path / 'harness.py'} {words}"
    prefix = ["env", "WORK={workspace}", "X=${HOME}"]
    outcome, root = run(tmp_path, program, command=command, container_prefix=prefix)
    assert outcome.status == "scored"
    assert json.loads((root / "work" / "words.json").read_text()) == [
        "--settings",
        '{"a": {"b": 1}}',
        "${HOME}",
        f"--in={root / 'work'}",
        "{prompt}",
    ]


def test_the_container_prefix_is_filled_in(tmp_path: Path) -> None:
    program = "import os\nopen('seen', 'w').write(os.environ['WORK'] + os.environ['X'])"
    prefix = ["env", "WORK={workspace}", "X=${HOME}"]
    _, root = run(tmp_path, program, container_prefix=prefix)
    assert (root / "work" / "seen").read_text() == f"{root / 'work'}${{HOME}}"


OWN = """
import asyncio
from gyre_megatron.harness import Finished, run_program

async def writes(request):
    await asyncio.sleep(0)
    (request.workspace / "done.txt").write_text(
        f"{request.prompt}|{request.base_url}|{bool(request.key)}|{request.model}"
    )

async def wraps(request):
    return await run_program(("touch", "done.txt"), request.workspace, request.environment,
                             request.limits)

async def raises(request):
    raise KeyError("no such thing")

async def sleeps(request):
    await asyncio.sleep(60)

async def times_out_by_itself(request):
    raise TimeoutError("the service is slow")
"""


@pytest.mark.parametrize(
    ("name", "reward", "code", "ended_by", "said"),
    [
        ("writes", 1.0, 0, "exit", ""),
        ("wraps", 1.0, 0, "exit", ""),
        ("raises", 0.0, 1, "exit", "KeyError: 'no such thing'"),
        ("sleeps", 0.0, 1, "timeout", ""),
        ("times_out_by_itself", 0.0, 1, "exit", "TimeoutError: the service is slow"),
    ],
)
def test_a_harness_of_ones_own(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    reward: float,
    code: int,
    ended_by: str,
    said: str,
) -> None:
    monkeypatch.setattr(harnesses, "_GRACE_S", 0.1)
    (tmp_path / "own.py").write_text(OWN)
    timeout_s = 1.0 if name == "sleeps" else 20.0
    kind = f"{tmp_path / 'own.py'}:{name}"
    outcome, root = run(tmp_path, "", kind=kind, command=None, timeout_s=timeout_s)
    assert (outcome.status, outcome.reward) == ("scored", reward)
    harness = outcome.detail["harness"]
    assert (harness["code"], harness["ended_by"]) == (code, ended_by)
    assert said in (root / "stderr.log").read_text()
    if name == "writes":
        written = (root / "work" / "done.txt").read_text()
        assert written == "do 'it' $HOME\nnow|http://127.0.0.1:1|True|gyre"


def test_the_contract_of_harnesses_is_pinned() -> None:
    assert harnesses.HARNESSES.key == "rollout.harness.kind"
    assert harnesses.HARNESSES.parameters == ("request",)
    assert list(harnesses.HARNESSES.builtin) == ["command"]
    harnesses.load_harness("command")
    assert {field.name for field in fields(harnesses.HarnessRequest)} >= {
        "base_url",
        "key",
        "model",
        "prompt",
        "workspace",
        "timeout_s",
    }
    with pytest.raises(ConfigError, match=r"cannot be called as \(request\)"):
        harnesses.load_harness("asyncio:wait_for")


def test_an_evaluator_that_never_returns_holds_up_nobody(tmp_path: Path) -> None:
    program = f"""
import asyncio, os, pathlib, sys, tempfile
from gyre_megatron.harness import EvaluatorFailure, EvaluatorSpec, Task, evaluate

async def main():
    task = Task(name="t", prompt="p", directory=pathlib.Path({str(tmp_path)!r}),
                evaluator=EvaluatorSpec(kind="score.py:hangs"))
    work = pathlib.Path({str(tmp_path)!r})
    many = [evaluate(task, work, 0.5, {{}}) for _ in range(4 * os.cpu_count() + 8)]
    results = await asyncio.gather(*many, return_exceptions=True)
    assert all(isinstance(r, EvaluatorFailure) and "TimeoutError" in str(r) for r in results)
    assert await asyncio.to_thread(lambda: 7) == 7, "the shared pool is full"

asyncio.run(main())
print("ended")
"""
    (tmp_path / "score.py").write_text("import time\ndef hangs(w, t):\n    time.sleep(3600)\n")
    ended = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60
    )
    assert (ended.returncode, ended.stdout) == (0, "ended\n"), ended.stderr


def test_orphans_of_a_crash_are_ended_and_others_are_not(tmp_path: Path) -> None:
    store = TrajectoryStore(tmp_path / "store.db")
    mine, other = store.add_group("g", {}, 2, 0)
    store.start_execution(mine)
    label = f"{store.path.resolve()}#"
    processes = [
        subprocess.Popen(["sleep", "60"], env={"GYRE_EXECUTION": label + execution})
        for execution in (mine, other)
    ]
    try:
        assert end_orphaned_harnesses(store) == 1
        assert processes[0].wait(5) == -9 and processes[1].poll() is None
    finally:
        for process in processes:
            process.kill()
            process.wait()
        store.close()
