"""What the dialects share: the answer they write, the interface they fill, and careful readers of
untrusted JSON."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import orjson

from gyre_megatron.text.conversation import BadRequest, CallRequest, ToolCall
from gyre_megatron.text.output_parser import OutputEvent

FinishReason = Literal["stop", "length", "tool_calls", "stop_sequence"]


@dataclass
class Answer:
    """What a call produced, as the harness sees it.

    Attributes:
        call_id: 24 hexadecimal digits, part of every id the harness is given.
        parts: Runs of text and thinking, and tool calls, in order.
    """

    call_id: str
    model: str
    created: int
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_output_tokens: int = 0
    finish_reason: FinishReason = "stop"
    stop_sequence: str | None = None
    parts: list[OutputEvent | ToolCall] = field(default_factory=list)

    def add(self, event: OutputEvent) -> OutputEvent | ToolCall:
        """Append an event; returns it, with an id if it is a tool call."""
        if event.kind == "tool":
            tool = ToolCall(f"{self.call_id}_{len(self.tool_calls)}", event.name, event.text)
            self.parts.append(tool)
            return tool
        last = self.parts[-1] if self.parts else None
        if isinstance(last, OutputEvent) and last.kind == event.kind:
            self.parts[-1] = OutputEvent(event.kind, last.text + event.text)
        else:
            self.parts.append(event)
        return event

    @property
    def tool_calls(self) -> list[ToolCall]:
        """Tool calls in order."""
        return [part for part in self.parts if isinstance(part, ToolCall)]

    @property
    def text(self) -> str:
        """All visible text."""
        return self._joined("text")

    @property
    def thinking(self) -> str:
        """All reasoning."""
        return self._joined("thinking")

    def _joined(self, kind: str) -> str:
        return "".join(
            part.text for part in self.parts if isinstance(part, OutputEvent) and part.kind == kind
        )


class StreamWriter(Protocol):
    """Writes one answer as server-sent events."""

    def start(self) -> bytes:
        """Events that open the stream."""

    def ping(self) -> bytes:
        """Something that keeps the connection alive."""

    def part(self, part: OutputEvent | ToolCall) -> bytes:
        """Events for a piece of text or thinking, or a tool call."""

    def finish(self) -> bytes:
        """Events that close the stream."""

    def fail(self, error: BadRequest) -> bytes:
        """Events for a failure in mid-stream."""


class Dialect(Protocol):
    """One HTTP form of the same conversation.

    `overflow_in_stream`: whether a prompt that is too long is told in a stream that failed rather than by a status.
    """

    name: str
    overflow_in_stream: bool

    def parse(self, body: dict[str, Any]) -> CallRequest:
        """Read a body.

        Raises:
            BadRequest: it cannot be served.
        """

    def writer(self, request: CallRequest, answer: Answer) -> StreamWriter:
        """A writer of events for this answer."""

    def body(self, request: CallRequest, answer: Answer) -> dict[str, Any]:
        """The whole answer as one JSON object."""

    def error(self, error: BadRequest) -> dict[str, Any]:
        """An error in this dialect's form."""


def sse(data: dict[str, Any], event: str | None = None) -> bytes:
    """One server-sent event."""
    head = f"event: {event}\n".encode() if event else b""
    return head + b"data: " + orjson.dumps(data) + b"\n\n"


# readers of untrusted JSON
# -------------------------------------------------------------------------------------------


def number(body: dict[str, Any], name: str, low: float, high: float) -> float | None:
    """A number within bounds, or None where absent or null."""
    value = body.get(name)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
        raise BadRequest(
            f"{name}: expected a number from {low:g} to {high:g}, found {_short(value)}"
        )
    return float(value)


def whole(body: dict[str, Any], name: str, low: int = 1, high: int = 2**31 - 1) -> int | None:
    """A whole number within bounds, or None where absent or null."""
    value = body.get(name)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise BadRequest(
            f"{name}: expected a whole number from {low} to {high}, found {_short(value)}"
        )
    return value


def strings(value: Any, name: str) -> tuple[str, ...]:
    """A string or a list of strings; empty where absent."""
    if value is None:
        return ()
    items = [value] if isinstance(value, str) else value
    if not isinstance(items, list) or not all(isinstance(item, str) for item in items):
        raise BadRequest(f"{name}: expected a string or a list of strings, found {_short(value)}")
    return tuple(item for item in items if item)


def text_of(value: Any, name: str) -> str:
    """A string, or "" for null."""
    if value is None:
        return ""
    if not isinstance(value, str):
        raise BadRequest(f"{name}: expected a string, found {_short(value)}")
    return clean(value)


def clean(text: str) -> str:
    """Text that can be encoded: lone surrogates become U+FFFD."""
    return text if text.isascii() else text.encode("utf-8", "replace").decode("utf-8", "replace")


def entries(value: Any, name: str) -> list[dict[str, Any]]:
    """A list of objects; empty where absent."""
    if value is None:
        return []
    if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
        raise BadRequest(f"{name}: expected a list of objects, found {_short(value)}")
    return value


def options(body: dict[str, Any], name: str) -> dict[str, Any]:
    """An object of options; empty where absent or of another type, which some clients send."""
    value = body.get(name)
    return value if isinstance(value, dict) else {}


def blocks(content: Any, name: str, text_types: Iterable[str] = ("text",)) -> list[dict[str, Any]]:
    """Content given as a string or a list of blocks (bare strings allowed), as a list of blocks."""
    if isinstance(content, str):
        return [{"type": next(iter(text_types)), "text": content}]
    if isinstance(content, list):
        content = [
            {"type": next(iter(text_types)), "text": b} if isinstance(b, str) else b
            for b in content
        ]
    found = entries(content, name)
    for index, block in enumerate(found):
        if not isinstance(block.get("type"), str):
            raise BadRequest(
                f"{name}.{index}.type: expected a string, found {_short(block.get('type'))}"
            )
    return found


def function_tool(name: Any, description: Any, parameters: Any, where: str) -> dict[str, Any]:
    """A tool in OpenAI form, the one chat templates take."""
    if not isinstance(name, str) or not name:
        raise BadRequest(f"{where}.name: expected a non-empty string, found {_short(name)}")
    if parameters is not None and not isinstance(parameters, dict):
        raise BadRequest(
            f"{where}: the parameters' schema must be an object, found {_short(parameters)}"
        )
    function: dict[str, Any] = {
        "name": clean(name),
        "description": text_of(description, f"{where}.description"),
    }
    function["parameters"] = parameters or {"type": "object", "properties": {}}
    return {"type": "function", "function": function}


def arguments_of(value: Any, where: str) -> dict[str, Any] | str:
    """Arguments of an echoed tool call, as an object where they are one."""
    if isinstance(value, dict):
        return value
    if value is None or value == "":
        return {}
    if not isinstance(value, str):
        raise BadRequest(f"{where}: expected a JSON object or its text, found {_short(value)}")
    try:
        parsed = orjson.loads(value)
    except (orjson.JSONDecodeError, UnicodeEncodeError):
        return clean(value)
    return parsed if isinstance(parsed, dict) else clean(value)


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
