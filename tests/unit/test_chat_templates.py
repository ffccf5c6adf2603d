"""Chat templates piece by piece: equal to the whole, and to transformers' own rendering."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from gyre_megatron.errors import TemplateError
from gyre_megatron.text.chat_template import ChatTemplate
from gyre_megatron.text.conversation import CallRequest, units_of
from gyre_megatron.text.template_proof import conversations, prove, prove_or_degrade, render_units
from gyre_megatron.text.token_text import TokenText
from tests.support.checkpoints import TEMPLATES, make_checkpoint

SPECIAL = {"bos_token": "<|endoftext|>", "eos_token": "<|im_end|>"}


def load(name: str, **variables: bool) -> ChatTemplate:
    return ChatTemplate((TEMPLATES / f"{name}.jinja").read_text(), name, SPECIAL, variables)


@pytest.fixture(scope="module")
def tokens(tmp_path_factory: pytest.TempPathFactory) -> TokenText:
    return TokenText(make_checkpoint(tmp_path_factory.mktemp("checkpoint")))


@pytest.mark.parametrize(
    ("name", "variables", "keeps_answers"),
    [
        ("chatml", {}, True),
        ("qwen3", {}, True),
        ("qwen3", {"enable_thinking": False}, True),
        ("qwen3_coder", {}, True),
        ("hermes", {}, True),
        ("qwen3_8", {}, False),
    ],
)
def test_pieces_equal_the_whole(
    name: str, variables: dict, keeps_answers: bool, tokens: TokenText
) -> None:
    template = load(name, **variables)
    proof = prove_or_degrade(template, tokens, max_steps=2)
    assert template.supports_tools and template.supports_parallel_tools
    assert proof.num_conversations >= 50
    assert proof.keeps_answers == keeps_answers


def test_mid_list_system_messages_are_given_up_where_the_template_refuses_them(
    tokens: TokenText,
) -> None:
    assert load("qwen3").supports_mid_system
    assert not load("qwen3_8").supports_mid_system


def test_a_template_that_rewrites_earlier_messages_is_refused_by_name(tokens: TokenText) -> None:
    with pytest.raises(TemplateError, match="unstable"):
        prove(load("unstable"), tokens)


def test_the_proof_sees_a_piece_that_is_wrong(
    tokens: TokenText, monkeypatch: pytest.MonkeyPatch
) -> None:
    template = load("qwen3")
    unit_text = template.unit_text
    monkeypatch.setattr(
        template,
        "unit_text",
        lambda previous, messages: unit_text(previous, messages).replace("tool", "tol"),
    )
    with pytest.raises(TemplateError, match="cannot be rendered incrementally"):
        prove(template, tokens, max_steps=1)


@pytest.mark.parametrize("name", ["qwen3", "qwen3_coder", "hermes", "chatml"])
def test_rendering_equals_transformers(name: str, tmp_path: Path) -> None:
    transformers = pytest.importorskip(
        "transformers", reason="compares with transformers, which is not installed"
    )
    folder = make_checkpoint(tmp_path, name)
    config = {"tokenizer_class": "PreTrainedTokenizerFast", **SPECIAL}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    tokenizer = transformers.PreTrainedTokenizerFast.from_pretrained(folder)
    template = ChatTemplate.from_checkpoint(folder)
    for messages, tools in conversations(template, 1):
        expected = tokenizer.apply_chat_template(
            messages, tools=tools or None, tokenize=False, add_generation_prompt=True
        )
        assert template.render(messages, tools, generation_prompt=True) == expected


def test_a_checkpoint_without_a_template_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TemplateError, match=r"add chat_template\.jinja"):
        ChatTemplate.from_checkpoint(tmp_path)


@pytest.mark.parametrize("name", ["qwen3", "qwen3_coder", "hermes", "chatml"])
def test_no_text_of_a_conversation_is_taken_for_a_stand_in(name: str) -> None:
    template = load(name)
    text = " ".join(
        f"\u241egyre-{role}\u241e" for role in ("user", "assistant", "argument", "tool")
    )
    call = {
        "type": "function",
        "id": "c1",
        "function": {"name": "look", "arguments": {"path": text}},
    }
    messages = [
        {"role": "user", "content": text},
        {"role": "assistant", "content": text, "tool_calls": [call]},
        {"role": "tool", "content": text, "tool_call_id": "c1", "name": "look"},
        {"role": "assistant", "content": text},
        {"role": "user", "content": text},
    ]
    units = units_of(CallRequest("chat", "m", messages))
    assert "".join(render_units(template, units)) == template.render(messages)


def test_a_broken_template_is_named() -> None:
    with pytest.raises(TemplateError, match="chat template broken is not valid jinja"):
        ChatTemplate("{% for %}", "broken")
