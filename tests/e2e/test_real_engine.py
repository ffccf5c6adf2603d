"""Claude Code and the SDKs against a real SGLang server with random weights: whatever it samples
must be served."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
from collections.abc import Iterator
from pathlib import Path

import anthropic
import httpx
import numpy as np
import pytest

from examples.tiny_model.checkpoint import ensure_checkpoint
from gyre_megatron.config.cluster import EngineConfig
from gyre_megatron.config.model import TinyModelConfig
from gyre_megatron.config.rollout import ProxyConfig, RolloutConfig, SamplingConfig
from gyre_megatron.engines.server import ServerSpec, SglangServer
from tests.e2e.test_clients import CLAUDE
from tests.support.proxies import RunningProxy, running_proxy
from tests.support.replay import path_to

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(400)]

CONTEXT = 16_384
CONFIG = RolloutConfig(sampling=SamplingConfig(max_new_tokens=24))


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SglangServer]:
    folder = tmp_path_factory.mktemp("engine")
    checkpoint = ensure_checkpoint(
        TinyModelConfig(max_position_embeddings=CONTEXT, vocab_size=2048), folder / "model"
    )
    engine = EngineConfig(
        dtype="float32",
        num_threads=2,
        context_length=CONTEXT,
        max_total_tokens=2 * CONTEXT,
        extra_args=["--chunked-prefill-size", "8192", "--incremental-streaming-output"],
    )
    server = SglangServer(ServerSpec(checkpoint, 1, "cpu", "127.0.0.1", 0, folder / "log"), engine)
    server.start()
    try:
        server.wait_until_ready()
        yield server
    finally:
        server.stop()


def recorded(proxy: RunningProxy, execution_id: str) -> list[tuple[list[int], int, list[float]]]:
    """(ids of the path, where sampling began, recorded log-probabilities) of each call."""
    nodes = {node.node_id: node for node in proxy.store.nodes(execution_id)}
    found = []
    for call in proxy.store.calls(execution_id):
        path = path_to(nodes, call.node_id)
        ids = np.concatenate([n.token_ids for n in path]).tolist()
        found.append((ids, call.num_prompt_tokens, path[-1].logprobs.tolist()))
    return found


def rescored(server: SglangServer, ids: list[int], start: int) -> list[float]:
    """What the engine itself says about the recorded ids, fed as a prompt."""
    body = {
        "input_ids": ids,
        "sampling_params": {"max_new_tokens": 1, "temperature": 1.0},
        "return_logprob": True,
        "logprob_start_len": start - 1,
    }
    answer = httpx.post(f"{server.url}/generate", json=body, timeout=120).json()
    return [entry[0] for entry in answer["meta_info"]["input_token_logprobs"][1:]]


def test_many_turns_of_random_weights_replay(server: SglangServer, tmp_path: Path) -> None:
    async def main() -> None:
        async with running_proxy(
            tmp_path, [server], config=CONFIG, checkpoint=server.spec.checkpoint
        ) as proxy:
            execution_id, token = proxy.start_execution()
            client = anthropic.AsyncAnthropic(base_url=proxy.url, auth_token=token, api_key=None)
            messages: list = [{"role": "user", "content": "begin"}]
            for turn in range(8):
                common = {"model": "m", "max_tokens": 1 + 3 * turn, "messages": messages}
                if turn % 2:
                    answer = await client.messages.create(**common)
                else:
                    async with client.messages.stream(**common) as stream:
                        answer = await stream.get_final_message()
                messages += [
                    {"role": "assistant", "content": [b.model_dump() for b in answer.content]}
                ]
                messages += [{"role": "user", "content": f"turn {turn}"}]
            calls = proxy.store.calls(execution_id)
            assert all(call.num_reused_tokens > 0 for call in calls[1:])
            # Each prompt is the last one with its answer and what is new: nothing was rendered or
            # encoded again.
            paths = recorded(proxy, execution_id)
            for (before, _, _), (ids, start, _) in itertools.pairwise(paths):
                assert ids[: len(before)] == before and start > len(before)
            for ids, start, logprobs in paths:
                assert rescored(server, ids, start) == pytest.approx(logprobs, abs=2e-4)

    asyncio.run(main())


def test_a_prompt_the_engine_cannot_hold_is_an_overflow(
    server: SglangServer, tmp_path: Path
) -> None:
    async def main() -> None:
        config = RolloutConfig(proxy=ProxyConfig(context_length=10 * CONTEXT))
        async with running_proxy(
            tmp_path, [server], config=config, checkpoint=server.spec.checkpoint
        ) as proxy:
            _, token = proxy.start_execution()
            client = anthropic.AsyncAnthropic(
                base_url=proxy.url, auth_token=token, api_key=None, max_retries=0
            )
            common = {
                "model": "m",
                "max_tokens": 4,
                "messages": [{"role": "user", "content": "0 " * 2 * CONTEXT}],
            }
            with pytest.raises(anthropic.BadRequestError, match="prompt is too long"):
                await client.messages.create(**common)
            with pytest.raises(anthropic.APIStatusError, match="prompt is too long"):
                async with client.messages.stream(**common) as stream:
                    await stream.get_final_message()

    asyncio.run(main())


@pytest.mark.clients
def test_claude_code_on_a_real_engine(server: SglangServer, tmp_path: Path) -> None:
    if not CLAUDE.exists():
        pytest.fail(f"{CLAUDE} is missing; run: bash tests/e2e/install_clients.sh")

    async def main() -> None:
        async with running_proxy(
            tmp_path, [server], config=CONFIG, checkpoint=server.spec.checkpoint
        ) as proxy:
            execution_id, token = proxy.start_execution()
            for name in ("home", "work"):
                (tmp_path / name).mkdir()
            environment = {
                "PATH": os.environ["PATH"],
                "HOME": str(tmp_path / "home"),
                "TERM": "dumb",
                "IS_SANDBOX": "1",
                "ANTHROPIC_BASE_URL": proxy.url,
                "ANTHROPIC_AUTH_TOKEN": token,
                "ANTHROPIC_MODEL": "gyre",
                "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
                "DISABLE_TELEMETRY": "1",
                "DISABLE_AUTOUPDATER": "1",
            }
            command = (
                CLAUDE,
                "-p",
                "say something",
                "--output-format",
                "json",
                "--dangerously-skip-permissions",
            )
            command += (
                "--tools",
                "Bash",
                "--system-prompt",
                "You are brief.",
            )  # a prompt that a CPU can prefill
            process = await asyncio.create_subprocess_exec(
                *map(str, command),
                "--max-turns",
                "3",
                cwd=tmp_path / "work",
                env=environment,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
            )
            output, _ = await asyncio.wait_for(process.communicate(), 300)
            result = json.loads(output)
            assert result["type"] == "result" and "session_id" in result
            calls = proxy.store.calls(execution_id)
            assert calls and {call.role for call in calls} <= {"main", "auxiliary"}
            assert all(call.state == "complete" for call in calls) and proxy.router.lost_calls == 0
            ids, start, logprobs = recorded(proxy, execution_id)[0]
            assert start > 1_000
            assert rescored(server, ids, start) == pytest.approx(logprobs, abs=2e-4)

    asyncio.run(main())
