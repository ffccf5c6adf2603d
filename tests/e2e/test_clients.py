"""Real, unmodified harnesses against the real proxy; the engine behind it follows a script.

Install them first: `bash tests/e2e/install_clients.sh`. Nothing is skipped: a harness that is
missing fails its test.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from gyre_megatron.trajectory.records import Call, Node
from tests.support.proxies import RunningProxy, running_proxy
from tests.support.replay import assert_replays, path_to
from tests.support.scripted_agents import SUB_RESULT, SUB_TASK, ScriptedAgent, scenario, tool_call
from tests.support.scripted_engine import ScriptedEngine

pytestmark = [pytest.mark.e2e, pytest.mark.clients]

CLIENTS = Path(__file__).with_name("clients")
CLAUDE = CLIENTS / "node_modules/@anthropic-ai/claude-code-linux-x64/claude"
CODEX = CLIENTS / "node_modules/.bin/codex"
MINI = CLIENTS / ".venv/bin/mini"


@dataclass
class Harness:
    """A proxy with a scripted model and a workspace for one harness."""

    proxy: RunningProxy
    engine: ScriptedEngine
    execution_id: str
    token: str
    home: Path
    work: Path

    async def run(self, *command: str | Path, **environment: str) -> str:
        """Run the harness to its end; returns its standard output."""
        if not Path(command[0]).exists():
            pytest.fail(f"{command[0]} is missing; run: bash tests/e2e/install_clients.sh")
        clean = {"PATH": os.environ["PATH"], "HOME": str(self.home), "TERM": "dumb", **environment}
        process = await asyncio.create_subprocess_exec(
            *map(str, command),
            cwd=self.work,
            env=clean,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        try:
            output, errors = await asyncio.wait_for(process.communicate(), 120)
        finally:
            if process.returncode is None:
                process.kill()
        assert process.returncode == 0, errors.decode()[-2000:] + output.decode()[-2000:]
        return output.decode()

    @property
    def calls(self) -> list[Call]:
        return self.proxy.store.calls(self.execution_id)

    def roles(self) -> Counter[str]:
        return Counter(call.role for call in self.calls)

    def path(self, call: Call) -> list[Node]:
        nodes = {node.node_id: node for node in self.proxy.store.nodes(self.execution_id)}
        return path_to(nodes, call.node_id)

    def answers_on_path(self, call: Call) -> int:
        """How many answers of the policy the call builds on, its own included."""
        return sum(node.sampled for node in self.path(call))


def drive(
    folder: Path, answer: Callable[[str, str], str], body: Callable[[Harness], object]
) -> None:
    """Serve a scripted model, run `body`, check that every token replays."""

    async def main() -> None:
        agent = ScriptedAgent(answer)
        engine = await ScriptedEngine(agent, version=5, tokens_per_chunk=4).start()
        async with running_proxy(folder, [engine], context_length=200_000) as proxy:
            agent.renderer = proxy.renderer
            execution_id, token = proxy.start_execution()
            home, work = folder / "home", folder / "work"
            home.mkdir()
            work.mkdir()
            harness = Harness(proxy, engine, execution_id, token, home, work)
            await body(harness)
            assert_replays(proxy.store, execution_id, engine)
            assert all(call.state == "complete" for call in harness.calls)
            assert proxy.router.lost_calls == 0
        await engine.stop()

    asyncio.run(main())


def claude_settings(harness: Harness) -> dict[str, str]:
    """The variables Claude Code runs headless with."""
    return {
        "IS_SANDBOX": "1",
        "ANTHROPIC_BASE_URL": harness.proxy.url,
        "ANTHROPIC_AUTH_TOKEN": harness.token,
        "ANTHROPIC_MODEL": "gyre",
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        "DISABLE_TELEMETRY": "1",
        "DISABLE_AUTOUPDATER": "1",
    }


def test_claude_code_with_tools_sub_agent_and_compaction(tmp_path: Path) -> None:
    answer = scenario(
        main=[
            "I will write it.\n"
            + tool_call("Bash", command="echo hi > hello.txt", description="write"),
            tool_call(
                "Agent",
                description="sub",
                prompt=f"{SUB_TASK}: report",
                subagent_type="general-purpose",
            ),
            "waiting for the agent",
            "all done",
            tool_call("Bash", command="cat hello.txt", description="read"),
            "continued and done",
        ],
        sub=[tool_call("Bash", command="echo subwork", description="work"), SUB_RESULT],
        summary_mark="detailed summary",
        summary="<analysis>a</analysis>\n<summary>MAINTASK: hello.txt was written</summary>",
    )

    async def body(harness: Harness) -> None:
        settings = claude_settings(harness)
        options = ("--output-format", "json", "--dangerously-skip-permissions")
        first = json.loads(
            await harness.run(CLAUDE, "-p", "MAINTASK: write hello.txt", *options, **settings)
        )
        assert first["result"] == "all done"
        assert (harness.work / "hello.txt").read_text() == "hi\n"
        resume = ("--resume", first["session_id"], "-p")
        await harness.run(CLAUDE, *resume, "/compact", *options, **settings)
        last = json.loads(
            await harness.run(CLAUDE, *resume, "go on with MAINTASK", *options, **settings)
        )
        assert last["result"] == "continued and done"
        _check_claude(harness)

    drive(tmp_path, answer, body)


def _check_claude(harness: Harness) -> None:
    assert harness.roles() == {"main": 6, "sub_agent": 2, "main_summary": 1}
    by_role = {
        role: [call for call in harness.calls if call.role == role] for role in harness.roles()
    }
    before, after = by_role["main"][:4], by_role["main"][4:]
    assert [harness.answers_on_path(call) for call in before] == [1, 2, 3, 4]
    assert [harness.answers_on_path(call) for call in by_role["sub_agent"]] == [1, 2]
    # The compaction hangs from the main conversation; what follows starts anew from the summary.
    assert harness.answers_on_path(by_role["main_summary"][0]) >= 4
    assert [harness.answers_on_path(call) for call in after] == [1, 2]
    roots = {
        role: {harness.path(call)[0].node_id for call in calls} for role, calls in by_role.items()
    }
    assert roots["main"] == roots["main_summary"]
    assert roots["sub_agent"].isdisjoint(roots["main"])
    assert all(call.num_reused_tokens > 0.9 * call.num_prompt_tokens for call in before[1:])


def test_claude_code_compacts_by_itself_at_its_window(tmp_path: Path) -> None:
    answer = scenario(
        main=[
            *(tool_call("Bash", command="seq 1 1500", description="count") for _ in range(2)),
            "counted",
        ],
        summary_mark="detailed summary",
        summary="<analysis>a</analysis>\n<summary>MAINTASK: counting goes on</summary>",
    )

    async def body(harness: Harness) -> None:
        settings = claude_settings(harness) | {
            "CLAUDE_CODE_MAX_CONTEXT_TOKENS": "30000",
            "CLAUDE_CODE_AUTO_COMPACT_WINDOW": "30000",
            "CLAUDE_AUTOCOMPACT_PCT_OVERRIDE": "50",
        }
        command = (
            CLAUDE,
            "-p",
            "MAINTASK: count",
            "--output-format",
            "json",
            "--dangerously-skip-permissions",
        )
        small = ("--tools", "Bash", "--system-prompt", "You are brief.")
        assert json.loads(await harness.run(*command, *small, **settings))["result"] == "counted"
        # What the proxy reports as usage tells the harness when to compact; the summary hangs from
        # the long history.
        roles = [call.role for call in harness.calls]
        assert roles.count("main") == 3 and roles.count("main_summary") >= 1
        summary = next(call for call in harness.calls if call.role == "main_summary")
        assert summary.num_reused_tokens > 5_000 and harness.answers_on_path(summary) >= 2

    drive(tmp_path, answer, body)


def test_codex_with_tools_sub_agent_and_compaction(tmp_path: Path) -> None:
    answer = scenario(
        main=[
            tool_call("exec_command", cmd="echo hi > hello.txt"),
            tool_call("spawn_agent", message=f"{SUB_TASK}: report"),
            tool_call("exec_command", cmd="sleep 1; seq 1 6000"),
            "done after compaction",
            "and done again",
        ],
        sub=[SUB_RESULT],
        summary_mark="CHECKPOINT",
        summary="MAINTASK: hello.txt was written",
    )

    async def body(harness: Harness) -> None:
        config = harness.home / ".codex" / "config.toml"
        config.parent.mkdir()
        config.write_text(
            'model_provider = "gyre"\nmodel = "gyre"\nmodel_auto_compact_token_limit = 24000\n'
            f'[model_providers.gyre]\nname = "gyre"\nbase_url = "{harness.proxy.url}/v1"\n'
            'env_key = "GYRE_KEY"\nwire_api = "responses"\n'
        )
        flags = ("exec", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox")
        output = await harness.run(
            CODEX, *flags, "MAINTASK: write hello.txt", GYRE_KEY=harness.token
        )
        assert "done" in output
        assert (harness.work / "hello.txt").read_text() == "hi\n"
        roles = harness.roles()
        assert roles["sub_agent"] == 1 and roles["main_summary"] == 1 and roles["main"] >= 4, roles
        main = [call for call in harness.calls if call.role == "main"]
        assert [harness.answers_on_path(call) for call in main[:3]] == [1, 2, 3]
        summary = next(call for call in harness.calls if call.role == "main_summary")
        # Offered no tools, it has another head; the answers in it are copied from the store, not
        # encoded again.
        assert harness.answers_on_path(summary) == 1
        assert harness.answers_on_path(main[3]) == 1

    drive(tmp_path, answer, body)


def test_mini_swe_agent(tmp_path: Path) -> None:
    answer = scenario(
        main=[
            "First I write.\n" + tool_call("bash", command="echo hi > hello.txt"),
            tool_call("bash", command="cat hello.txt"),
            tool_call("bash", command="echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"),
        ],
        summary_mark="",
        summary="",
    )

    async def body(harness: Harness) -> None:
        settings = {
            "OPENAI_API_KEY": harness.token,
            "OPENAI_BASE_URL": f"{harness.proxy.url}/v1",
            "OPENAI_API_BASE": f"{harness.proxy.url}/v1",
            "MSWEA_CONFIGURED": "true",
            "MSWEA_COST_TRACKING": "ignore_errors",
            "LITELLM_LOCAL_MODEL_COST_MAP": "True",
        }
        command = (
            MINI,
            "-m",
            "openai/gyre",
            "-t",
            "MAINTASK: write hello.txt",
            "-y",
            "--exit-immediately",
        )
        await harness.run(*command, "-o", harness.home / "trajectory.json", **settings)
        assert (harness.work / "hello.txt").read_text() == "hi\n"
        assert harness.roles() == {"main": 3}
        assert [harness.answers_on_path(call) for call in harness.calls] == [1, 2, 3]

    drive(tmp_path, answer, body)
