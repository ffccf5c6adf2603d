"""Engines taken away in mid-answer, by the scheduler or by signal 9: harnesses notice nothing,
records stay exact."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import numpy as np
import orjson
import pytest

from gyre_megatron.config.rollout import ProxyConfig, RolloutConfig, RouterConfig
from tests.support.engine_processes import EngineProcess
from tests.support.proxies import RunningProxy, running_proxy
from tests.support.replay import path_to
from tests.support.scripted_engine import chain_policy, logprob_of

pytestmark = pytest.mark.e2e

NUM_SWITCHES = 200
NUM_EXECUTIONS = 16
TOKENS_PER_CALL = 48
POLICY = chain_policy()


@asynccontextmanager
async def cluster(
    folder: Path, num_engines: int
) -> AsyncIterator[tuple[RunningProxy, list[EngineProcess]]]:
    engines = [
        EngineProcess(version=10 + index, token_delay_s=0.004) for index in range(num_engines)
    ]
    try:
        for engine in engines:
            engine.start()
        for engine in engines:
            engine.wait_ready()
        config = RolloutConfig(
            router=RouterConfig(backoff_s=0.02, max_attempts=1000),
            proxy=ProxyConfig(ping_interval_s=0.05),
        )
        async with running_proxy(folder, [], config=config, context_length=32_768) as proxy:
            for cell_id, engine in enumerate(engines):
                proxy.router.add_engine(cell_id, engine.url, capacity=8)
            yield proxy, engines
    finally:
        for engine in engines:
            engine.kill()


async def stream_call(
    client: httpx.AsyncClient, url: str, token: str, messages: list[dict]
) -> tuple[str, int]:
    """One streamed answer: its text as a harness puts it together, and how often its stream was
    opened."""
    body = {"model": "m", "max_tokens": TOKENS_PER_CALL, "messages": messages, "stream": True}
    text, starts, stopped = "", 0, False
    async with client.stream(
        "POST", f"{url}/v1/messages", json=body, headers={"x-api-key": token}
    ) as response:
        assert response.status_code == 200
        async for line in response.aiter_lines():
            if not line.startswith("data:"):
                continue
            event = orjson.loads(line[5:])
            assert event["type"] != "error", event
            starts += event["type"] == "message_start"
            stopped |= event["type"] == "message_stop"
            if event["type"] == "content_block_delta":
                text += event["delta"]["text"]
    assert stopped
    return text, starts


async def converse(proxy: RunningProxy, group: str, stop: asyncio.Event) -> str:
    """Calls in a row until told to stop, each echoing the answers before it."""
    execution_id, token = proxy.start_execution(group)
    messages: list[dict] = [{"role": "user", "content": f"begin {group}"}]
    async with httpx.AsyncClient(timeout=120) as client:
        while not stop.is_set():
            text, starts = await stream_call(client, proxy.url, token, messages)
            assert starts == 1
            messages += [
                {"role": "assistant", "content": text},
                {"role": "user", "content": "go on"},
            ]
            check_last_call(proxy, execution_id, text)
    return execution_id


def check_last_call(proxy: RunningProxy, execution_id: str, text: str) -> None:
    """The recorded ids are the ones an undisturbed engine gives; each token has the log-probability
    of its engine."""
    nodes = {node.node_id: node for node in proxy.store.nodes(execution_id)}
    call = proxy.store.calls(execution_id)[-1]
    path = path_to(nodes, call.node_id)
    ids = np.concatenate([node.token_ids for node in path]).tolist()
    cut = call.num_prompt_tokens
    policy = iter(POLICY(ids[:cut]))
    assert ids[cut:] == [next(policy) for _ in range(TOKENS_PER_CALL)]
    assert text.strip() == proxy.renderer.tokens.decode(ids[cut:]).strip()
    versions = np.repeat(*zip(*path[-1].versions, strict=True)).tolist()
    expected = [
        logprob_of(cut + i, token, v)
        for i, (token, v) in enumerate(zip(ids[cut:], versions, strict=True))
    ]
    assert path[-1].logprobs.tolist() == expected


async def switch_around(
    proxy: RunningProxy, engines: list[EngineProcess], rng: random.Random
) -> dict[str, int]:
    """Drains, kills and outages of all cells at once, at random moments."""
    counts = {"drain": 0, "kill": 0, "outage": 0}
    for _ in range(NUM_SWITCHES):
        await asyncio.sleep(rng.uniform(0.0, 0.05))
        kind = rng.choices(["drain", "kill", "outage"], [0.85, 0.1, 0.05])[0]
        counts[kind] += 1
        cell_id = rng.randrange(len(engines))
        if kind == "drain":
            await proxy.router.drain(cell_id)
        elif kind == "kill":
            engines[cell_id].kill()
            engines[cell_id].start()
        else:
            await asyncio.gather(*(proxy.router.drain(cell) for cell in range(len(engines))))
            assert proxy.router.num_inflight() == 0
            await asyncio.sleep(0.1)
        for cell in range(len(engines)):
            proxy.router.set_serving(cell, True)
    return counts


def test_random_switches_go_unnoticed(tmp_path: Path) -> None:
    async def main() -> None:
        async with cluster(tmp_path, 3) as (proxy, engines):
            stop = asyncio.Event()
            talks = [
                asyncio.create_task(converse(proxy, f"g{i}", stop)) for i in range(NUM_EXECUTIONS)
            ]
            counts = await switch_around(proxy, engines, random.Random(7))
            stop.set()
            executions = await asyncio.gather(*talks)
            moved = sum(len(n.versions) > 1 for e in executions for n in proxy.store.nodes(e))
            calls = sum(len(proxy.store.calls(e)) for e in executions)
            print(
                f"switches {counts}, calls {calls}, answers of several engines {moved}, "
                f"{proxy.router.rerouted_calls=}"
            )
            assert sum(counts.values()) == NUM_SWITCHES and min(counts.values()) > 0
            assert proxy.router.lost_calls == 0 and moved > 50 and calls > NUM_EXECUTIONS
            assert all(c.state == "complete" for e in executions for c in proxy.store.calls(e))

    asyncio.run(main())


def test_drain_counts_what_it_moved_and_waits_until_it_left(tmp_path: Path) -> None:
    async def main() -> None:
        async with cluster(tmp_path, 2) as (proxy, _):
            proxy.router.set_serving(1, False)
            stop = asyncio.Event()
            talks = [asyncio.create_task(converse(proxy, f"g{i}", stop)) for i in range(4)]
            while proxy.router.num_inflight(0) < 4:
                await asyncio.sleep(0.01)
            proxy.router.set_serving(1, True)
            assert await proxy.router.drain(0) == 4
            assert proxy.router.num_inflight(0) == 0 and proxy.router.num_inflight(1) == 4
            assert proxy.router.serving_cells() == [1]
            stop.set()
            await asyncio.gather(*talks)
            assert proxy.router.rerouted_calls == 4

    asyncio.run(main())
