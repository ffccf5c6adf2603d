"""Request bodies: what /openapi.json states is what is enforced, and errors name their place."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import fields
from typing import Any

import msgspec
import pytest

from gyre_megatron.proxy.dialects.anthropic import AnthropicMessages
from gyre_megatron.proxy.dialects.base import Dialect
from gyre_megatron.proxy.dialects.chat import ChatCompletions
from gyre_megatron.proxy.dialects.responses import Responses
from gyre_megatron.text.conversation import BadRequest, CallRequest

USER = [{"role": "user", "content": "hello"}]
DIALECTS: list[tuple[Dialect, dict[str, Any]]] = [
    (AnthropicMessages(), {"messages": USER}),
    (ChatCompletions(), {"messages": USER}),
    (Responses(), {"input": USER}),
]
IDS = ["anthropic", "chat", "responses"]


def parse(dialect: Dialect, body: dict[str, Any]) -> CallRequest:
    return dialect.parse(json.dumps(body).encode())


def refusal(dialect: Dialect, body: dict[str, Any]) -> str:
    with pytest.raises(BadRequest) as caught:
        parse(dialect, body)
    assert caught.value.status == 400 and "\n" not in str(caught.value)
    return str(caught.value)


def bounds(dialect: Dialect) -> Iterator[tuple[str, str, float]]:
    """(field, minimum or maximum, its value) of every bound that is published."""
    assert dialect.body_type is not None
    _, schemas = msgspec.json.schema_components([dialect.body_type])
    for name, field in schemas[dialect.body_type.__name__]["properties"].items():
        for option in field.get("anyOf", [field]):
            for bound in ("minimum", "maximum"):
                if bound in option:
                    yield name, bound, option[bound]


@pytest.mark.parametrize(("dialect", "body"), DIALECTS, ids=IDS)
def test_published_bounds_are_the_enforced_ones(dialect: Dialect, body: dict[str, Any]) -> None:
    found = list(bounds(dialect))
    assert {name for name, _, _ in found} >= {"temperature", "top_p"}
    for name, bound, value in found:
        parse(dialect, {**body, name: value})
        beyond = value - 1 if bound == "minimum" else value + 1
        assert refusal(dialect, {**body, name: beyond}).startswith(f"{name}: expected")


LIMITS = {
    "anthropic": "max_tokens",
    "chat": "max_completion_tokens",
    "responses": "max_output_tokens",
}


@pytest.mark.parametrize(("dialect", "body"), DIALECTS, ids=IDS)
def test_no_bound_is_invented(dialect: Dialect, body: dict[str, Any]) -> None:
    limit = LIMITS[dialect.name]
    assert max(v for name, bound, v in bounds(dialect) if name == limit) >= 2**31 - 1
    assert parse(dialect, {**body, limit: 32_000}).max_tokens == 32_000
    assert refusal(dialect, {**body, limit: -1}) == f"{limit}: expected int >= 1"


@pytest.mark.parametrize(("dialect", "body"), DIALECTS, ids=IDS)
def test_unknown_fields_and_nulls_are_let_through(dialect: Dialect, body: dict[str, Any]) -> None:
    assert dialect.body_type is not None
    nulls = {n: None for n in dialect.body_type.__struct_fields__ if n not in body}
    unknown = {"context_management": {"edits": [1]}, "output_config": {"effort": "high"}}
    request = parse(dialect, {**body, **nulls, **unknown, "metadata": {"user_id": "{}"}})
    assert request.messages == [{"role": "user", "content": "hello"}]
    plain = parse(dialect, body)
    plain_fields = {f.name: getattr(plain, f.name) for f in fields(plain) if f.name != "body"}
    assert {name: getattr(request, name) for name in plain_fields} == plain_fields


@pytest.mark.parametrize(
    ("dialect", "body", "message"),
    [
        (0, {}, "the body: object missing required field messages"),
        (0, {"messages": []}, "messages: expected array of length >= 1"),
        (0, {"messages": [{"role": "user", "content": 5}]}, "messages.0.content: expected"),
        (
            0,
            {"messages": [{"role": "bot"}]},
            "messages.0.role: expected user, assistant, system, found 'bot'",
        ),
        (
            0,
            {"messages": [{"role": "user", "content": [{"text": "x"}]}]},
            "messages.0.content.0.type",
        ),
        (
            0,
            {"messages": [{"role": "user", "content": [{"type": "text", "text": 1}]}]},
            "messages.0.content.0.text: expected str",
        ),
        (
            0,
            {"messages": [{"role": "user", "content": [{"type": "image"}]}]},
            "leave out the image block",
        ),
        (0, {"messages": USER, "stream": "yes"}, "stream: expected bool"),
        (
            0,
            {"messages": USER, "tools": [{"input_schema": {}}]},
            "tools.0.name: expected a non-empty string",
        ),
        (1, {"messages": USER, "n": 2}, "n: only one choice"),
        (
            1,
            {"messages": USER, "tools": [{"type": "function"}]},
            "tools.0: object missing required field function",
        ),
        (2, {"input": []}, "input: expected array of length >= 1"),
        (2, {"input": [{"type": "item_reference", "id": "x"}]}, "items are not kept"),
        (2, {"input": "x", "previous_response_id": "r"}, "responses are not kept"),
    ],
)
def test_errors_name_the_place(dialect: int, body: dict[str, Any], message: str) -> None:
    assert message in refusal(DIALECTS[dialect][0], body)


def nested(levels: int) -> Any:
    value: Any = "end"
    for _ in range(levels):
        value = {"a": [value]}
    return value


@pytest.mark.parametrize("levels", [200, 400])
def test_what_is_nested_too_deeply_is_a_clear_400(levels: int) -> None:
    block = {"type": "novel", "x": nested(levels)}
    anthropic, chat, responses = (dialect for dialect, _ in DIALECTS)
    message = refusal(anthropic, {"messages": [{"role": "user", "content": [block]}]})
    assert "nest it less deeply" in message
    assert "nest it less deeply" in refusal(responses, {"input": [block]})
    deep = b'{"messages": [], "x": ' + b"[" * 200_000
    for dialect in (anthropic, chat, responses):
        with pytest.raises(BadRequest, match=r"not valid JSON|missing|length"):
            dialect.parse(deep)


def test_a_thinking_switch_is_no_error() -> None:
    anthropic, body = DIALECTS[0]
    for thinking in (True, "high", None, {"type": "adaptive", "display": "omitted", "x": 1}):
        request = parse(anthropic, {**body, "thinking": thinking})
        assert request.thinking == isinstance(thinking, dict)
        assert request.echo_thinking != isinstance(thinking, dict)
