"""A conversation in normal form: what all dialects are parsed into, and what decides where a call
attaches.

Invariant: two requests that mean the same give the same unit keys, however the harness wrote them
(string or block list, moved cache_control, key order, attribution lines, re-formatted tool
arguments). Keys only locate a node; the tokens always come from the store or from rendering the
unit once.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import orjson

from gyre_megatron.errors import GyreError

Message = dict[str, Any]
UnitKind = Literal["head", "system", "user", "assistant", "tool"]

_EMPTY_ANSWERS = {"", "(no content)"}
_VOLATILE_LINES = re.compile(r"(?m)^x-anthropic-billing-header:[^\n]*\n?")
_TOOL_CALL_ID = re.compile(r"^(?:toolu_|call_|fc_)([0-9a-f]{24})_\d+$")


class BadRequest(GyreError, ValueError):
    """The harness sent something that cannot be served; told to it in its own dialect.

    Args:
        message: What is wrong and how to mend it.
        kind: invalid, too_large, or overflow (the prompt does not fit the context).
        status: HTTP status.
    """

    def __init__(
        self,
        message: str,
        kind: str = "invalid",
        status: int = 400,
        numbers: tuple[int, int] = (0, 0),
    ) -> None:
        super().__init__(message)
        self.kind = kind
        self.status = status
        self.numbers = numbers


@dataclass(frozen=True)
class CallRequest:
    """One request of a harness, freed of its dialect.

    Attributes:
        messages: As a chat template takes them: role, content (str), tool_calls with arguments as
            dicts, ...
        tools: Functions in OpenAI form.
        thinking: Whether the harness wants to see reasoning; it is kept in the tree either way.
        echo_thinking: Whether reasoning text is shown, or only its place and signature (Anthropic's
            `omitted`).
        system_text: System text as it was sent, attribution lines included, where the dialect has
            a field of its own for it; call roles are read off it.
        body: What the dialect's writer wants to see again; nobody else reads it.
    """

    dialect: str
    model: str
    messages: list[Message]
    tools: list[dict[str, Any]] = field(default_factory=list)
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    stop: tuple[str, ...] = ()
    stream: bool = False
    thinking: bool = True
    echo_thinking: bool = True
    include_usage: bool = True
    system_text: str = ""
    body: Any = None


@dataclass(frozen=True)
class ToolCall:
    """A tool call of the policy; `arguments` is the JSON text handed to the harness."""

    call_id: str
    name: str
    arguments: str


@dataclass(frozen=True)
class Unit:
    """The smallest piece of a prompt that is rendered on its own.

    Attributes:
        provenance: Ids of our calls that its tool calls or reasoning signatures name.
    """

    kind: UnitKind
    messages: tuple[Message, ...]
    key: bytes
    tools: tuple[Any, ...] = ()
    provenance: tuple[str, ...] = ()


def units_of(request: CallRequest) -> list[Unit]:
    """Cut a request into units: the head (tools and leading system text), then messages, tool
    results in runs."""
    messages = request.messages
    index = 0
    while index < len(messages) and messages[index]["role"] == "system":
        index += 1
    units = [_head(messages[:index], request.tools)]
    names: dict[Any, str] = {}
    while index < len(messages):
        role = messages[index]["role"]
        end = index + 1
        while role == "tool" and end < len(messages) and messages[end]["role"] == "tool":
            end += 1
        run = messages[index:end]
        if role == "assistant":
            names.update(
                (call.get("id"), call["function"]["name"])
                for call in run[0].get("tool_calls") or ()
            )
        elif role == "tool":
            run = [
                {"name": names.get(message.get("tool_call_id"), "tool"), **message}
                for message in run
            ]
        units.append(_unit(role, tuple(run)))
        index = end
    return units


def answer_key(text: str, tool_calls: Sequence[tuple[str, Any]]) -> bytes:
    """Key of an answer: visible text (outer white space aside) and its tool calls as (name,
    arguments)."""
    stripped = text.strip()
    shown = "" if stripped in _EMPTY_ANSWERS else stripped
    return _digest(
        ["assistant", shown, [[name, _arguments(arguments)] for name, arguments in tool_calls]]
    )


def provenance_of(tool_call_id: Any) -> str | None:
    """The call that made a tool-call id or reasoning signature, if it is one of ours."""
    match = _TOOL_CALL_ID.match(tool_call_id) if isinstance(tool_call_id, str) else None
    return match.group(1) if match else None


def without_volatile_lines(text: str) -> str:
    """System text without the per-request lines that clients put into it."""
    return _VOLATILE_LINES.sub("", text)


def _head(messages: Sequence[Message], tools: Sequence[dict[str, Any]]) -> Unit:
    text = "\n\n".join(message["content"] for message in messages)
    leading = ({"role": "system", "content": text},) if messages else ()
    return Unit("head", leading, _digest(["head", text, list(tools)]), tuple(tools))


def _unit(role: UnitKind, messages: tuple[Message, ...]) -> Unit:
    if role == "assistant":
        message = messages[0]
        calls = message.get("tool_calls") or ()
        functions = [(call["function"]["name"], call["function"]["arguments"]) for call in calls]
        names = [*(provenance_of(call.get("id")) for call in calls), message.get("provenance")]
        provenance = tuple(dict.fromkeys(filter(None, names)))
        return Unit(
            role, messages, answer_key(message["content"], functions), provenance=provenance
        )
    if role == "tool":
        return Unit(
            role,
            messages,
            _digest(["tool", [[m.get("tool_call_id"), m["content"]] for m in messages]]),
        )
    return Unit(role, messages, _digest([role, messages[0]["content"]]))


def _arguments(arguments: Any) -> Any:
    if isinstance(arguments, str):
        try:
            return orjson.loads(arguments)
        except orjson.JSONDecodeError:
            return arguments
    return arguments


def _digest(value: Any) -> bytes:
    try:
        data = orjson.dumps(value, option=orjson.OPT_SORT_KEYS)
    except TypeError as error:
        raise BadRequest(
            f"a value cannot be read: {error}; nest it less deeply and keep numbers to 64 bits"
        ) from error
    return hashlib.blake2b(data, digest_size=16).digest()
