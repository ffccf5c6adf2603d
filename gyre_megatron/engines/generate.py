"""SGLang's native /generate as plain values: ids in, ids with log-probabilities out.

Used by the client; no I/O. Invariant: every token comes with its own log-probability and the weight
version that sampled it, or the message is refused.
"""

from __future__ import annotations

import base64
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np
import orjson

from gyre_megatron.errors import EngineError

# 408, 429 and 499 are 4xx too, but speak of the moment, not of the request.
_PASSING_STATUSES = (408, 429, 499)


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

    def to_json(self, request_id: str) -> bytes:
        """The body of POST /generate."""
        head = {
            "rid": request_id,
            "stream": True,
            "return_logprob": True,
            "sampling_params": {**self.sampling, "max_new_tokens": self.max_new_tokens},
        }
        if self.routed_start is not None:
            head["return_routed_experts"] = True
            head["routed_experts_start_len"] = self.routed_start
        # orjson writes an int32 array at memory speed; a million ids as a Python list take 50 ms.
        ids = orjson.dumps(np.ascontiguousarray(self.input_ids), option=orjson.OPT_SERIALIZE_NUMPY)
        return orjson.dumps(head)[:-1] + b',"input_ids":' + ids + b"}"


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


class _Finish(msgspec.Struct):
    type: str
    matched: Any = None


class _VersionSpan(msgspec.Struct):
    version: str | int | None
    start: int
    end: int


class _Meta(msgspec.Struct):
    """The part of SGLang's meta_info that is read; the rest is let through."""

    completion_tokens: int
    finish_reason: _Finish | None = None
    output_token_logprobs: list[tuple[float, int, Any]] | None = None
    cached_tokens: int | None = None
    weight_version: str | int | None = None
    weight_versions: list[_VersionSpan] | None = None
    routed_experts: str | None = None


class _Failure(msgspec.Struct):
    message: str = "no reason given"
    code: int | None = None


class _Message(msgspec.Struct):
    """One event of the stream."""

    meta_info: _Meta | None = None
    output_ids: list[int] = []
    error: _Failure | str | None = None


_decoder = msgspec.json.Decoder(_Message)


@dataclass
class StreamReader:
    """Turns the events of one stream into chunks.

    Engines send totals or increments; both are cut to what is new.
    """

    url: str
    prompt_length: int
    num_tokens: int = 0
    _buffer: bytes = field(default=b"", repr=False)

    def feed(self, data: bytes) -> list[TokenChunk]:
        """Chunks that these bytes complete.

        Raises:
            EngineRefused: the engine says that the request itself is wrong.
            EngineError: the engine failed, or its message does not add up.
        """
        *events, self._buffer = (self._buffer + data).split(b"\n\n")
        payloads = [event.strip()[5:] for event in events if event.strip().startswith(b"data:")]
        return [self._chunk(payload) for payload in payloads if payload.strip() != b"[DONE]"]

    def _chunk(self, payload: bytes) -> TokenChunk:
        try:
            message = _decoder.decode(payload)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise EngineError(
                f"engine {self.url} sent a message that SGLang's /generate does not: {error}"
            ) from error
        if message.error is not None:
            failure = message.error
            if isinstance(failure, str):
                failure = _Failure(failure)
            raise refusal(self.url, failure.code or 500, failure.message)
        if message.meta_info is None:
            raise EngineError(f"engine {self.url} sent an event without meta_info")
        return self._new_tokens(message.output_ids, message.meta_info)

    def _new_tokens(self, output_ids: list[int], meta: _Meta) -> TokenChunk:
        total = meta.completion_tokens
        num_new = max(total - self.num_tokens, 0)
        ids = output_ids[-num_new:] if num_new else []
        entries = (meta.output_token_logprobs or [])[-num_new:] if num_new else []
        if len(ids) != num_new or len(entries) != num_new:
            raise EngineError(
                f"engine {self.url}: {num_new} new tokens, but {len(ids)} ids and {len(entries)} "
                "log-probabilities"
            )
        if [token for _, token, _ in entries] != ids:
            raise EngineError(
                f"engine {self.url}: log-probabilities belong to other tokens than the ids"
            )
        self.num_tokens = total
        finish = meta.finish_reason
        return TokenChunk(
            token_ids=ids,
            logprobs=[logprob for logprob, _, _ in entries],
            versions=_versions(meta, total - num_new),
            finish=finish.type if finish else None,
            matched=finish.matched if finish else None,
            cached_tokens=meta.cached_tokens or 0,
            prompt_length=self.prompt_length,
            routed_experts=base64.b64decode(meta.routed_experts) if meta.routed_experts else None,
        )


def refusal(url: str, status: int, text: str) -> EngineError:
    """The error that an HTTP status (or a code inside a stream) stands for."""
    final = 400 <= status < 500 and status not in _PASSING_STATUSES
    kind = EngineRefused if final else EngineError
    return kind(f"engine {url} answered {status}: {text[:500]}")


def _versions(meta: _Meta, start: int) -> list[int]:
    """Versions of the tokens from `start` on; spans tell where weights changed in mid-answer."""
    versions = [_version(meta.weight_version)] * (meta.completion_tokens - start)
    for span in meta.weight_versions or ():
        first = max(span.start - start, 0)
        end = min(span.end - start, len(versions))
        if first < end:
            versions[first:end] = [_version(span.version)] * (end - first)
    return versions


def _version(name: str | int | None) -> int:
    """Versions are numbers written as text.

    A server that was never updated calls its own `default`: that is 0.
    """
    try:
        return int(name or 0)
    except ValueError:
        return 0
