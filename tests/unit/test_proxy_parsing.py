"""Sampled text to events, tool formats, roles, and token text."""

from __future__ import annotations

import itertools
import json
import random
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gyre_megatron.errors import TemplateError
from gyre_megatron.proxy.call_roles import PROFILES
from gyre_megatron.proxy.dialects.anthropic import AnthropicMessages
from gyre_megatron.text.conversation import CallRequest, answer_key, units_of
from gyre_megatron.text.output_parser import OutputEvent, OutputParser
from gyre_megatron.text.token_text import TokenDecoder, TokenText
from gyre_megatron.text.tool_formats import FORMATS
from tests.support.checkpoints import make_checkpoint

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "f",
            "parameters": {
                "type": "object",
                "properties": {"n": {"type": "integer"}, "s": {"type": "string"}},
            },
        },
    }
]


def parse(
    text: str, tool_format: str = "hermes", cuts: list[int] | None = None, **options: object
) -> list[OutputEvent]:
    """Events of a text fed in pieces, runs of text joined."""
    parser = OutputParser(FORMATS[tool_format], TOOLS, **options)
    events: list[OutputEvent] = []
    edges = [0, *sorted(cuts or []), len(text)]
    for start, end in itertools.pairwise(edges):
        events += parser.feed(text[start:end])
    events += parser.finish()
    joined: list[OutputEvent] = []
    for event in events:
        if joined and joined[-1].kind == event.kind != "tool":
            joined[-1] = OutputEvent(event.kind, joined[-1].text + event.text)
        else:
            joined.append(event)
    return joined


CALL = '<tool_call>\n{"name": "f", "arguments": {"n": 1}}\n</tool_call>'


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("hello", [("text", "hello")]),
        ("  hello \n", [("text", "  hello \n")]),
        ("", []),
        ("a\n" + CALL, [("text", "a"), ("tool", '{"n": 1}')]),
        (CALL + "\n" + CALL + "\n", [("tool", '{"n": 1}'), ("tool", '{"n": 1}')]),
        ("<think>\nx\n</think>\n\nhi", [("thinking", "\nx\n"), ("text", "hi")]),
        ("<think>never closed", [("thinking", "never closed")]),
        ("say <think> later", [("text", "say <think> later")]),
        ("<tool_call>\nbroken\n</tool_call>", [("text", "<tool_call>\nbroken\n</tool_call>")]),
        ("<tool_call>\nopen", [("text", "<tool_call>\nopen")]),
        ('<tool_call>{"name": "", "arguments": {}}</tool_call>', None),
        ('<tool_call>{"name": "f", "arguments": [1]}</tool_call>', None),
        ("a < b <tool", [("text", "a < b <tool")]),
    ],
)
def test_events(text: str, expected: list | None) -> None:
    found = [(event.kind, event.text) for event in parse(text)]
    assert found == ([("text", text)] if expected is None else expected)


def test_stop_strings_cut_and_may_span_pieces() -> None:
    for cut in range(1, 12):
        parser = OutputParser(None, [], stop=["END"])
        events = [
            *parser.feed("hello END more"[:cut]),
            *parser.feed("hello END more"[cut:]),
            *parser.finish(),
        ]
        assert "".join(event.text for event in events) == "hello " and parser.stopped_by == "END"


def test_a_prompt_that_opened_thinking() -> None:
    found = parse("plan\n</think>\n\nanswer", thinking=True)
    assert found == [OutputEvent("thinking", "plan\n"), OutputEvent("text", "answer")]


PARTS = [
    "hello ",
    CALL,
    "<think>",
    "</think>",
    "<tool_call>",
    "</tool_call>",
    "\n",
    "<",
    "STOP",
    "x <tool_c",
    "é",
]


@settings(max_examples=300, deadline=None, derandomize=True)
@given(
    parts=st.lists(st.sampled_from(PARTS), max_size=8),
    seed=st.integers(0, 2**16),
    thinking=st.booleans(),
)
def test_events_do_not_depend_on_how_text_was_cut(
    parts: list[str], seed: int, thinking: bool
) -> None:
    text = "".join(parts)
    rng = random.Random(seed)
    cuts = [rng.randint(0, len(text)) for _ in range(rng.randint(0, 12))]
    options = {"stop": ["STOP"], "thinking": thinking}
    assert parse(text, cuts=cuts, **options) == parse(text, **options)


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ("<function=f>\n<parameter=n>\n3\n</parameter>\n</function>", [("f", {"n": 3})]),
        ("<function=f>\n<parameter=s>\n3\n</parameter>\n</function>", [("f", {"s": "3"})]),
        (
            "<function=f>\n<parameter=s>\na\n\nb\n</parameter>\n</function>",
            [("f", {"s": "a\n\nb"})],
        ),
        ("<function=f>\n<parameter=n>\nmany\n</parameter>\n</function>", [("f", {"n": "many"})]),
        ("<function=f>\n</function>", [("f", {})]),
        ("<function=f>junk</function>", []),
        ("<function=f>", []),
        ('{"name": "f"}', []),
    ],
)
def test_qwen3_coder_calls(body: str, expected: object) -> None:
    assert FORMATS["qwen3_coder"].parse(body, TOOLS) == expected


@pytest.fixture(scope="module")
def tokens(tmp_path_factory: pytest.TempPathFactory) -> TokenText:
    return TokenText(make_checkpoint(tmp_path_factory.mktemp("checkpoint")))


@settings(max_examples=200, deadline=None, derandomize=True)
@given(ids=st.lists(st.integers(0, 600), max_size=30), seed=st.integers(0, 999))
def test_decoding_a_stream_equals_decoding_at_once(
    tokens: TokenText, ids: list[int], seed: int
) -> None:
    rng, decoder, text, place = random.Random(seed), TokenDecoder(tokens), "", 0
    while place < len(ids):
        step = rng.randint(1, 5)
        text += decoder.feed(ids[place : place + step])
        place += step
    assert text + decoder.finish() == tokens.decode(ids)


@settings(max_examples=200, deadline=None, derandomize=True)
@given(text=st.text(alphabet=st.characters(exclude_categories=["Cs"]), max_size=40))
def test_encoded_text_decodes_to_itself(tokens: TokenText, text: str) -> None:
    assert tokens.decode(tokens.encode(text), skip_special=False) == text


def test_a_tokenizer_that_is_not_byte_level_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TemplateError, match=r"tokenizer\.json"):
        TokenText(tmp_path)
    make_checkpoint(tmp_path)
    file = tmp_path / "tokenizer.json"
    file.write_text(
        file.read_text().replace('"decoder":{"type":"ByteLevel"', '"decoder":{"type":"Fuse"')
    )
    text = file.read_text()
    if '"Fuse"' not in text:
        file.write_text(text.replace('"type": "ByteLevel"', '"type": "Fuse"'))
    with pytest.raises(TemplateError, match="byte-level BPE"):
        TokenText(tmp_path)


def claude(
    system: str = "You are an agent.", tools: bool = True, last: str = "go", turns: int = 3
) -> CallRequest:
    messages = [
        {"role": "user" if i % 2 == 0 else "assistant", "content": "x"} for i in range(turns - 1)
    ]
    body = {
        "model": "m",
        "system": system,
        "messages": [*messages, {"role": "user", "content": last}],
    }
    if tools:
        body["tools"] = [{"name": "t", "input_schema": {}}]
    return AnthropicMessages().parse(json.dumps(body).encode())


SESSION = {"x-claude-code-session-id": "s"}
AGENT = {**SESSION, "x-claude-code-agent-id": "a"}
COMPACT = (
    "Answer with text only, call no tools at all. Write a detailed summary of the conversation."
)


@pytest.mark.parametrize(
    ("request_", "headers", "role"),
    [
        (claude(), SESSION, "main"),
        (claude(), AGENT, "sub_agent"),
        (claude(last=COMPACT), SESSION, "main_summary"),
        (claude(last=COMPACT), AGENT, "sub_agent_summary"),
        (claude(), {**SESSION, "x-claude-code-request-class": "compaction"}, "main_summary"),
        (claude(), {**AGENT, "x-claude-code-request-class": "compaction"}, "sub_agent_summary"),
        (claude(), {**SESSION, "x-claude-code-request-class": "subagent"}, "sub_agent"),
        (
            claude(system="x-anthropic-billing-header: cc_is_subagent=true;\nYou"),
            SESSION,
            "sub_agent",
        ),
        (claude(system="Write a title.", tools=False, turns=1), SESSION, "auxiliary"),
        (claude(), {**SESSION, "x-claude-code-request-class": "auxiliary"}, "auxiliary"),
        (claude(tools=False, turns=1), {}, "main"),
    ],
)
@pytest.mark.parametrize("profile", ["claude_code", "generic"])
def test_roles_of_claude_code(
    request_: CallRequest, headers: dict[str, str], role: str, profile: str
) -> None:
    assert PROFILES[profile].role_of(request_, headers) == role


@pytest.mark.parametrize(
    ("headers", "role"),
    [
        ({}, "main"),
        ({"x-openai-subagent": "collab_spawn", "x-codex-parent-thread-id": "p"}, "sub_agent"),
        (
            {"x-codex-turn-metadata": '{"request_kind": "compaction", "thread_source":"user"}'},
            "main_summary",
        ),
        (
            {
                "x-codex-turn-metadata": '{"request_kind":"compaction"}',
                "x-codex-parent-thread-id": "p",
            },
            "sub_agent_summary",
        ),
    ],
)
@pytest.mark.parametrize("profile", ["codex", "generic"])
def test_roles_of_codex(headers: dict[str, str], role: str, profile: str) -> None:
    assert (
        PROFILES[profile].role_of(
            CallRequest("responses", "m", [{"role": "user", "content": "x"}]), headers
        )
        == role
    )


def test_mini_swe_agent_only_has_a_main_agent() -> None:
    assert PROFILES["mini_swe_agent"].role_of(claude(last=COMPACT), AGENT) == "main"


def test_attribution_lines_do_not_matter() -> None:
    def keys(version: str) -> list[bytes]:
        system = [
            {"type": "text", "text": f"x-anthropic-billing-header: cc_version={version};"},
            {"type": "text", "text": "S"},
        ]
        return [unit.key for unit in units_of(claude(system=system))]

    assert keys("1") == keys("2")


def test_answers_with_different_meaning_have_different_keys() -> None:
    keys = {
        answer_key("a", []),
        answer_key("b", []),
        answer_key("a", [("f", {})]),
        answer_key("a", [("g", {})]),
        answer_key("a", [("f", {"n": 1})]),
        answer_key("a", [("f", {}), ("f", {})]),
        answer_key("", []),
    }
    assert len(keys) == 7
    assert answer_key("", []) == answer_key("(no content)", []) == answer_key(" \n", [])
    assert answer_key("a", [("f", '{"x": 1, "y": 2}')]) == answer_key(
        "a ", [("f", {"y": 2, "x": 1})]
    )
