"""Checkpoints without weights: a byte-level BPE trained on the standard library, a chat template, a
config."""

from __future__ import annotations

import codecs
import inspect
import json
import textwrap
from functools import lru_cache
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

TEMPLATES = Path(__file__).with_name("templates")
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
VISIBLE = [
    "<tool_call>",
    "</tool_call>",
    "<think>",
    "</think>",
    "<tool_response>",
    "</tool_response>",
]


@lru_cache(maxsize=1)
def tokenizer_json(vocabulary: int = 500) -> str:
    """A tokenizer file; some ids of a model with 512 rows are left without a token."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    tokenizer.train_from_iterator(
        [inspect.getsource(m) for m in (codecs, inspect, json, textwrap)], trainer
    )
    tokenizer.add_tokens([AddedToken(token, special=False, normalized=False) for token in VISIBLE])
    return tokenizer.to_str()


def make_checkpoint(folder: Path, template: str = "chatml", context_length: int = 8192) -> Path:
    """Write tokenizer, template and config into `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tokenizer.json").write_text(tokenizer_json())
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|im_end|>"}))
    (folder / "chat_template.jinja").write_text((TEMPLATES / f"{template}.jinja").read_text())
    (folder / "config.json").write_text(json.dumps({"max_position_embeddings": context_length}))
    return folder
