"""Bodies of Anthropic Messages, and the conversation they hold."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from msgspec import UNSET, Meta, UnsetType

from gyre_megatron.proxy.dialects import bodies
from gyre_megatron.proxy.dialects.bodies import TextBlock
from gyre_megatron.text.conversation import (
    BadRequest,
    CallRequest,
    Message,
    provenance_of,
    without_volatile_lines,
)

ROLES = ("user", "assistant", "system")
_MEDIA = ("image", "document", "audio", "video", "container_upload")


class ThinkingBlock(msgspec.Struct):
    """Reasoning that is echoed; its signature names our call."""

    thinking: str | None = None
    signature: Any = None


class ToolUseBlock(msgspec.Struct):
    """A tool call that is echoed."""

    id: str | None = None
    name: str | None = None
    input: dict[str, Any] | str | None = None


_TEXT = {"text": TextBlock, "input_text": TextBlock, "output_text": TextBlock}
TextBlocks = list[str | Annotated[dict[str, Any], bodies.blocks(_TEXT, others=True)]]


class ToolResultBlock(msgspec.Struct):
    """What a tool gave back."""

    tool_use_id: str | None = None
    content: str | TextBlocks | None = None


_KINDS: dict[str, type[msgspec.Struct]] = {
    **_TEXT,
    "tool_use": ToolUseBlock,
    "tool_result": ToolResultBlock,
    "thinking": ThinkingBlock,
}
Blocks = list[str | Annotated[dict[str, Any], bodies.blocks(_KINDS, others=True)]]


class Turn(msgspec.Struct):
    """One message."""

    role: Annotated[str, bodies.one_of(*ROLES)]
    content: str | Blocks | None = None


class Tool(msgspec.Struct):
    """A tool; one without a schema is run by the provider's own servers."""

    name: str | None = None
    description: str | None = None
    input_schema: dict[str, Any] | UnsetType | None = UNSET
    type: str | None = None


class Thinking(msgspec.Struct):
    """How much reasoning is wanted, and whether it is shown."""

    type: str | None = None
    display: str | None = None


class MessagesBody(msgspec.Struct):
    """The body of `POST /v1/messages`."""

    messages: Annotated[list[Turn], Meta(min_length=1)]
    model: str | None = None
    system: str | TextBlocks | None = None
    max_tokens: bodies.TokenLimit | None = None
    temperature: bodies.Temperature | None = None
    top_p: bodies.Probability | None = None
    top_k: bodies.TopK | None = None
    stop_sequences: str | list[str] | None = None
    stream: bool | None = None
    # Some clients send a switch or a level instead of the object.
    thinking: Thinking | bool | str | None = None
    tools: list[Tool] | None = None


_decoder = msgspec.json.Decoder(MessagesBody)


def parse(data: bytes, dialect: str) -> CallRequest:
    """Read a body.

    Raises:
        BadRequest: it cannot be served.
    """
    body = bodies.decode(_decoder, data)
    thinking = body.thinking if isinstance(body.thinking, Thinking) else Thinking()
    return CallRequest(
        dialect=dialect,
        model=body.model or "",
        messages=_messages(body),
        tools=_tools(body.tools or []),
        max_tokens=body.max_tokens,
        temperature=body.temperature,
        top_p=body.top_p,
        top_k=body.top_k,
        stop=bodies.strings(body.stop_sequences),
        stream=bool(body.stream),
        thinking=thinking.type in ("enabled", "adaptive"),
        echo_thinking=thinking.display != "omitted",
        system_text="\n".join(_texts(body.system, "system")),
    )


def _tools(tools: list[Tool]) -> list[dict[str, Any]]:
    """Tools with a schema.

    Those that a server would run (web search and the like) are not offered to the model.
    """
    return [
        bodies.function_tool(
            tool.name,
            tool.description,
            tool.input_schema if isinstance(tool.input_schema, dict) else None,
            f"tools.{index}",
        )
        for index, tool in enumerate(tools)
        if tool.input_schema is not UNSET or tool.type in (None, "custom")
    ]


def _messages(body: MessagesBody) -> list[Message]:
    messages: list[Message] = []
    system = _system(body.system, "system")
    if system:
        messages.append({"role": "system", "content": system})
    for index, turn in enumerate(body.messages):
        where = f"messages.{index}"
        if turn.role == "assistant":
            messages.append(_assistant(turn, where))
        elif turn.role == "user":
            messages += _user(turn, where)
        elif turn.role == "system":
            messages.append(
                {"role": "system", "content": _system(turn.content, f"{where}.content")}
            )
        else:
            raise BadRequest(
                f"{where}.role: expected {', '.join(ROLES)}, found {bodies.short(turn.role)}"
            )
    return messages


def _system(content: str | Blocks | None, where: str) -> str:
    kept = [without_volatile_lines(text) for text in _texts(content, where)]
    return "\n\n".join(text for text in kept if text)


def _texts(content: str | Blocks | None, where: str) -> list[str]:
    return [_text(block, place) for block, place in bodies.blocks_and_places(content, where)]


def _text(block: str | dict[str, Any], where: str) -> str:
    """A block as text: unknown ones as JSON, without what moves from call to call."""
    kind, found = bodies.block_of(block, _TEXT, where)
    if isinstance(found, TextBlock):
        return found.text or ""
    if kind in _MEDIA:
        raise BadRequest(f"{where}: this model reads text only; leave out the {kind} block")
    assert isinstance(block, dict)  # a string is a text block
    return bodies.json_text(block, without="cache_control")


def _user(turn: Turn, where: str) -> list[Message]:
    messages: list[Message] = []
    texts: list[str] = []
    for block, place in bodies.blocks_and_places(turn.content, f"{where}.content"):
        kind, found = bodies.block_of(block, _KINDS, place)
        if isinstance(found, ToolResultBlock):
            text = "\n".join(_texts(found.content, f"{place}.content"))
            result = {"role": "tool", "tool_call_id": found.tool_use_id or "", "content": text}
            messages.append(result)
        elif kind not in ("thinking", "redacted_thinking"):
            texts.append(_text(block, place))
    if texts or not messages:
        messages.append({"role": "user", "content": "\n\n".join(texts)})
    return messages


def _assistant(turn: Turn, where: str) -> Message:
    texts: list[str] = []
    thoughts: list[str] = []
    calls: list[dict[str, Any]] = []
    message: Message = {"role": "assistant"}
    for block, place in bodies.blocks_and_places(turn.content, f"{where}.content"):
        kind, found = bodies.block_of(block, _KINDS, place)
        if isinstance(found, ToolUseBlock):
            calls.append(bodies.echoed_call(found.id, found.name, found.input))
        elif isinstance(found, ThinkingBlock):
            thoughts.append(found.thinking or "")
            message["provenance"] = provenance_of(found.signature)
        elif kind != "redacted_thinking":
            texts.append(_text(block, place))
    message["content"] = "".join(texts)
    if any(thoughts):
        message["reasoning_content"] = "".join(thoughts)
    if calls:
        message["tool_calls"] = calls
    return message
