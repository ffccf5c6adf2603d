"""Chat templates as models publish them (shipped by trl, see install_clients.sh): proved, or
refused by name."""

from __future__ import annotations

from pathlib import Path

import pytest

from gyre_megatron.errors import TemplateError
from gyre_megatron.text.chat_template import ChatTemplate
from gyre_megatron.text.template_proof import prove_or_degrade
from gyre_megatron.text.token_text import TokenText
from gyre_megatron.text.tool_formats import detect_format
from tests.support.checkpoints import make_checkpoint

pytestmark = [pytest.mark.e2e, pytest.mark.clients]

CLIENTS = Path(__file__).with_name("clients")
TOKENS = {"bos_token": "<|endoftext|>", "eos_token": "<|im_end|>"}


def published(name: str) -> ChatTemplate:
    found = list(CLIENTS.glob(f".venv/lib/*/site-packages/trl/chat_templates/{name}.jinja"))
    if not found:
        pytest.fail(f"the template {name} is missing; run: bash tests/e2e/install_clients.sh")
    return ChatTemplate(found[0].read_text(), name, TOKENS)


@pytest.fixture(scope="module")
def tokens(tmp_path_factory: pytest.TempPathFactory) -> TokenText:
    return TokenText(make_checkpoint(tmp_path_factory.mktemp("checkpoint")))


@pytest.mark.parametrize(
    ("name", "tool_format", "mid_system"),
    [
        ("qwen2_5", "hermes", True),
        ("qwen3", "hermes", True),
        ("qwen3_instruct_2507", "hermes", True),
        ("qwen3_5_think", "qwen3_coder", False),
        ("qwen3_5_nothink", "qwen3_coder", False),
        ("qwen3_6", "qwen3_coder", False),
        ("qwen3_8", "qwen3_coder", False),
        ("nemotron_3_super", "qwen3_coder", True),
        ("llama3", "none", True),
    ],
)
def test_proved(name: str, tool_format: str, mid_system: bool, tokens: TokenText) -> None:
    template = published(name)
    # The ids are compared where the tokenizer of the tests knows the template's turn marks.
    known = tokens if "<|im_start|>" in template.source else None
    assert prove_or_degrade(template, known, max_steps=2).num_conversations > 40
    assert detect_format(template.source) == tool_format
    assert template.supports_mid_system == mid_system


@pytest.mark.parametrize("name", ["glm4moe", "gptoss", "gemma3", "phi3"])
def test_refused_by_name(name: str) -> None:
    with pytest.raises(TemplateError, match=name):
        prove_or_degrade(published(name), None, max_steps=2)
