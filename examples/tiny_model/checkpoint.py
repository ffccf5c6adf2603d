"""Makes a tiny random-weight Qwen3-MoE checkpoint in Hugging Face format, from a config and a seed.

Nothing is downloaded: the byte-level BPE tokenizer is trained on source files of Python's standard
library, and the weights are drawn from a seeded generator. The result is an ordinary checkpoint
directory that Megatron (through gyre_megatron.weights), SGLang and transformers all load.
"""

from __future__ import annotations

import importlib
import inspect
import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from gyre_megatron.config.model import TinyModelConfig

CHAT_TEMPLATE = Path(__file__).with_name("chat.jinja")
SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
ADDED_TOKENS = (
    "<tool_call>",
    "</tool_call>",
    "<think>",
    "</think>",
    "<tool_response>",
    "</tool_response>",
)
CORPUS_MODULES = (
    "argparse",
    "codecs",
    "inspect",
    "json.decoder",
    "textwrap",
    "datetime",
    "calendar",
    "statistics",
)


def ensure_checkpoint(config: TinyModelConfig, path: str | Path) -> Path:
    """Create the checkpoint at `path` unless the same config already made it; atomic, safe to
    repeat.

    Args:
        config: sizes and seed of the model.
        path: the checkpoint directory.

    Returns:
        The directory, holding config.json, model.safetensors and the tokenizer's files.
    """
    path = Path(path)
    stamp = path / "tiny_model.json"
    wanted = config.model_dump_json()
    if stamp.is_file() and stamp.read_text() == wanted:
        return path
    path.parent.mkdir(parents=True, exist_ok=True)
    staging = Path(tempfile.mkdtemp(prefix=path.name + ".", dir=path.parent))
    _write_tokenizer(config, staging)
    _write_model(config, staging)
    (staging / stamp.name).write_text(wanted)
    shutil.rmtree(path, ignore_errors=True)
    os.replace(staging, path)
    return path


def _corpus() -> Iterator[str]:
    for name in CORPUS_MODULES:
        yield inspect.getsource(importlib.import_module(name))


def _write_tokenizer(config: TinyModelConfig, path: Path) -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=config.vocab_size - len(ADDED_TOKENS),
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_corpus(), trainer)
    tokenizer.add_tokens(list(ADDED_TOKENS))
    template = CHAT_TEMPLATE.read_text()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        chat_template=template,
    )
    fast.save_pretrained(path)


def _write_model(config: TinyModelConfig, path: Path) -> None:
    import torch
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()

    fields: dict[str, Any] = dict(
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        intermediate_size=2 * config.hidden_size,
        num_hidden_layers=config.num_layers,
        num_attention_heads=config.num_attention_heads,
        num_key_value_heads=config.num_key_value_heads,
        head_dim=config.head_dim,
        max_position_embeddings=config.max_position_embeddings,
        num_experts=config.num_experts,
        num_experts_per_tok=config.experts_per_token,
        moe_intermediate_size=config.expert_intermediate_size,
        norm_topk_prob=True,
        decoder_sparse_step=1,
        tie_word_embeddings=False,
        initializer_range=config.initializer_range,
        eos_token_id=SPECIAL_TOKENS.index("<|im_end|>"),
        pad_token_id=None,  # a padding row would be all zeros, and RMSNorm makes its gradient explode
        bos_token_id=None,
    )
    hf_config = Qwen3MoeConfig(**fields)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.seed)
        model = Qwen3MoeForCausalLM(hf_config).to(getattr(torch, config.dtype))
    model.save_pretrained(path)
    written = json.loads((path / "config.json").read_text())
    written["architectures"] = ["Qwen3MoeForCausalLM"]
    (path / "config.json").write_text(json.dumps(written, indent=2))
