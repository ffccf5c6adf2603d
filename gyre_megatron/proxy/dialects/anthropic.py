"""Anthropic Messages."""

from __future__ import annotations

from typing import Any

import orjson

from gyre_megatron.proxy.dialects import base
from gyre_megatron.proxy.dialects.base import Answer, sse
from gyre_megatron.text.conversation import (
    BadRequest,
    CallRequest,
    Message,
    ToolCall,
    provenance_of,
    without_volatile_lines,
)
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
    413: "request_too_large",
    529: "overloaded_error",
}
_NO_MEDIA = "this model reads text only; leave out the {kind} block"


class AnthropicMessages:
    """`POST /v1/messages`."""

    name = "anthropic"
    overflow_in_stream = False

    def parse(self, body: dict[str, Any]) -> CallRequest:
        """See Dialect.parse."""
        thinking = base.options(body, "thinking")
        return CallRequest(
            dialect=self.name,
            model=base.text_of(body.get("model"), "model"),
            messages=_messages(body),
            tools=_tools(body),
            max_tokens=base.whole(body, "max_tokens"),
            temperature=base.number(body, "temperature", 0.0, 2.0),
            top_p=base.number(body, "top_p", 0.0, 1.0),
            top_k=base.whole(body, "top_k", low=-1),
            stop=base.strings(body.get("stop_sequences"), "stop_sequences"),
            stream=body.get("stream") is True,
            thinking=thinking.get("type") in ("enabled", "adaptive"),
            echo_thinking=thinking.get("display") != "omitted",
            body=body,
        )

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


# parsing ------------------------------


def _tools(body: dict[str, Any]) -> list[dict[str, Any]]:
    """Tools with a schema; tools that a server would run (web search and the like) are not offered
    to the model."""
    tools = base.entries(body.get("tools"), "tools")
    return [
        base.function_tool(
            tool.get("name"), tool.get("description"), tool.get("input_schema"), f"tools.{index}"
        )
        for index, tool in enumerate(tools)
        if "input_schema" in tool or tool.get("type") in (None, "custom")
    ]


def _messages(body: dict[str, Any]) -> list[Message]:
    messages: list[Message] = []
    system = _plain(body.get("system") if body.get("system") is not None else "", "system")
    if system:
        messages.append({"role": "system", "content": system})
    turns = base.entries(body.get("messages"), "messages")
    if not turns:
        raise BadRequest("messages: at least one message is required")
    for index, turn in enumerate(turns):
        where = f"messages.{index}"
        role = turn.get("role")
        if role == "assistant":
            messages.append(_assistant(turn, where))
        elif role == "user":
            messages += _user(turn, where)
        elif role == "system":
            messages.append({"role": "system", "content": _plain(turn.get("content"), where)})
        else:
            raise BadRequest(f"{where}.role: expected user, assistant or system, found {role!r}")
    return messages


def _plain(content: Any, where: str) -> str:
    texts = [_text_block(block, where) for block in base.blocks(content, where)]
    kept = [without_volatile_lines(text) for text in texts]
    return "\n\n".join(text for text in kept if text)


def _text_block(block: dict[str, Any], where: str) -> str:
    kind = block["type"]
    if kind in ("text", "output_text", "input_text"):
        return base.text_of(block.get("text"), f"{where}.text")
    if kind in ("image", "document", "audio", "video", "container_upload"):
        raise BadRequest(f"{where}: " + _NO_MEDIA.format(kind=kind))
    return orjson.dumps(
        {k: v for k, v in block.items() if k != "cache_control"}, option=orjson.OPT_SORT_KEYS
    ).decode()


def _user(turn: dict[str, Any], where: str) -> list[Message]:
    results: list[Message] = []
    texts: list[str] = []
    for block in base.blocks(turn.get("content"), where):
        if block["type"] == "tool_result":
            content = block.get("content")
            text = "" if content is None else _joined(content, where)
            results.append(
                {
                    "role": "tool",
                    "tool_call_id": base.text_of(block.get("tool_use_id"), f"{where}.tool_use_id"),
                    "content": text,
                }
            )
        elif block["type"] not in ("thinking", "redacted_thinking"):
            texts.append(_text_block(block, where))
    if texts or not results:
        results.append({"role": "user", "content": "\n\n".join(texts)})
    return results


def _joined(content: Any, where: str) -> str:
    return "\n".join(_text_block(block, where) for block in base.blocks(content, where))


def _assistant(turn: dict[str, Any], where: str) -> Message:
    texts: list[str] = []
    thoughts: list[str] = []
    message: Message = {"role": "assistant"}
    calls: list[dict[str, Any]] = []
    for block in base.blocks(turn.get("content"), where):
        kind = block["type"]
        if kind == "tool_use":
            calls.append(_tool_use(block, where))
        elif kind == "thinking":
            thoughts.append(base.text_of(block.get("thinking"), f"{where}.thinking"))
            message["provenance"] = provenance_of(block.get("signature"))
        elif kind != "redacted_thinking":
            texts.append(_text_block(block, where))
    message["content"] = "".join(texts)
    if thoughts and any(thoughts):
        message["reasoning_content"] = "".join(thoughts)
    if calls:
        message["tool_calls"] = calls
    return message


def _tool_use(block: dict[str, Any], where: str) -> dict[str, Any]:
    name = base.text_of(block.get("name"), f"{where}.name")
    arguments = base.arguments_of(block.get("input"), f"{where}.input")
    call_id = base.text_of(block.get("id"), f"{where}.id")
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}
