"""Bodies of OpenAI Chat Completions, and the conversation they hold."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from msgspec import Meta

from gyre_megatron.proxy.dialects import bodies
from gyre_megatron.proxy.dialects.bodies import RefusalBlock, TextBlock
from gyre_megatron.text.conversation import BadRequest, CallRequest, Message

ROLES = ("system", "developer", "user", "assistant", "tool", "function")
_PARTS: dict[str, type[msgspec.Struct]] = {
    "text": TextBlock,
    "input_text": TextBlock,
    "output_text": TextBlock,
    "refusal": RefusalBlock,
}
Parts = list[str | Annotated[dict[str, Any], bodies.blocks(_PARTS)]]


class Called(msgspec.Struct):
    """The function of a tool call that is echoed."""

    name: str | None = None
    arguments: str | dict[str, Any] | None = None


class EchoedCall(msgspec.Struct):
    """A tool call that is echoed."""

    function: Called
    id: str | None = None


class Turn(msgspec.Struct):
    """One message."""

    role: Annotated[str, bodies.one_of(*ROLES)]
    content: str | Parts | None = None
    tool_call_id: str | None = None
    tool_calls: list[EchoedCall] | None = None
    # Two names that servers have given to the same thing; clients echo what they were given.
    reasoning_content: str | None = None
    reasoning: Any = None


class Function(msgspec.Struct):
    """What a tool is called and takes."""

    name: str | None = None
    description: str | None = None
    parameters: dict[str, Any] | None = None


class Tool(msgspec.Struct):
    """A tool; only functions are known to this dialect."""

    function: Function


class StreamOptions(msgspec.Struct):
    """What a stream says besides the answer."""

    include_usage: bool | None = None


class ChatBody(msgspec.Struct):
    """The body of `POST /v1/chat/completions`."""

    messages: Annotated[list[Turn], Meta(min_length=1)]
    model: str | None = None
    n: Annotated[int, bodies.one_of(1)] | None = None
    max_completion_tokens: bodies.TokenLimit | None = None
    max_tokens: bodies.TokenLimit | None = None
    temperature: bodies.Temperature | None = None
    top_p: bodies.Probability | None = None
    top_k: bodies.TopK | None = None
    stop: str | list[str] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    tools: list[Tool] | None = None


_decoder = msgspec.json.Decoder(ChatBody)


def parse(data: bytes, dialect: str) -> CallRequest:
    """Read a body.

    Raises:
        BadRequest: it cannot be served.
    """
    body = bodies.decode(_decoder, data)
    if body.n not in (None, 1):
        raise BadRequest(
            "n: only one choice is served per call; send the request again for another answer"
        )
    options = body.stream_options or StreamOptions()
    limit = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    return CallRequest(
        dialect=dialect,
        model=body.model or "",
        messages=[_message(turn, f"messages.{i}") for i, turn in enumerate(body.messages)],
        tools=_tools(body.tools or []),
        max_tokens=limit,
        temperature=body.temperature,
        top_p=body.top_p,
        top_k=body.top_k,
        stop=bodies.strings(body.stop),
        stream=bool(body.stream),
        include_usage=bool(options.include_usage),
    )


def _tools(tools: list[Tool]) -> list[dict[str, Any]]:
    return [
        bodies.function_tool(
            tool.function.name,
            tool.function.description,
            tool.function.parameters,
            f"tools.{index}.function",
        )
        for index, tool in enumerate(tools)
    ]


def _message(turn: Turn, where: str) -> Message:
    content = bodies.text_of(turn.content, _PARTS, f"{where}.content")
    if turn.role in ("system", "developer"):
        return {"role": "system", "content": content}
    if turn.role == "user":
        return {"role": "user", "content": content}
    if turn.role in ("tool", "function"):
        return {"role": "tool", "tool_call_id": turn.tool_call_id or "", "content": content}
    if turn.role != "assistant":
        raise BadRequest(
            f"{where}.role: expected {', '.join(ROLES)}, found {bodies.short(turn.role)}"
        )
    message: Message = {"role": "assistant", "content": content}
    reasoning = turn.reasoning_content or turn.reasoning
    if isinstance(reasoning, str):
        message["reasoning_content"] = reasoning
    calls = turn.tool_calls or []
    if calls:
        message["tool_calls"] = [
            bodies.echoed_call(call.id, call.function.name, call.function.arguments)
            for call in calls
        ]
    return message
