"""What every dialect fills in: the answer it writes, the stream it writes it to, the form of its
errors.

A dialect of your own derives from `Dialect` and is named under `rollout.proxy.dialects` as
`module:Class`. Invariant: a dialect knows text only; token ids never pass through here.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, Protocol

import msgspec
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


class Dialect(ABC):
    """One HTTP form of the same conversation.

    Attributes:
        name: What the store keeps of a call's dialect.
        paths: Where it is served; the first is published in the OpenAPI, the others are aliases.
        count_paths: Where a body's tokens are counted without calling an engine.
        body_type: The struct that bodies are decoded into: what the OpenAPI publishes. None
            publishes an object without properties.
        overflow_in_stream: Whether a prompt that is too long is told in a stream that failed,
            rather than by a status.
    """

    name: ClassVar[str]
    paths: ClassVar[tuple[str, ...]]
    count_paths: ClassVar[tuple[str, ...]] = ()
    body_type: ClassVar[type[msgspec.Struct] | None] = None
    overflow_in_stream: ClassVar[bool] = False

    @abstractmethod
    def parse(self, body: bytes) -> CallRequest:
        """Read a body.

        Raises:
            BadRequest: it cannot be served.
        """

    @abstractmethod
    def writer(self, request: CallRequest, answer: Answer) -> StreamWriter:
        """A writer of events for this answer."""

    @abstractmethod
    def body(self, request: CallRequest, answer: Answer) -> dict[str, Any]:
        """The whole answer as one JSON object."""

    @abstractmethod
    def error(self, error: BadRequest) -> dict[str, Any]:
        """An error in this dialect's form."""


def sse(data: dict[str, Any], event: str | None = None) -> bytes:
    """One server-sent event."""
    head = f"event: {event}\n".encode() if event else b""
    return head + b"data: " + orjson.dumps(data) + b"\n\n"
