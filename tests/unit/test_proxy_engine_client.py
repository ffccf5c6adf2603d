"""What SGLang's streams look like, and what is made of them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import httpx
import numpy as np
import orjson
import pytest
from aiohttp import web

from gyre_megatron.config.rollout import RouterConfig
from gyre_megatron.engines.client import EngineClient
from gyre_megatron.engines.generate import EngineRefused, GenerateRequest, TokenChunk
from gyre_megatron.errors import EngineError
from tests.support.proxies import running_proxy
from tests.support.replay import assert_replays
from tests.support.scripted_engine import ScriptedEngine, chain_policy

REQUEST = GenerateRequest(np.asarray([1, 2, 3], np.int32), {"temperature": 1.0}, 8)


def message(ids: list[int], total: int, finish: dict | None = None, **meta: Any) -> dict[str, Any]:
    entries = [[-0.5 * i, i, None] for i in ids]
    base = {
        "finish_reason": finish,
        "completion_tokens": total,
        "weight_version": "4",
        "output_token_logprobs": entries,
    }
    return {"text": "", "output_ids": ids, "meta_info": {**base, **meta}}


def stream(*messages: dict[str, Any] | bytes, status: int = 200) -> list[TokenChunk]:
    """Chunks a client makes of a server that sends these messages and closes."""

    async def answer(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(status=status)
        await response.prepare(request)
        for item in messages:
            data = item if isinstance(item, bytes) else b"data: " + orjson.dumps(item) + b"\n\n"
            for start in range(0, len(data), 37):  # cut anywhere
                await response.write(data[start : start + 37])
        return response

    async def main() -> list[TokenChunk]:
        app = web.Application()
        app.router.add_post("/generate", answer)
        runner = web.AppRunner(app)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        port = site._server.sockets[0].getsockname()[1]
        try:
            async with aiohttp.ClientSession() as session:
                client = EngineClient(f"http://127.0.0.1:{port}", session, RouterConfig())
                chunks: AsyncIterator[TokenChunk] = client.stream(REQUEST, "r")
                return [chunk async for chunk in chunks]
        finally:
            await runner.cleanup()

    return asyncio.run(main())


STOP = {"type": "stop", "matched": 2}


def test_increments_and_totals_give_the_same_tokens() -> None:
    increments = stream(message([5, 6], 2), message([7], 3), message([2], 4, STOP))
    totals = stream(message([5, 6], 2), message([5, 6, 7], 3), message([5, 6, 7, 2], 4, STOP))
    for chunks in (increments, totals):
        assert [i for chunk in chunks for i in chunk.token_ids] == [5, 6, 7, 2]
        assert [p for chunk in chunks for p in chunk.logprobs] == [-2.5, -3.0, -3.5, -1.0]
        assert [chunk.finish for chunk in chunks] == [None, None, "stop"] and chunks[
            -1
        ].matched == 2
        assert [v for chunk in chunks for v in chunk.versions] == [4] * 4


def test_versions_change_within_a_stream() -> None:
    spans = [{"version": "4", "start": 0, "end": 2}, {"version": "5", "start": 2, "end": 4}]
    chunks = stream(
        message([5], 1), message([6, 7, 2], 4, STOP, weight_version="5", weight_versions=spans)
    )
    assert [v for chunk in chunks for v in chunk.versions] == [4, 4, 5, 5]


def test_versions_cost_what_is_new() -> None:
    spans = [{"version": "4", "start": 0, "end": 3}, {"version": "6", "start": 3, "end": 9}]
    chunks = stream(
        message([5], 1, weight_version=4),
        message([6], 2, weight_version="9"),
        message([7, 8, 2], 5, STOP, weight_version="9", weight_versions=spans),
    )
    assert [chunk.versions for chunk in chunks] == [[4], [9], [4, 6, 6]]


def test_a_server_that_was_never_updated_serves_version_zero() -> None:
    assert stream(message([2], 1, STOP, weight_version="default"))[0].versions == [0]


@pytest.mark.parametrize(
    ("messages", "reason"),
    [
        ([message([5], 1)], "ended a stream without a finish reason after 1 tokens"),
        ([message([5], 2)], "2 new tokens, but 1 ids"),
        ([message([5], 1, STOP, output_token_logprobs=[])], "1 ids and 0 log-probabilities"),
        (
            [message([5], 1, STOP, output_token_logprobs=[[-1.0, 9, None]])],
            "belong to other tokens",
        ),
        ([{"error": {"message": "died", "code": 500}}], "died"),
        ([{"error": "died early"}], "500: died early"),
        ([{"text": "", "output_ids": [5]}], "without meta_info"),
        ([message([5], "1")], r"Expected `int`, got `str` - at `\$.meta_info.completion_tokens`"),
        ([message([5], 1, STOP, output_token_logprobs=[[None, 5, None]])], "got `null`"),
        ([b"data: {broken\n\n"], "sent a message that SGLang's /generate does not"),
    ],
)
def test_what_does_not_add_up_is_an_error(messages: list, reason: str) -> None:
    with pytest.raises(EngineError, match=reason):
        stream(*messages)


def test_a_wrong_request_is_told_from_a_sick_engine() -> None:
    with pytest.raises(EngineRefused, match="too long"):
        stream({"error": {"message": "too long", "code": 400}})
    with pytest.raises(EngineRefused):
        stream(status=422)
    for status in (429, 500, 503):
        with pytest.raises(EngineError) as caught:
            stream(status=status)
        assert not isinstance(caught.value, EngineRefused)


@pytest.mark.parametrize("incremental", [False, True])
def test_both_stream_forms_replay(tmp_path: Path, incremental: bool) -> None:
    async def main() -> None:
        engine = ScriptedEngine(
            chain_policy(), version=6, tokens_per_chunk=3, incremental=incremental
        )
        await engine.start()
        async with running_proxy(tmp_path, [engine]) as proxy, httpx.AsyncClient() as client:
            execution_id, token = proxy.start_execution()
            body = {"model": "m", "max_tokens": 20, "messages": [{"role": "user", "content": "x"}]}
            await client.post(f"{proxy.url}/v1/messages", json=body, headers={"x-api-key": token})
            assert_replays(proxy.store, execution_id, engine)
        await engine.stop()

    asyncio.run(main())
