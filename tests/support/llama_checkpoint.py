"""A tiny random Llama with the tokenizer and chat template of the demo's model: what a user's
`model.tiny.maker` might make."""

from __future__ import annotations

import json
from pathlib import Path

from gyre_megatron.config.model import TinyModelConfig
from gyre_megatron.extensions import load_reference


def make(config: TinyModelConfig, path: Path) -> Path:
    """Make the demo's model, and put a Llama of its sizes in the place of its weights."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    ours = load_reference("examples/tiny_model/checkpoint.py:ensure_checkpoint", "model.tiny.maker")
    ours(config, path)
    (path / "model.safetensors").unlink()
    sizes = LlamaConfig(
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        intermediate_size=2 * config.hidden_size,
        num_hidden_layers=config.num_layers,
        num_attention_heads=config.num_attention_heads,
        num_key_value_heads=config.num_key_value_heads,
        head_dim=config.head_dim,
        max_position_embeddings=config.max_position_embeddings,
        initializer_range=config.initializer_range,
        tie_word_embeddings=False,
        pad_token_id=None,
        bos_token_id=None,
        eos_token_id=2,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.seed)
        LlamaForCausalLM(sizes).save_pretrained(path)
    written = json.loads((path / "config.json").read_text())
    assert written["model_type"] == "llama"
    return path
