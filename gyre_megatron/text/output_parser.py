"""Sampled text to what a harness sees: reasoning, text and tool calls, while it streams.

Text is passed on as soon as it cannot be the beginning of a tag or a stop string any more.
Invariant: the events do not depend on how the text was cut into deltas.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from gyre_megatron.text.tool_formats import ToolFormat

THINK_OPEN = "<think>"
THINK_CLOSE = "</think>"


@dataclass(frozen=True)
class OutputEvent:
    """A piece of the answer; `text` holds a tool call's JSON arguments, `name` its function."""

    kind: Literal["text", "thinking", "tool"]
    text: str
    name: str = ""


class OutputParser:
    """Feeds on decoded text, yields events.

    Args:
        tool_format: How calls are written; None leaves them as text.
        tools: Functions in OpenAI form, for argument types.
        stop: Stop strings; what follows the first one is cut.
        thinking: Whether the prompt already opened a <think> block.
    """

    def __init__(
        self,
        tool_format: ToolFormat | None,
        tools: Sequence[dict[str, Any]],
        stop: Sequence[str] = (),
        thinking: bool = False,
    ) -> None:
        self._format = tool_format if tools else None
        self._open_tags = [self._format.open_tag] if self._format else []
        self._tools = tools
        self._stop = tuple(s for s in stop if s)
        self._state: Literal["text", "thinking", "tool"] = "thinking" if thinking else "text"
        self._buffer = ""
        self._space = ""
        self._strip_next = False
        self._any_text = False
        self.stopped_by: str | None = None
        self.num_tool_calls = 0

    def feed(self, delta: str) -> list[OutputEvent]:
        """Events that this text completes."""
        if self.stopped_by is not None:
            return []
        self._buffer += delta
        return self._drain(final=False)

    def finish(self) -> list[OutputEvent]:
        """Events for what was held back; an unfinished tool call is text."""
        events = self._drain(final=True) if self.stopped_by is None else []
        if self._state == "tool" and self._format is not None:
            self._state = "text"
            events += self._text(self._format.open_tag + self._buffer)
            self._buffer = ""
        if self._space and not self.num_tool_calls:
            events.append(OutputEvent("text", self._space))
        self._space = ""
        return events

    def _drain(self, final: bool) -> list[OutputEvent]:
        events: list[OutputEvent] = []
        while self._buffer and self.stopped_by is None:
            step = {
                "text": self._drain_text,
                "thinking": self._drain_thinking,
                "tool": self._drain_tool,
            }[self._state]
            more, again = step(final)
            events += more
            if not again:
                break
        return events

    def _drain_text(self, final: bool) -> tuple[list[OutputEvent], bool]:
        begins = "" if self._any_text else self._buffer.lstrip()
        if begins.startswith(THINK_OPEN):
            self._buffer = begins[len(THINK_OPEN) :]
            self._space = ""
            self._state = "thinking"
            return [], True
        if not final and THINK_OPEN.startswith(begins) and not self._any_text:
            return [], False  # reasoning may be about to begin
        tags = [*self._open_tags, *self._stop]
        position, tag = _first(self._buffer, tags)
        if tag is None:
            keep = 0 if final else _partial_suffix(self._buffer, tags)
            ready, self._buffer = _split(self._buffer, keep)
            return self._text(ready), False
        events = self._text(self._buffer[:position])
        self._buffer = self._buffer[position + len(tag) :]
        if tag in self._stop:
            self.stopped_by = tag
            self._buffer = ""
        else:
            self._state = "tool"
        return events, True

    def _drain_thinking(self, final: bool) -> tuple[list[OutputEvent], bool]:
        position, tag = _first(self._buffer, [THINK_CLOSE])
        if tag is None:
            keep = 0 if final else _partial_suffix(self._buffer, [THINK_CLOSE])
            ready, self._buffer = _split(self._buffer, keep)
            return ([OutputEvent("thinking", ready)] if ready else []), False
        thought = self._buffer[:position]
        self._buffer = self._buffer[position + len(THINK_CLOSE) :]
        self._state = "text"
        self._strip_next = True
        self._any_text = True
        return ([OutputEvent("thinking", thought)] if thought else []), True

    def _drain_tool(self, final: bool) -> tuple[list[OutputEvent], bool]:
        assert self._format is not None  # only its opening tag leads here
        body, close, rest = self._buffer.partition(self._format.close_tag)
        if not close:
            return [], False
        self._buffer = rest
        self._state = "text"
        calls = self._format.parse(body, self._tools)
        if not calls:
            return self._text(self._format.open_tag + body + close), True
        self._space = ""
        self._strip_next = True
        self.num_tool_calls += len(calls)
        return [
            OutputEvent("tool", json.dumps(arguments, ensure_ascii=False), name)
            for name, arguments in calls
        ], True

    def _text(self, text: str) -> list[OutputEvent]:
        if self._strip_next:
            text = text.lstrip()
        if not text:
            return []
        self._strip_next = False
        text = self._space + text
        shown = text.rstrip()
        self._space = text[len(shown) :]
        if not shown:
            return []
        self._any_text = True
        return [OutputEvent("text", shown)]


def _first(text: str, tags: Sequence[str]) -> tuple[int, str | None]:
    found = [(text.find(tag), -len(tag), tag) for tag in tags if tag in text]
    if not found:
        return -1, None
    position, _, tag = min(found)
    return position, tag


def _partial_suffix(text: str, tags: Sequence[str]) -> int:
    """Length of the longest end of `text` that could grow into a tag."""
    longest = max((len(tag) for tag in tags), default=0)
    for length in range(min(longest - 1, len(text)), 0, -1):
        if any(tag.startswith(text[-length:]) for tag in tags):
            return length
    return 0


def _split(text: str, keep: int) -> tuple[str, str]:
    cut = len(text) - keep
    return text[:cut], text[cut:]
