"""Scripts that drive real harnesses: from the text of a prompt to the text a model might answer."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from gyre_megatron.text.renderer import Renderer

SUB_TASK = "SUBTASK-7"
SUB_RESULT = "sub result 42"


def tool_call(name: str, **arguments: Any) -> str:
    """A tool call in Hermes form."""
    return "<tool_call>\n" + json.dumps({"name": name, "arguments": arguments}) + "\n</tool_call>"


class ScriptedAgent:
    """A policy for ScriptedEngine: `answer(prompt text, last message)` gives the next answer's
    text.

    Set `renderer` once the proxy runs; the answer is encoded with its tokenizer and ends the turn.
    """

    def __init__(self, answer: Callable[[str, str], str]) -> None:
        self._answer = answer
        self.renderer: Renderer | None = None

    def __call__(self, prompt: list[int]) -> Iterable[int]:
        assert self.renderer is not None
        text = self.renderer.tokens.decode(prompt, skip_special=False)
        last = text[text.rfind("<|im_start|>", 0, text.rfind("<|im_start|>assistant")) :]
        answer = self._answer(text, last)
        return [*self.renderer.tokens.encode(answer).tolist(), self.renderer.turn_end_id]


def scenario(
    main: Sequence[str], summary_mark: str, summary: str, sub: Sequence[str] = ()
) -> Callable[[str, str], str]:
    """Answers of a main agent in order, of a sub-agent in order, and of a compaction, told apart by
    their prompts."""
    turns = {"main": iter(main), "sub": iter(sub)}

    def answer(text: str, last: str) -> str:
        if summary_mark and summary_mark in last:
            return summary
        is_sub = SUB_TASK in text and "MAINTASK" not in text
        return next(turns["sub" if is_sub else "main"])

    return answer
