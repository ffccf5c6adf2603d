"""Hang-ups, repeated requests, engines that fail for good, memory: what a call leaves behind."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path

import httpx
import numpy as np
import pytest

from gyre_megatron.config.rollout import (
    ProcessorConfig,
    ProxyConfig,
    RolloutConfig,
    RouterConfig,
    SamplingConfig,
)
from gyre_megatron.proxy.sessions import Sessions
from gyre_megatron.trajectory.processor import process_group
from gyre_megatron.trajectory.records import Outcome
from tests.support.proxies import RunningProxy, running_proxy
from tests.support.scripted_engine import ScriptedEngine, chain_policy
from tests.support.trees import TreeBuilder, open_store

MESSAGES = [{"role": "user", "content": "hello"}]
CONFIG = RolloutConfig(
    router=RouterConfig(max_attempts=3, backoff_s=0.01, drain_grace_s=0.2),
    proxy=ProxyConfig(ping_interval_s=0.02),
)


def drive(
    folder: Path,
    body: Callable[[RunningProxy, ScriptedEngine], Awaitable[None]],
    delay_s: float = 0.0,
    config: RolloutConfig = CONFIG,
) -> None:
    async def main() -> None:
        engine = await ScriptedEngine(chain_policy(), version=1, token_delay_s=delay_s).start()
        async with running_proxy(folder, [engine], config=config) as proxy:
            await body(proxy, engine)
        await engine.stop()

    asyncio.run(main())


def prompt_length(proxy: RunningProxy) -> int:
    """Tokens of the generation prompt: the context part of every answer's node."""
    return len(proxy.renderer.tokens.encode(proxy.renderer.template.generation_prompt("user")))


async def ask(
    proxy: RunningProxy, token: str, messages: list, headers: dict | None = None, **fields: object
) -> dict:
    async with httpx.AsyncClient(timeout=30) as client:
        body = {"model": "m", "max_tokens": 6, "messages": messages, **fields}
        response = await client.post(
            f"{proxy.url}/v1/messages", json=body, headers={"x-api-key": token, **(headers or {})}
        )
        assert response.status_code == 200, response.text
        return response.json()


async def hang_up(proxy: RunningProxy, engine: ScriptedEngine, token: str, stream: bool) -> None:
    """Ask for a long answer and leave in the middle of it."""
    body = {"model": "m", "max_tokens": 500, "messages": MESSAGES, "stream": stream}
    async with httpx.AsyncClient() as client:
        post = asyncio.create_task(
            client.post(f"{proxy.url}/v1/messages", json=body, headers={"x-api-key": token})
        )
        while not engine.outputs or len(engine.outputs[0]) < 10:
            await asyncio.sleep(0.01)
        post.cancel()
        await asyncio.wait({post})
    for _ in range(500):
        if proxy.router.num_inflight() == 0 and proxy.store.calls_by_role():
            break
        await asyncio.sleep(0.02)


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_the_temperature_that_was_used_is_recorded(tmp_path: Path, temperature: float) -> None:
    """A greedy call recorded as one of temperature 1 would train on log-probabilities that it does
    not have."""
    honours = CONFIG.model_copy(update={"sampling": SamplingConfig(temperature=None)})

    async def body(proxy: RunningProxy, engine: ScriptedEngine) -> None:
        execution_id, token = proxy.start_execution()
        await ask(proxy, token, MESSAGES, temperature=temperature)
        answers = [node for node in proxy.store.nodes(execution_id) if node.call_id]
        assert [node.temperature for node in answers] == [temperature]

    drive(tmp_path, body, config=honours)


@pytest.mark.parametrize("stream", [False, True])
def test_a_harness_that_hangs_up(tmp_path: Path, stream: bool) -> None:
    async def body(proxy: RunningProxy, engine: ScriptedEngine) -> None:
        execution_id, token = proxy.start_execution()
        await hang_up(proxy, engine, token, stream)
        assert proxy.router.num_inflight() == 0, "the engine was not told to stop"
        assert len(engine.outputs[0]) < 100
        (call,) = proxy.store.calls(execution_id)
        assert call.state == "undelivered" and 0 < call.num_output_tokens < 100
        answer = await ask(proxy, token, MESSAGES)
        more = [
            *MESSAGES,
            {"role": "assistant", "content": answer["content"]},
            {"role": "user", "content": "on"},
        ]
        await ask(proxy, token, more)
        proxy.store.finish_execution(execution_id, Outcome("scored", 1.0))
        group = process_group(proxy.store, "g", ProcessorConfig())
        assert group.trees[0].num_trained_tokens == 12
        assert group.conservation.dropped == call.num_output_tokens + prompt_length(proxy)

    drive(tmp_path, body, delay_s=0.01)


def test_a_repeated_request_supersedes_the_answer_nobody_built_on(tmp_path: Path) -> None:
    async def body(proxy: RunningProxy, engine: ScriptedEngine) -> None:
        execution_id, token = proxy.start_execution()
        first = await ask(proxy, token, MESSAGES)
        used = [
            *MESSAGES,
            {"role": "assistant", "content": first["content"]},
            {"role": "user", "content": "on"},
        ]
        await ask(proxy, token, used)
        await ask(proxy, token, used, {"x-stainless-retry-count": "1"})
        states = [call.state for call in proxy.store.calls(execution_id)]
        assert states == ["complete", "superseded", "complete"]
        await ask(
            proxy, token, MESSAGES
        )  # the same prompt without the mark of a retry: both answers count
        assert [call.state for call in proxy.store.calls(execution_id)] == [*states, "complete"]

    drive(tmp_path, body)


@pytest.mark.parametrize("stream", [False, True])
def test_failures_are_bounded_and_told(tmp_path: Path, stream: bool) -> None:
    async def body(proxy: RunningProxy, engine: ScriptedEngine) -> None:
        execution_id, token = proxy.start_execution()
        await engine.stop()
        request = {"model": "m", "max_tokens": 6, "messages": MESSAGES, "stream": stream}
        async with httpx.AsyncClient(timeout=30) as client:
            response = await client.post(
                f"{proxy.url}/v1/messages", json=request, headers={"x-api-key": token}
            )
        assert "given up after 3 engine failures" in response.text
        assert response.status_code == (200 if stream else 529)
        assert proxy.router.lost_calls == 1 and proxy.store.calls(execution_id) == []

    drive(tmp_path, body)


@pytest.mark.parametrize("stream", [False, True])
def test_a_call_takes_no_longer_than_allowed(tmp_path: Path, stream: bool) -> None:
    async def main() -> None:
        config = RolloutConfig(proxy=ProxyConfig(call_timeout_s=0.3))
        async with running_proxy(tmp_path, [], config=config) as proxy:  # nobody will ever serve
            _, token = proxy.start_execution()
            request = {"model": "m", "max_tokens": 6, "messages": MESSAGES, "stream": stream}
            async with httpx.AsyncClient(timeout=30) as client:
                response = await client.post(
                    f"{proxy.url}/v1/messages", json=request, headers={"x-api-key": token}
                )
            assert "within 0.3 s" in response.text and response.status_code == (
                200 if stream else 529
            )

    asyncio.run(main())


def test_calls_wait_while_nobody_serves(tmp_path: Path) -> None:
    async def body(proxy: RunningProxy, engine: ScriptedEngine) -> None:
        _, token = proxy.start_execution()
        await proxy.router.drain(0)
        waiting = asyncio.create_task(ask(proxy, token, MESSAGES))
        await asyncio.sleep(0.2)
        assert not waiting.done() and engine.prompts == []
        proxy.router.set_serving(0, True)
        assert (await waiting)["usage"]["output_tokens"] == 6 and proxy.router.lost_calls == 0

    drive(tmp_path, body)


def test_an_engine_that_ignores_aborts_is_left_after_the_grace(tmp_path: Path) -> None:
    async def body(proxy: RunningProxy, engine: ScriptedEngine) -> None:
        deaf = await ScriptedEngine(chain_policy(), version=2, token_delay_s=30.0).start()
        proxy.router.add_engine(1, deaf.url, 16)
        proxy.router.set_serving(0, False)
        _, token = proxy.start_execution()
        call = asyncio.create_task(ask(proxy, token, MESSAGES))
        while proxy.router.num_inflight(1) == 0:
            await asyncio.sleep(0.01)
        proxy.router.set_serving(0, True)
        assert await asyncio.wait_for(proxy.router.drain(1), 5) == 1
        assert (await call)["usage"]["output_tokens"] == 6
        await deaf.stop()

    drive(tmp_path, body)


def test_long_text_does_not_hold_up_other_calls(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def body(proxy: RunningProxy, engine: ScriptedEngine) -> None:
        renderer, gate = proxy.renderer, threading.Event()
        renderer.context_length = 10_000_000
        encode = renderer.tokens.encode

        def slow_encode(text: str) -> np.ndarray:
            assert len(text) < 100_000 or gate.wait(30)
            return encode(text)

        monkeypatch.setattr(renderer.tokens, "encode", slow_encode)
        execution_id, token = proxy.start_execution()
        _, other = proxy.start_execution("other")
        long = [{"role": "user", "content": "def area(width): return width\n" * 8_000}, *MESSAGES]
        slow = asyncio.create_task(ask(proxy, token, long))
        await asyncio.sleep(0.1)
        for _ in range(3):
            await ask(proxy, other, MESSAGES)
        assert not slow.done()
        gate.set()
        answer = await slow
        assert (
            engine.prompts[-1][: -prompt_length(proxy)]
            == encode(renderer.template.render(long)).tolist()
        )
        more = [
            *long,
            {"role": "assistant", "content": answer["content"]},
            {"role": "user", "content": "on"},
        ]
        await ask(proxy, token, more)
        assert proxy.store.calls(execution_id)[1].num_reused_tokens > 50_000

    drive(tmp_path, body)


def test_prefills_are_part_of_the_answer(tmp_path: Path) -> None:
    async def body(proxy: RunningProxy, engine: ScriptedEngine) -> None:
        execution_id, token = proxy.start_execution()
        begun = [*MESSAGES, {"role": "assistant", "content": "I begin"}]
        answer = await ask(proxy, token, begun)
        text = "I begin" + answer["content"][0]["text"]
        whole = [
            *MESSAGES,
            {"role": "assistant", "content": text},
            {"role": "user", "content": "on"},
        ]
        await ask(proxy, token, whole)
        assert (
            engine.prompts[1][: len(engine.prompts[0]) + 6] == engine.prompts[0] + engine.outputs[0]
        )
        assert proxy.renderer.tokens.decode(engine.prompts[0]).endswith("assistant\nI begin")
        assert [
            node.num_context > prompt_length(proxy)
            for node in proxy.store.nodes(execution_id)
            if node.sampled
        ] == [True, False]

    drive(tmp_path, body)


def test_forests_beyond_the_budget_are_read_again(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    ids = store.add_group("g", {}, 3, 0)
    builders = [TreeBuilder(store, execution_id) for execution_id in ids]
    for builder in builders:
        builder.call(builder.context(None, 1000), 10)
    sessions = Sessions(store, budget_mib=1)
    sessions._budget = 6000  # one forest of 1,012 tokens
    kept = []
    for execution_id in ids:
        with sessions.use(execution_id, 1) as session:
            assert session.forest.num_tokens == 1012
            kept.append(session)
    with sessions.use(ids[0], 1) as again, sessions.use(ids[2], 1) as same:
        assert again is not kept[0] and same is kept[2]
        assert again.forest.num_tokens == 1012
    store.close()


def test_thousands_of_executions_and_a_long_one(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    for group in range(40):
        for execution_id in store.add_group(f"g{group}", {}, 50, 0):
            store.start_execution(execution_id)
    assert store.counters() == (2000, 2000, 0) and len(store.executions(states=["running"])) == 2000
    builder = TreeBuilder(store, store.add_group("long", {}, 1, 0)[0])
    node = None
    for _ in range(400):
        node = builder.call(builder.context(node, 5000), 100)
    assert store.sizes(builder.execution_id) == (400, 800, 400 * 5102, 40_000)
    builder.finish(1.0)
    tree = process_group(store, "long", ProcessorConfig()).trees[0]
    assert tree.num_trained_tokens == 40_000 and len(tree.nodes) == 800
    store.close()
