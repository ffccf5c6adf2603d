"""A model's own chat template, rendered piece by piece.

The harness sends its whole history on each call, but only what is new may cost anything. A
conversation is cut into *units* (the head with tools and system text, a user message, a run of tool
results, ...); the text of a unit is found by rendering it after a short stand-in for what came
before it. `template_proof` checks that the pieces laid end to end are exactly the full rendering.
Called by the renderer; knows text only, no tokens.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jinja2

from gyre_megatron.errors import TemplateError

Message = dict[str, Any]

# What stands for earlier messages must not occur in real ones: a text that holds it would be cut
# there. Nobody can guess this process's.
_MARK = f"\u241egyre-%s-{secrets.token_hex(8)}\u241e"
_ARGUMENT = _MARK % "argument"
_USER = {"role": "user", "content": _MARK % "user"}
_USER_2 = {"role": "user", "content": _MARK % "user2"}
_ASSISTANT = {"role": "assistant", "content": _MARK % "assistant"}
_SYSTEM = {"role": "system", "content": _MARK % "system"}
_TOOL = {"role": "tool", "content": _MARK % "tool", "tool_call_id": "call00000", "name": "look"}
_TWO = [_TOOL, {**_TOOL, "tool_call_id": "call00001"}]


class ChatTemplate:
    """Renders conversations, whole or unit by unit.

    Args:
        source: The jinja text, as Hugging Face ships it.
        name: Used in errors.
        special_tokens: `bos_token`, `eos_token`, ... as the template expects them.
        variables: Extra variables, such as enable_thinking.

    Raises:
        TemplateError: the text is no valid template, or cannot render the shortest conversation.
    """

    def __init__(
        self,
        source: str,
        name: str,
        special_tokens: dict[str, str] | None = None,
        variables: dict[str, Any] | None = None,
    ) -> None:
        self.name = name
        self.source = source
        self._variables = {**(special_tokens or {}), **(variables or {})}
        self._render = _renderer()
        self._endings: dict[str, str] = {}
        self._prompts: dict[str, str] = {}
        self.turn_close = self._turn_close()
        self._find_fixed_texts()
        self.supports_mid_system = self._accepts([_USER, _ASSISTANT, _SYSTEM, _USER_2])
        self.supports_tools = self._accepts([_USER, _caller([_TOOL]), _TOOL])
        self.supports_parallel_tools = self.supports_tools and self._accepts(
            [_USER, _caller(_TWO), *_TWO]
        )

    @classmethod
    def from_checkpoint(
        cls, path: str | Path, variables: dict[str, Any] | None = None
    ) -> ChatTemplate:
        """Read the template of a Hugging Face checkpoint (chat_template.jinja or
        tokenizer_config.json).

        Raises:
            TemplateError: the checkpoint has none.
        """
        folder = Path(path)
        config_file = folder / "tokenizer_config.json"
        config = json.loads(config_file.read_text()) if config_file.is_file() else {}
        file = folder / "chat_template.jinja"
        source = file.read_text() if file.is_file() else config.get("chat_template")
        if isinstance(source, list):
            source = next(
                (entry["template"] for entry in source if entry.get("name") == "default"), None
            )
        if not source:
            raise TemplateError(
                f"{folder} has no chat template; add chat_template.jinja to the checkpoint"
            )
        names = ("bos_token", "eos_token", "unk_token", "pad_token")
        tokens = {
            name: _token_text(config.get(name)) for name in names if config.get(name) is not None
        }
        return cls(source, str(folder.name), tokens, variables)

    def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[Any] = (),
        generation_prompt: bool = False,
    ) -> str:
        """The whole conversation as text.

        Raises:
            TemplateError: the template refuses these messages.
        """
        try:
            (text,), _ = self._render(
                [list(messages)],
                tools=list(tools) or None,
                chat_template=self.source,
                add_generation_prompt=generation_prompt,
                **self._variables,
            )
            return text
        except jinja2.TemplateSyntaxError as error:
            raise TemplateError(f"chat template {self.name} is not valid jinja: {error}") from error
        except (jinja2.TemplateError, TypeError, ValueError, KeyError, AttributeError) as error:
            roles = [message.get("role") for message in messages]
            raise TemplateError(
                f"chat template {self.name} refuses messages with roles {roles}: {error}"
            ) from error

    # texts of units ------------------------------

    def head(self, messages: Sequence[Message], tools: Sequence[Any]) -> str:
        """Text before the first message that is not a leading system message."""
        return self._before(self.render([*messages, _USER], tools), self._text_of_user)

    def unit_text(self, previous: str, messages: Sequence[Message]) -> str:
        """Text of one unit (a message, or a run of tool results) after a message of role
        `previous`.

        `previous` is head, system, user, assistant or tool. An answer of ours is followed by
        `turn_close`, which is no part of it.
        """
        if messages[0]["role"] == "assistant":
            return self._before(self._after(previous, [*messages, _USER_2]), self._text_of_user_2)
        return self._after(previous, messages)

    def generation_prompt(self, previous: str) -> str:
        """What asks for an answer after a message of role `previous`."""
        if previous not in self._prompts:
            stand_in = self._stand_in(previous)
            without = self.render(stand_in)
            asked = self.render(stand_in, generation_prompt=True)
            if not asked.startswith(without):
                raise TemplateError(
                    f"chat template {self.name}: the generation prompt rewrites the conversation"
                )
            self._prompts[previous] = asked[len(without) :]
        return self._prompts[previous]

    def _stand_in(self, previous: str) -> tuple[Message, ...]:
        """The shortest conversation that ends with a message of that role."""
        if previous == "system" and self.supports_mid_system:
            return (_USER, _ASSISTANT, _SYSTEM)
        return {
            "head": (_SYSTEM, _USER),
            "system": (_SYSTEM, _USER),
            "user": (_USER,),
            "assistant": (_USER,),  # asked again after an answer: the prompt is that of any turn
            "tool": (_USER, _caller([_TOOL]), _TOOL),
        }[previous]

    def _after(self, previous: str, messages: Sequence[Message]) -> str:
        """What follows a message of role `previous`; how the template shows what stands before it
        does not matter."""
        if previous == "assistant":
            return self._after_answer(messages)
        mid_system = previous == "system" and self.supports_mid_system
        if previous in ("head", "system") and not mid_system:
            text = self.render([_SYSTEM, *messages])
            ending = self._system_ending
            start = _end_of(text, _SYSTEM, self.name)
        else:
            stand_in = self._stand_in(previous)
            text = self.render([*stand_in, *messages])
            ending = self._ending(previous, stand_in)
            start = _end_of(text, stand_in[-1], self.name)
        if not text.startswith(ending, start):
            raise TemplateError(
                f"chat template {self.name} changes earlier messages when {messages[0]['role']} "
                "messages are added; it cannot be rendered incrementally"
            )
        return text[start + len(ending) :]

    def _after_answer(self, messages: Sequence[Message]) -> str:
        answer = _caller(messages) if messages[0]["role"] == "tool" else _ASSISTANT
        text = self.render([_USER, answer, *messages])
        # Templates put an answer's text before its calls or after them.
        start = max(text.rfind(answer["content"]), text.rfind(_ARGUMENT))
        end = text.find(self.turn_close, start)
        if start < 0 or end < 0:
            raise TemplateError(
                f"chat template {self.name} leaves an answer open before {messages[0]['role']} "
                "messages"
            )
        return text[end + len(self.turn_close) :]

    def _ending(self, previous: str, stand_in: tuple[Message, ...]) -> str:
        """What the template puts after the text of a message of that role."""
        if previous not in self._endings:
            text = self.render(stand_in)
            self._endings[previous] = text[_end_of(text, stand_in[-1], self.name) :]
        return self._endings[previous]

    # measured once ------------------------------

    def _find_fixed_texts(self) -> None:
        two = self.render([_SYSTEM, _USER, _ASSISTANT, _USER_2])
        body = two[_end_of(two, _ASSISTANT, self.name) :]
        if not body.startswith(self.turn_close):
            raise TemplateError(
                f"chat template {self.name} closes an answer differently by what follows it"
            )
        self._text_of_user_2 = body[len(self.turn_close) :]
        self._text_of_user = self._text_of_user_2.replace(_USER_2["content"], _USER["content"])
        head = self._before(self.render([_SYSTEM, _USER]), self._text_of_user)
        self._system_ending = head[_end_of(head, _SYSTEM, self.name) :]

    def _turn_close(self) -> str:
        followed = self.render([_USER, _ASSISTANT, _USER_2])
        ended = self.render([_USER, _ASSISTANT])
        tail, close = (
            whole[_end_of(whole, _ASSISTANT, self.name) :] for whole in (followed, ended)
        )
        if not close or not tail.startswith(close):
            raise TemplateError(
                f"chat template {self.name} does not close every answer in the same way: {close!r} "
                f"at the end, {tail[:20]!r} before a user message"
            )
        return close

    def _before(self, text: str, tail: str) -> str:
        if not text.endswith(tail):
            raise TemplateError(
                f"chat template {self.name} renders a user message differently by what precedes it"
            )
        return text[: len(text) - len(tail)]

    def _accepts(self, messages: Sequence[Message]) -> bool:
        try:
            text = self.render(messages)
        except TemplateError:
            return False
        return all(
            message["content"] in text for message in messages if message["role"] != "assistant"
        )


def _renderer() -> Callable[..., Any]:
    """Hugging Face's own sandbox for templates, with what it offers them.

    Imported late: transformers takes seconds to import, and only a proxy that starts needs it.
    """
    from transformers.utils.chat_template_utils import render_jinja_template

    return render_jinja_template


def _caller(results: Sequence[Message]) -> Message:
    """An answer that calls exactly the tools whose results follow."""
    calls = [
        {
            "type": "function",
            "id": result.get("tool_call_id") or "call00000",
            "function": {"name": result.get("name") or "look", "arguments": {"path": _ARGUMENT}},
        }
        for result in results
    ]
    return {"role": "assistant", "content": _MARK % "caller", "tool_calls": calls}


def _end_of(text: str, message: Message, name: str) -> int:
    """Where the message's content ends in the text."""
    start = text.find(message["content"])
    if start < 0:
        raise TemplateError(
            f"chat template {name} does not show the text of {message['role']} messages"
        )
    return start + len(message["content"])


def _token_text(token: Any) -> str:
    return token["content"] if isinstance(token, dict) else str(token)
