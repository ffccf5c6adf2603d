"""One engine, spoken to through SGLang's native /generate: ids in, ids with log-probabilities out.

Used by the router only. Every failure of the engine or the connection comes out as EngineError;
what had arrived before it stays with the caller.
"""

from __future__ import annotations

import base64
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import numpy as np
import orjson

from gyre_megatron.config.rollout import RouterConfig
from gyre_megatron.errors import EngineError


class EngineRefused(EngineError):
    """The engine will not serve this request, here or on another try."""


@dataclass(frozen=True)
class GenerateRequest:
    """What the policy is asked for.

    Attributes:
        input_ids: int32 [n].
        sampling: SGLang's sampling_params without max_new_tokens.
        max_new_tokens: Tokens still wanted.
        affinity: Calls with the same value share prefixes and prefer the same engine.
        routed_start: First position whose experts are wanted; None wants none.
    """

    input_ids: np.ndarray
    sampling: dict[str, Any]
    max_new_tokens: int
    affinity: str = ""
    routed_start: int | None = None


@dataclass(frozen=True)
class TokenChunk:
    """Tokens that arrived together.

    Attributes:
        token_ids: n ids.
        logprobs: n log-probabilities of the behaviour policy.
        versions: n weight versions.
        finish: stop, length or abort on the last chunk, else None.
        matched: What stopped it: a token id or a stop string.
        prompt_length: Tokens this engine was fed.
        routed_experts: On an engine's last chunk, int32 [positions, layers, k] as bytes, from
            `routed_start` on.
    """

    token_ids: list[int]
    logprobs: list[float]
    versions: list[int]
    finish: str | None = None
    matched: Any = None
    cached_tokens: int = 0
    prompt_length: int = 0
    routed_experts: bytes | None = None


@dataclass
class _Progress:
    """Tokens of this stream so far; engines send totals or increments, both are cut to what is
    new."""

    count: int = 0
    versions: list[int] = field(default_factory=list)


class EngineClient:
    """HTTP client of one SGLang server."""

    def __init__(self, url: str, session: aiohttp.ClientSession, config: RouterConfig) -> None:
        self.url = url.rstrip("/")
        self._session = session
        self._timeout = aiohttp.ClientTimeout(
            total=None, sock_connect=config.connect_timeout_s, sock_read=config.stall_timeout_s
        )

    async def stream(
        self, request: GenerateRequest, request_id: str
    ) -> AsyncGenerator[TokenChunk, None]:
        """Generate; the last chunk has `finish`.

        Raises:
            EngineRefused: the engine says the request itself is wrong.
            EngineError: the engine or the connection failed.
        """
        progress = _Progress()
        try:
            async with self._session.post(
                f"{self.url}/generate",
                data=_body(request, request_id),
                headers={"content-type": "application/json"},
                timeout=self._timeout,
            ) as response:
                if response.status != 200:
                    raise _refusal(self.url, response.status, await response.text())
                async for message in _messages(response):
                    chunk = _chunk(self.url, message, progress, len(request.input_ids))
                    yield chunk
                    if chunk.finish is not None:
                        return
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise EngineError(
                f"engine {self.url} failed: {type(error).__name__}: {error}"
            ) from error
        raise EngineError(
            f"engine {self.url} ended a stream without a finish reason after {progress.count} "
            "tokens"
        )

    async def abort(self, request_id: str) -> None:
        """Ask the engine to cut a request short; its last tokens come through its stream.

        Raises:
            EngineError: the engine does not answer.
        """
        try:
            timeout = aiohttp.ClientTimeout(total=5.0)
            async with self._session.post(
                f"{self.url}/abort_request", json={"rid": request_id}, timeout=timeout
            ) as response:
                await response.read()
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise EngineError(f"engine {self.url} could not abort {request_id}: {error}") from error


def _body(request: GenerateRequest, request_id: str) -> bytes:
    head = {
        "rid": request_id,
        "stream": True,
        "return_logprob": True,
        "sampling_params": {**request.sampling, "max_new_tokens": request.max_new_tokens},
    }
    if request.routed_start is not None:
        head |= {"return_routed_experts": True, "routed_experts_start_len": request.routed_start}
    ids = orjson.dumps(np.ascontiguousarray(request.input_ids), option=orjson.OPT_SERIALIZE_NUMPY)
    return orjson.dumps(head)[:-1] + b',"input_ids":' + ids + b"}"


async def _messages(response: aiohttp.ClientResponse) -> AsyncGenerator[dict[str, Any], None]:
    buffer = b""
    async for data in response.content.iter_any():
        buffer += data
        while (end := buffer.find(b"\n\n")) >= 0:
            line, buffer = buffer[:end].strip(), buffer[end + 2 :]
            if line.startswith(b"data:") and line != b"data: [DONE]":
                yield orjson.loads(line[5:])


def _chunk(
    url: str, message: dict[str, Any], progress: _Progress, prompt_length: int
) -> TokenChunk:
    if "error" in message:
        error = (
            message["error"]
            if isinstance(message["error"], dict)
            else {"message": str(message["error"])}
        )
        raise _refusal(url, int(error.get("code") or 500), str(error.get("message")))
    meta = message["meta_info"]
    total = meta["completion_tokens"]
    new = total - progress.count
    ids = message.get("output_ids", [])[-new:] if new > 0 else []
    entries = (meta.get("output_token_logprobs") or [])[-new:] if new > 0 else []
    if len(ids) != max(new, 0) or len(entries) != len(ids):
        raise EngineError(
            f"engine {url}: {new} new tokens, but {len(ids)} ids and {len(entries)} "
            "log-probabilities"
        )
    if [entry[1] for entry in entries] != ids:
        raise EngineError(f"engine {url}: log-probabilities belong to other tokens than the ids")
    progress.count = total
    finish = meta.get("finish_reason")
    return TokenChunk(
        token_ids=ids,
        logprobs=[entry[0] for entry in entries],
        versions=_versions(meta, total)[total - len(ids) : total],
        finish=finish.get("type") if finish else None,
        matched=finish.get("matched") if finish else None,
        cached_tokens=meta.get("cached_tokens") or 0,
        prompt_length=prompt_length,
        routed_experts=base64.b64decode(meta["routed_experts"])
        if meta.get("routed_experts")
        else None,
    )


def _versions(meta: dict[str, Any], total: int) -> list[int]:
    latest = _version(meta.get("weight_version"))
    versions = [latest] * total
    for span in meta.get("weight_versions") or ():
        for index in range(span["start"], min(span["end"], total)):
            versions[index] = _version(span["version"])
    return versions


def _version(name: Any) -> int:
    """Versions are numbers written as text; a server that was never updated calls its own
    `default`: 0."""
    try:
        return int(name)
    except (TypeError, ValueError):
        return 0


def _refusal(url: str, status: int, text: str) -> EngineError:
    kind = EngineRefused if 400 <= status < 500 and status not in (408, 429, 499) else EngineError
    return kind(f"engine {url} answered {status}: {text[:500]}")
