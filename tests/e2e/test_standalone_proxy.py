"""`gyre proxy`: the proxy alone, as a program, used through nothing but the lines that it prints."""

from __future__ import annotations

import asyncio
import os
import shlex
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from gyre_megatron.config.rollout import ProxyConfig
from gyre_megatron.proxy.standalone import Recording, serve
from gyre_megatron.text.renderer import Renderer
from gyre_megatron.trajectory.store import TrajectoryStore
from tests.support.checkpoints import make_checkpoint
from tests.support.scripted_agents import ScriptedAgent, tool_call
from tests.support.scripted_engine import ScriptedEngine

CLIENTS = Path(__file__).with_name("clients")
CLAUDE = CLIENTS / "node_modules/@anthropic-ai/claude-code-linux-x64"
CODEX = CLIENTS / "node_modules/.bin"

SDKS = """
import anthropic, openai, os
claude = anthropic.Anthropic(api_key=None)
said = claude.messages.create(model=os.environ["ANTHROPIC_MODEL"], max_tokens=5,
                              messages=[{"role": "user", "content": "hello"}])
assert said.usage.output_tokens == 5
client = openai.OpenAI()
assert client.models.list().data[0].id == "tiny"
chat = client.chat.completions.create(model="tiny", max_completion_tokens=6,
                                      messages=[{"role": "user", "content": "hello"}])
assert chat.usage.completion_tokens == 6
assert client.responses.create(model="tiny", input="hello", max_output_tokens=7).usage.output_tokens == 7
print("all three answered", os.environ["CLAUDE_CODE_MAX_CONTEXT_TOKENS"])
"""


@pytest.fixture
def engine_url() -> Iterator[str]:
    command = [sys.executable, "-m", "tests.support.scripted_engine", "--version", "3"]
    engine = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert engine.stdout is not None
    yield engine.stdout.readline().strip()
    engine.kill()
    engine.wait()


def start(folder: Path, engine_url: str, *words: str) -> subprocess.Popen[str]:
    checkpoint = make_checkpoint(folder / "model", context_length=4096)
    command = [sys.executable, "-m", "gyre_megatron", "proxy", "--engine", engine_url]
    command += ["--store", str(folder / "calls.db"), "--model", str(checkpoint), "--port", "0"]
    return subprocess.Popen(
        [*command, *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def printed(process: subprocess.Popen[str]) -> str:
    """What it prints until the last export."""
    lines: list[str] = []
    assert process.stdout is not None
    for line in process.stdout:
        lines.append(line)
        if line.startswith("export OPENAI_BASE_URL"):
            return "".join(lines)
    raise AssertionError("".join(lines) + (process.stderr.read() if process.stderr else ""))


def test_what_it_prints_is_all_that_clients_need(tmp_path: Path, engine_url: str) -> None:
    process = start(tmp_path, engine_url, "--model-name", "tiny")
    try:
        exports = printed(process)
        script = f"{exports}\n{shlex.quote(sys.executable)} -c {shlex.quote(SDKS)}"
        used = subprocess.run(
            ["bash", "-eu", "-c", script],
            env={"PATH": os.environ["PATH"], "HOME": str(tmp_path)},
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert used.stdout == "all three answered 4096\n", used.stderr
        process.send_signal(signal.SIGTERM)
        rest, errors = process.communicate(timeout=30)
        assert (process.returncode, errors) == (0, "") and "gyre trajectory list" in rest
    finally:
        process.kill()
        process.wait()
    with TrajectoryStore(tmp_path / "calls.db", read_only=True) as store:
        (execution,) = store.executions()
        assert execution.state == "finished" and execution.outcome.status == "excluded"
        assert execution.execution_id in exports
        calls = store.calls(execution.execution_id)
        assert [(c.dialect, c.num_output_tokens) for c in calls] == [
            ("anthropic", 5),
            ("chat", 6),
            ("responses", 7),
        ]
        versions = {v for n in store.nodes(execution.execution_id) for v, _ in n.versions}
        assert versions == {3}


def test_a_second_run_records_beside_the_first(tmp_path: Path, engine_url: str) -> None:
    for _ in range(2):
        process = start(tmp_path, engine_url)
        printed(process)
        process.send_signal(signal.SIGINT)
        assert process.wait(30) == 0
    with TrajectoryStore(tmp_path / "calls.db", read_only=True) as store:
        assert len(store.executions()) == 2


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--engine", "http://127.0.0.1:9"], "no engine answers at http://127.0.0.1:9/health"),
        (["--model", "/no/such/model"], "/no/such/model"),
        (["--store", "/no/such/folder/calls.db"], "/no/such/folder"),
        (["--set", "rollout.proxy.dialects=[nope]"], "unknown name 'nope'"),
        (["--set", "rollout.proxy.nope=1"], "nope"),
        (["--set", "nonsense"], "section.key=value"),
        (["--port", "TAKEN"], "set --port to a free port"),
    ],
)
def test_mistakes_are_one_line(
    tmp_path: Path, engine_url: str, words: list[str], message: str
) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        process = start(tmp_path, engine_url, *(port if w == "TAKEN" else w for w in words))
        output, errors = process.communicate(timeout=60)
    assert process.returncode in (1, 2) and output == ""
    assert message in errors and errors.startswith("error: ") and errors.count("\n") == 1
    assert not (tmp_path / "calls.db").exists()


def record(
    folder: Path, answer: Callable[[str, str], str], script: Callable[[Recording], str], path: Path
) -> str:
    """Serve a scripted model in this process and run a shell script that got the exports."""

    async def main() -> str:
        checkpoint = make_checkpoint(folder / "model", context_length=200_000)
        agent = ScriptedAgent(answer)
        agent.renderer = Renderer.from_checkpoint(checkpoint, ProxyConfig())
        engine = await ScriptedEngine(agent, tokens_per_chunk=4).start()
        ready: asyncio.Future[Recording] = asyncio.get_running_loop().create_future()
        serving = asyncio.create_task(
            serve([engine.url], folder / "calls.db", checkpoint, port=0, on_ready=ready.set_result)
        )
        await asyncio.wait({ready, serving}, return_when=asyncio.FIRST_COMPLETED)
        recording = await ready
        program = await asyncio.create_subprocess_exec(
            *("bash", "-eu", "-c", "\n".join([*recording.exports(), script(recording)])),
            cwd=folder,
            env={"PATH": f"{path}:{os.environ['PATH']}", "HOME": str(folder), "IS_SANDBOX": "1"},
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        try:
            output, errors = await asyncio.wait_for(program.communicate(), 120)
        finally:
            if program.returncode is None:
                program.kill()
        assert program.returncode == 0, errors.decode()[-3000:] + output.decode()[-3000:]
        serving.cancel()
        await asyncio.wait({serving})
        await engine.stop()
        return output.decode()

    return asyncio.run(main())


@pytest.mark.clients
@pytest.mark.e2e
def test_claude_code_by_the_printed_lines(tmp_path: Path) -> None:
    def answer(text: str, last: str) -> str:
        return (
            "all done"
            if "<tool_response>" in last
            else "I write.\n"
            + tool_call("Bash", command="echo hi > hello.txt", description="write")
        )

    command = "claude -p 'write it' --dangerously-skip-permissions"
    said = record(tmp_path, answer, lambda recording: command, CLAUDE)
    assert "all done" in said and (tmp_path / "hello.txt").read_text() == "hi\n"
    with TrajectoryStore(tmp_path / "calls.db", read_only=True) as store:
        (execution,) = store.executions()
        assert len(store.calls(execution.execution_id)) >= 2


@pytest.mark.clients
@pytest.mark.e2e
def test_codex_by_the_printed_lines(tmp_path: Path) -> None:
    def answer(text: str, last: str) -> str:
        return (
            "all done"
            if "<tool_response>" in last
            else "I write.\n" + tool_call("exec_command", cmd="echo hi > hello.txt")
        )

    def script(recording: Recording) -> str:
        (line,) = [line for line in recording.exports() if line.startswith("# codex ")]
        words = "exec --skip-git-repo-check --dangerously-bypass-approvals-and-sandbox 'write it'"
        return f"{line.removeprefix('# ')} {words}"

    said = record(tmp_path, answer, script, CODEX)
    assert "all done" in said and (tmp_path / "hello.txt").read_text() == "hi\n"
