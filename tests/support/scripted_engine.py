"""An engine that speaks SGLang's /generate and answers from a policy function, token by token.

It stands in for a model only where a test must know each token beforehand. Log-probabilities are a
function of the prefix and of the engine's version, so a recorded pair can be traced to the engine
that produced it. As a program: `python -m tests.support.scripted_engine --port P [--version V]
[--token-delay-s D]` serves the `chain` policy.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import contextlib
import zlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import numpy as np
import orjson
from aiohttp import web

Policy = Callable[[list[int]], Iterable[int]]


def chain_policy(vocabulary: int = 250, first: int = 8) -> Policy:
    """Each token is a function of all before it: any continuation can be told from a wrong one."""

    def policy(prefix: list[int]) -> Iterable[int]:
        crc = zlib.crc32(np.asarray(prefix, np.int32).tobytes())
        while True:
            token = first + crc % vocabulary
            yield token
            crc = zlib.crc32(np.int32(token).tobytes(), crc)

    return policy


def logprob_of(prefix_length: int, token: int, version: int) -> float:
    """What the engine of a version reports for a token at a position; exact in float32."""
    return -((prefix_length * 7 + token * 3) % 64) / 64 - version


@dataclass(eq=False)
class ScriptedEngine:
    """One server; counts what it was asked. With a `context_length` it refuses what SGLang refuses:
    prompts of context - 6 tokens and more, and answers that could pass the context."""

    policy: Policy
    version: int = 0
    token_delay_s: float = 0.0
    tokens_per_chunk: int = 1
    incremental: bool = True
    context_length: int | None = None
    prompts: list[list[int]] = field(default_factory=list)
    outputs: list[list[int]] = field(default_factory=list)
    url: str = ""

    def __post_init__(self) -> None:
        self._aborted: set[str] = set()
        self._runner: web.AppRunner | None = None

    async def start(self, port: int = 0) -> ScriptedEngine:
        """Listen on 127.0.0.1."""
        app = web.Application(client_max_size=1 << 30)
        app.router.add_post("/generate", self._generate)
        app.router.add_post("/abort_request", self._abort)
        app.router.add_get("/health", lambda _: web.Response())
        self._runner = web.AppRunner(app, shutdown_timeout=0.1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", port)
        await site.start()
        self.url = f"http://127.0.0.1:{site._server.sockets[0].getsockname()[1]}"
        return self

    async def stop(self) -> None:
        """Close, cutting connections."""
        if self._runner is not None:
            await self._runner.cleanup()

    async def _abort(self, request: web.Request) -> web.Response:
        self._aborted.add((await request.json())["rid"])
        return web.Response()

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        if reason := self._refusal(orjson.loads(await request.read())):
            return web.json_response({"error": {"message": reason}}, status=400)
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        with contextlib.suppress(
            ConnectionResetError
        ):  # the proxy hung up: as SGLang does, drop the request
            await self._answer(request, response)
        return response

    def _refusal(self, body: dict) -> str:
        if self.context_length is None:
            return ""
        length, wanted = len(body["input_ids"]), body["sampling_params"]["max_new_tokens"]
        if length >= self.context_length - 6:
            return f"Input length ({length} tokens) exceeds the maximum allowed length"
        if length + wanted > self.context_length:
            return f"Requested token count exceeds the model's context of {self.context_length}"
        return ""

    async def _answer(self, request: web.Request, response: web.StreamResponse) -> None:
        body = orjson.loads(await request.read())
        prompt, sampling, rid = body["input_ids"], body["sampling_params"], body["rid"]
        self.prompts.append(prompt)
        await response.prepare(request)
        self._routed_from = (
            body.get("routed_experts_start_len") if body.get("return_routed_experts") else None
        )
        output: list[int] = []
        self.outputs.append(output)
        stops, limit = set(sampling.get("stop_token_ids") or ()), sampling["max_new_tokens"]
        policy, sent, finish = iter(self.policy(prompt)), 0, None
        while finish is None:
            if self.token_delay_s:
                await asyncio.sleep(self.token_delay_s)
            if rid in self._aborted:
                finish = {"type": "abort", "message": "aborted"}
            else:
                finish = self._step(policy, output, stops, limit)
            if finish is not None or len(output) - sent >= self.tokens_per_chunk:
                await response.write(self._event(rid, len(prompt), output, sent, finish))
                sent = len(output)
        await response.write(b"data: [DONE]\n\n")

    def _step(
        self, policy: Iterable[int], output: list[int], stops: set[int], limit: int
    ) -> dict | None:
        token = next(policy, None)
        if token is None:
            return {"type": "stop", "matched": None}
        output.append(token)
        if token in stops:
            return {"type": "stop", "matched": token}
        return {"type": "length", "length": limit} if len(output) >= limit else None

    def _event(
        self, rid: str, prompt_length: int, output: list[int], sent: int, finish: dict | None
    ) -> bytes:
        start = sent if self.incremental else 0
        entries = [
            [logprob_of(prompt_length + index, token, self.version), token, None]
            for index, token in enumerate(output[start:], start)
        ]
        meta = {
            "id": rid,
            "finish_reason": finish,
            "prompt_tokens": prompt_length,
            "completion_tokens": len(output),
            "cached_tokens": 0,
            "weight_version": str(self.version),
            "output_token_logprobs": entries,
        }
        if finish is not None and self._routed_from is not None:
            positions = np.arange(
                self._routed_from, prompt_length + len(output) - 1, dtype=np.int32
            )
            rows = np.repeat(positions, 2 * 2) * 10 + self.version  # 2 layers, 2 experts a token
            meta["routed_experts"] = base64.b64encode(rows.astype(np.int32).tobytes()).decode()
        return (
            b"data: "
            + orjson.dumps({"text": "", "output_ids": output[start:], "meta_info": meta})
            + b"\n\n"
        )


async def _main(arguments: argparse.Namespace) -> None:
    engine = ScriptedEngine(chain_policy(), arguments.version, arguments.token_delay_s)
    await engine.start(arguments.port)
    print(engine.url, flush=True)
    await asyncio.Event().wait()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--version", type=int, default=0)
    parser.add_argument("--token-delay-s", type=float, default=0.0)
    asyncio.run(_main(parser.parse_args()))
