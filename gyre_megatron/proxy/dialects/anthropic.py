"""Anthropic Messages: answers, whole and as events. Bodies are read in `anthropic_request`."""

from __future__ import annotations

from typing import Any

import orjson

from gyre_megatron.proxy.dialects import anthropic_request
from gyre_megatron.proxy.dialects.base import Answer, Dialect, sse
from gyre_megatron.text.conversation import BadRequest, CallRequest, ToolCall
from gyre_megatron.text.output_parser import OutputEvent

_STOP_REASONS = {
    "stop": "end_turn",
    "length": "max_tokens",
    "tool_calls": "tool_use",
    "stop_sequence": "stop_sequence",
}
_ERROR_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    404: "not_found_error",
    405: "not_found_error",
    413: "request_too_large",
    529: "overloaded_error",
}


class AnthropicMessages(Dialect):
    """`POST /v1/messages`."""

    name = "anthropic"
    paths = ("/v1/messages",)
    count_paths = ("/v1/messages/count_tokens",)
    body_type = anthropic_request.MessagesBody

    def parse(self, body: bytes) -> CallRequest:
        """See Dialect.parse."""
        return anthropic_request.parse(body, self.name)

    def writer(self, request: CallRequest, answer: Answer) -> AnthropicWriter:
        """See Dialect.writer."""
        return AnthropicWriter(request, answer)

    def body(self, request: CallRequest, answer: Answer) -> dict[str, Any]:
        """See Dialect.body."""
        content = [
            block for part in answer.parts if (block := _block(request, answer, part)) is not None
        ]
        return {
            **_envelope(answer),
            "content": content,
            "stop_reason": _STOP_REASONS[answer.finish_reason],
            "stop_sequence": answer.stop_sequence,
            "usage": _usage(answer),
        }

    def error(self, error: BadRequest) -> dict[str, Any]:
        """See Dialect.error."""
        message = str(error)
        if error.kind == "overflow":
            message = f"prompt is too long: {error.numbers[0]} tokens > {error.numbers[1]} maximum"
        kind = _ERROR_TYPES.get(
            error.status, "invalid_request_error" if error.status < 500 else "api_error"
        )
        return {"type": "error", "error": {"type": kind, "message": message}}


class AnthropicWriter:
    """See StreamWriter."""

    def __init__(self, request: CallRequest, answer: Answer) -> None:
        self._request = request
        self._answer = answer
        self._index = -1
        self._open: str | None = None

    def start(self) -> bytes:
        message = {
            **_envelope(self._answer),
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
        }
        return (
            sse(
                {
                    "type": "message_start",
                    "message": {**message, "usage": {**_usage(self._answer), "output_tokens": 1}},
                },
                "message_start",
            )
            + self.ping()
        )

    def ping(self) -> bytes:
        return sse({"type": "ping"}, "ping")

    def part(self, part: OutputEvent | ToolCall) -> bytes:
        if isinstance(part, ToolCall):
            return self._tool(part)
        if part.kind == "thinking":
            if not self._request.thinking:
                return b""
            opened = self._switch("thinking", {"type": "thinking", "thinking": "", "signature": ""})
            if not self._request.echo_thinking:
                return opened
            return opened + self._delta({"type": "thinking_delta", "thinking": part.text})
        opened = self._switch("text", {"type": "text", "text": ""})
        return opened + self._delta({"type": "text_delta", "text": part.text})

    def finish(self) -> bytes:
        delta = {
            "stop_reason": _STOP_REASONS[self._answer.finish_reason],
            "stop_sequence": self._answer.stop_sequence,
        }
        return (
            self._close()
            + sse(
                {"type": "message_delta", "delta": delta, "usage": _usage(self._answer)},
                "message_delta",
            )
            + sse({"type": "message_stop"}, "message_stop")
        )

    def fail(self, error: BadRequest) -> bytes:
        return sse(AnthropicMessages().error(error), "error")

    def _tool(self, call: ToolCall) -> bytes:
        block = {"type": "tool_use", "id": f"toolu_{call.call_id}", "name": call.name, "input": {}}
        events = self._close() + self._begin("tool_use", block)
        return (
            events
            + self._delta({"type": "input_json_delta", "partial_json": call.arguments})
            + self._close()
        )

    def _switch(self, kind: str, block: dict[str, Any]) -> bytes:
        return b"" if self._open == kind else self._close() + self._begin(kind, block)

    def _begin(self, kind: str, block: dict[str, Any]) -> bytes:
        self._open = kind
        self._index += 1
        return sse(
            {"type": "content_block_start", "index": self._index, "content_block": block},
            "content_block_start",
        )

    def _delta(self, delta: dict[str, Any]) -> bytes:
        return sse(
            {"type": "content_block_delta", "index": self._index, "delta": delta},
            "content_block_delta",
        )

    def _close(self) -> bytes:
        if self._open is None:
            return b""
        events = b""
        if self._open == "thinking":
            events = self._delta({"type": "signature_delta", "signature": _signature(self._answer)})
        self._open = None
        return events + sse(
            {"type": "content_block_stop", "index": self._index}, "content_block_stop"
        )


def _envelope(answer: Answer) -> dict[str, Any]:
    return {
        "id": f"msg_{answer.call_id}",
        "type": "message",
        "role": "assistant",
        "model": answer.model,
    }


def _usage(answer: Answer) -> dict[str, Any]:
    return {
        "input_tokens": answer.num_prompt_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": 0,
        "output_tokens": answer.num_output_tokens,
    }


def _signature(answer: Answer) -> str:
    return f"call_{answer.call_id}_0"


def _block(
    request: CallRequest, answer: Answer, part: OutputEvent | ToolCall
) -> dict[str, Any] | None:
    if isinstance(part, ToolCall):
        return {
            "type": "tool_use",
            "id": f"toolu_{part.call_id}",
            "name": part.name,
            "input": orjson.loads(part.arguments),
        }
    if part.kind == "text":
        return {"type": "text", "text": part.text}
    if not request.thinking:
        return None
    return {
        "type": "thinking",
        "thinking": part.text if request.echo_thinking else "",
        "signature": _signature(answer),
    }
