"""Proof, by enumeration, that a chat template can be rendered piece by piece.

Every conversation up to a given length over {user, answer, answer with one or two tool calls and
their results, mid-list system message}, with and without tools and system text, is rendered whole
and in pieces, as text and as token ids; one difference and the template is refused by name. Run
once, when a proxy starts.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from gyre_megatron.errors import TemplateError
from gyre_megatron.text.chat_template import ChatTemplate, Message
from gyre_megatron.text.conversation import CallRequest, Unit, units_of
from gyre_megatron.text.token_text import TokenText

_TEXTS = (
    "plain text",
    "zwei\n\nLines",
    "äöü 漢字 🙂",
    "<b>tags</b> & {braces} {{x}}",
    "0",
    "ends with newline.\n",
)
_TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "look",
            "description": "Looks.",
            "parameters": {
                "type": "object",
                "properties": {"path": {"type": "string", "description": "Where."}},
            },
        },
    }
]


@dataclass(frozen=True)
class TemplateProof:
    """What was shown.

    Attributes:
        num_conversations: Conversations compared.
        keeps_answers: Whether a full rendering would show an answer as it was sampled; False for
            templates that drop or add reasoning. The stored answer is fed back verbatim either way.
    """

    num_conversations: int
    keeps_answers: bool


def prove(template: ChatTemplate, tokens: TokenText | None, max_steps: int = 3) -> TemplateProof:
    """Compare full and incremental rendering.

    Args:
        tokens: Compare token ids as well.
        max_steps: Steps after the first user message.

    Raises:
        TemplateError: they differ; the message names template, conversation and the first
        difference.
    """
    keeps = [
        _compare(template, tokens, *conversation)
        for conversation in conversations(template, max_steps)
    ]
    return TemplateProof(len(keeps), all(keeps))


def prove_or_degrade(
    template: ChatTemplate, tokens: TokenText | None, max_steps: int = 3
) -> TemplateProof:
    """Prove; where only mid-list system messages stand in the way, give them up (they are sent as
    user messages).

    Raises:
        TemplateError: see prove.
    """
    try:
        return prove(template, tokens, max_steps)
    except TemplateError:
        if not template.supports_mid_system:
            raise
    template.supports_mid_system = False
    return prove(template, tokens, max_steps)


def render_units(template: ChatTemplate, units: Sequence[Unit]) -> list[str]:
    """Text of each unit, as the renderer makes it when none of them is known."""
    texts = []
    for index, unit in enumerate(units):
        if unit.kind == "head":
            texts.append(template.head(unit.messages, unit.tools))
        else:
            texts.append(template.unit_text(units[index - 1].kind, unit.messages))
    return texts


def conversations(
    template: ChatTemplate, max_steps: int
) -> Iterator[tuple[list[Message], list[dict[str, Any]]]]:
    """Every conversation of the enumeration that the template claims to support."""
    steps = ["user", "answer"]
    steps += ["call"] if template.supports_tools else []
    steps += ["calls"] if template.supports_parallel_tools else []
    steps += ["system"] if template.supports_mid_system else []
    heads = [
        (system, tools)
        for system in (False, True)
        for tools in ([], _TOOLS if template.supports_tools else [])
    ]
    for system, tools in heads:
        for length in range(max_steps + 1):
            for sequence in itertools.product(steps, repeat=length):
                if _alternates(sequence):
                    yield _conversation(("user", *sequence), system), tools


def _alternates(sequence: Sequence[str]) -> bool:
    """No two answers in a row: harnesses never send them, and many templates refuse them."""
    answers = {"answer", "call", "calls"}
    plain = {"answer"}
    return all(not (a in plain and b in answers) for a, b in itertools.pairwise(sequence))


def _conversation(steps: Sequence[str], system: bool) -> list[Message]:
    texts = itertools.cycle(_TEXTS)
    messages: list[Message] = [{"role": "system", "content": next(texts)}] if system else []
    for number, step in enumerate(steps):
        if step in ("user", "system"):
            messages.append({"role": step, "content": next(texts)})
        elif step == "answer":
            messages.append({"role": "assistant", "content": next(texts)})
        else:
            messages += _tool_turn(number, 1 if step == "call" else 2, next(texts))
    return messages


def _tool_turn(number: int, num_calls: int, text: str) -> list[Message]:
    ids = [f"c{number:04d}{index:04d}" for index in range(num_calls)]
    function = {"name": "look", "arguments": {"path": text, "n": 3}}
    calls = [{"type": "function", "id": call_id, "function": function} for call_id in ids]
    results = [
        {"role": "tool", "tool_call_id": i, "name": "look", "content": f"result {i}"} for i in ids
    ]
    return [
        {"role": "assistant", "content": text if num_calls == 1 else "", "tool_calls": calls},
        *results,
    ]


def _compare(
    template: ChatTemplate,
    tokens: TokenText | None,
    messages: list[Message],
    tools: list[dict[str, Any]],
) -> bool:
    """Whether answers come out verbatim too; what is no answer must."""
    # An answer that ends a conversation is never rendered: the policy is asked only after other
    # messages.
    asked = (
        messages
        if messages[-1]["role"] != "assistant"
        else [*messages, {"role": "user", "content": "more"}]
    )
    whole = template.render(asked, tools, generation_prompt=True)
    units = units_of(CallRequest("chat", "m", asked, tools))
    pieces = [*render_units(template, units), template.generation_prompt(units[-1].kind)]
    joined = "".join(pieces)
    if tokens is not None:
        _compare_ids(template, tokens, pieces, joined, _roles(asked))
    if joined == whole:
        return True
    if _without_answers(template, joined) != _without_answers(template, whole):
        raise TemplateError(
            f"chat template {template.name} cannot be rendered incrementally: roles "
            f"{_roles(asked)}, tools "
            f"{bool(tools)}: {_difference(joined, whole)}. Use a template whose earlier messages "
            "do not depend on "
            "later ones, or set rollout.proxy.unproven_template to serve it all the same"
        )
    return False


def _without_answers(template: ChatTemplate, text: str) -> list[str]:
    """The runs of context between answers, generation prompts included up to where they open an
    answer."""
    asks = template.generation_prompt("user")
    shown = template.unit_text("user", [{"role": "assistant", "content": "\x00"}])
    header = _common_prefix(asks, shown) or asks
    first, *answers = text.split(header)
    return [first, *(answer.partition(template.turn_close)[2] for answer in answers)]


def _common_prefix(one: str, other: str) -> str:
    length = next(
        (i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b),
        min(len(one), len(other)),
    )
    return one[:length]


def _compare_ids(
    template: ChatTemplate, tokens: TokenText, pieces: list[str], whole: str, roles: list[str]
) -> None:
    ids = np.concatenate([tokens.encode(piece) for piece in pieces])
    expected = tokens.encode(whole)
    if not np.array_equal(ids, expected):
        raise TemplateError(
            f"chat template {template.name}: the tokenizer merges across the pieces of roles "
            f"{roles}; token ids of the "
            "incremental rendering differ from the whole's. Messages must begin and end with "
            "special tokens"
        )


def _roles(messages: Sequence[Message]) -> list[str]:
    return [message["role"] for message in messages]


def _difference(found: str, expected: str) -> str:
    index = next((i for i, (a, b) in enumerate(zip(found, expected, strict=False)) if a != b), 0)
    index = index or min(len(found), len(expected))
    cut = slice(max(0, index - 30), index + 30)
    return f"in pieces {found[cut]!r}, whole {expected[cut]!r}"
