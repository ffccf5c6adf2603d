"""A harness's side of a conversation that grows by one exchange per call."""

from __future__ import annotations

import time
from typing import Any

import aiohttp
import numpy as np
import orjson

from benchmarks.proxy.cluster import OUTPUT_TOKENS, Cluster
from gyre_megatron.text.renderer import Renderer

TEXT = "def area(width, height):\n    return width * height  # the rectangle's\n"


class Talk:
    """Messages so far, and calls with them through the proxy or past it."""

    def __init__(self, session: aiohttp.ClientSession, cluster: Cluster, token: str) -> None:
        self._session = session
        self._cluster = cluster
        self._token = token
        self.messages: list[dict[str, Any]] = []
        self.num_tokens = 0

    @classmethod
    async def begin(cls, session: aiohttp.ClientSession, cluster: Cluster, group: str) -> Talk:
        """Start an execution of its own."""
        async with session.post(f"{cluster.proxy_url}/bench/start/{group}") as response:
            return cls(session, cluster, (await response.json())["token"])

    def fill(self, num_tokens: int, tokens_per_message: int, tokens_per_text: float) -> None:
        """A history of tool results, as an agent's is, made by the harness."""
        repeats = max(1, int(tokens_per_message / tokens_per_text))
        for index in range(num_tokens // tokens_per_message):
            role = "assistant" if index % 2 else "user"
            self.messages.append({"role": role, "content": f"step {index}\n" + TEXT * repeats})
        if self.messages[-1]["role"] == "assistant":
            self.messages.append({"role": "user", "content": "go on"})

    async def call(self) -> float:
        """One call through the proxy; returns its seconds, body encoding excluded."""
        body = orjson.dumps({"model": "m", "max_tokens": OUTPUT_TOKENS, "messages": self.messages})
        headers = {"x-api-key": self._token, "content-type": "application/json"}
        url = f"{self._cluster.proxy_url}/v1/messages"
        started = time.perf_counter()
        async with self._session.post(url, data=body, headers=headers) as response:
            answer = orjson.loads(await response.read())
            elapsed = time.perf_counter() - started
            if response.status != 200:
                raise RuntimeError(f"the proxy answered {response.status}: {answer}")
        self.num_tokens = answer["usage"]["input_tokens"]
        self.messages.append({"role": "assistant", "content": answer["content"]})
        self.messages.append({"role": "user", "content": "result: " + TEXT * 4})
        return elapsed

    async def direct(self) -> float:
        """As many ids sent straight to the engine, read to the end; body encoding excluded too."""
        body = {
            "rid": "bench",
            "stream": True,
            "return_logprob": True,
            "sampling_params": {"temperature": 1.0, "max_new_tokens": OUTPUT_TOKENS},
            "input_ids": np.full(self.num_tokens, 300, np.int32),
        }
        data = orjson.dumps(body, option=orjson.OPT_SERIALIZE_NUMPY)
        started = time.perf_counter()
        async with self._session.post(f"{self._cluster.engine_url}/generate", data=data) as answer:
            await answer.read()
        return time.perf_counter() - started

    def retokenise(self, renderer: Renderer) -> float:
        """Seconds of what a proxy without stored tokens does each call: render and encode all."""
        flat = [
            {**m, "content": m["content"] if isinstance(m["content"], str) else ""}
            for m in self.messages
        ]
        started = time.perf_counter()
        renderer.tokens.encode(renderer.template.render(flat, generation_prompt=True))
        return time.perf_counter() - started
