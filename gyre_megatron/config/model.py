"""What the model is: its architecture in one vocabulary for Megatron-Core, SGLang and Hugging
Face."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import ValidationError, model_validator

from gyre_megatron.config.base import Section, UserPath, one_line
from gyre_megatron.config.families import AUTO, family_name, load_family
from gyre_megatron.errors import ConfigError


class MoeArchitecture(Section):
    """Mixture-of-experts layers."""

    num_experts: int
    experts_per_token: int
    intermediate_size: int
    """Hidden width of one routed expert."""
    shared_expert_intermediate_size: int = 0
    """Total hidden width of the shared experts; 0 means there is none."""
    shared_expert_gate: bool = False
    """Whether the shared expert's output is scaled by a learned sigmoid gate (Qwen3-Next)."""
    num_dense_layers: int = 0
    """Leading layers that keep a dense MLP (DeepSeek's first_k_dense_replace)."""
    normalize_topk: bool = True
    score_function: Literal["softmax", "sigmoid"] = "softmax"
    expert_bias: bool = False
    """Whether the router has a load-balancing bias that takes no gradient (DeepSeek's
    e_score_correction_bias)."""
    num_groups: int = 1
    topk_groups: int = 1
    routed_scaling_factor: float = 1.0


class MlaArchitecture(Section):
    """Multi-head latent attention (DeepSeek-V3, Kimi-K2)."""

    q_lora_rank: int | None
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int


class GatedDeltaNetArchitecture(Section):
    """Gated DeltaNet layers with a full-attention layer every `full_attention_interval`
    (Qwen3-Next, 3.5, 3.8)."""

    num_key_heads: int
    num_value_heads: int
    key_head_dim: int
    value_head_dim: int
    conv_kernel: int = 4
    full_attention_interval: int = 4


class Architecture(Section):
    """The shape of a model, independent of how it is laid out on devices."""

    family: str
    """`qwen3`, `qwen3_moe`, `deepseek_v3`, `qwen3_next`, or your own as in `model.family`."""
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    intermediate_size: int
    """Hidden width of a dense MLP layer."""
    rms_norm_eps: float = 1e-6
    rope_theta: float = 1_000_000.0
    partial_rotary_factor: float = 1.0
    """Share of each head's dimensions that rotate."""
    max_position_embeddings: int = 32_768
    tie_word_embeddings: bool = False
    qk_norm: bool = True
    attention_output_gate: bool = False
    """Whether q_proj also yields a per-head output gate (Qwen3-Next full-attention layers)."""
    num_mtp_layers: int = 0
    """Multi-token-prediction layers appended after the decoder."""
    moe: MoeArchitecture | None = None
    mla: MlaArchitecture | None = None
    gdn: GatedDeltaNetArchitecture | None = None

    @model_validator(mode="after")
    def _consistent(self) -> Architecture:
        if self.mla is None and self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"num_attention_heads={self.num_attention_heads} is not a multiple of "
                f"num_key_value_heads={self.num_key_value_heads}"
            )
        wanted = load_family(self.family).parts
        found = tuple(part for part in ("moe", "mla", "gdn") if getattr(self, part) is not None)
        if wanted is not None and found != wanted:
            raise ValueError(f"family {self.family} has the parts {wanted}, found {found}")
        return self

    def is_moe_layer(self, layer: int) -> bool:
        """Whether decoder layer `layer` (0-based) has experts."""
        return self.moe is not None and layer >= self.moe.num_dense_layers

    def is_gdn_layer(self, layer: int) -> bool:
        """Whether decoder layer `layer` (0-based) is a Gated DeltaNet layer."""
        return self.gdn is not None and (layer + 1) % self.gdn.full_attention_interval != 0

    def padded_vocab_size(self, tp: int) -> int:
        """Rows of the embedding in training: the vocabulary padded so that tensor-parallel ranks
        hold equal shares."""
        return -(-self.vocab_size // tp) * tp

    @classmethod
    def from_hf(cls, config: Mapping[str, Any], family: str = AUTO) -> Architecture:
        """Read the fields of a Hugging Face `config.json`.

        Args:
            family: as `model.family`.

        Raises:
            ConfigError: no family takes this model, or its family cannot read it.
        """
        name = family_name(config, family)
        try:
            return cls(family=name, **load_family(name).architecture(config))
        except KeyError as error:
            raise ConfigError(f"config.json has no {error}, which family {name} needs") from None
        except ValidationError as error:
            raise ConfigError(f"family {name} cannot read config.json: {one_line(error)}") from None

    @classmethod
    def from_checkpoint(cls, path: str | Path, family: str = AUTO) -> Architecture:
        """Read `config.json` of a Hugging Face checkpoint directory.

        Raises:
            ConfigError: the directory or its config.json does not exist, or as `from_hf`.
        """
        file = Path(path) / "config.json"
        if not file.is_file():
            raise ConfigError(
                f"no checkpoint at {path}: {file} does not exist; set model.checkpoint to a "
                "directory "
                "in Hugging Face format (config.json, *.safetensors, tokenizer.json)"
            )
        return cls.from_hf(json.loads(file.read_text()), family)


class TinyModelConfig(Section):
    """A random-weight Qwen3-MoE made on the spot, for machines without accelerators."""

    seed: int = 0
    """Seed of the weights."""
    vocab_size: int = 512
    """Byte-level BPE: 256 bytes, the special tokens, and merges learnt from the standard library's
    sources."""
    hidden_size: int = 64
    num_layers: int = 2
    num_attention_heads: int = 4
    num_key_value_heads: int = 2
    head_dim: int = 16
    num_experts: int = 4
    experts_per_token: int = 2
    expert_intermediate_size: int = 64
    max_position_embeddings: int = 4096
    initializer_range: float = 0.05
    """Standard deviation of the weights; larger values give the random policy a clearer dependence
    on its context."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    maker: str = "examples/tiny_model/checkpoint.py:ensure_checkpoint"
    """What writes the checkpoint: `module:function` or `file.py:function`, called with this section
    and a directory."""

    def directory(self, root: Path) -> Path:
        """Where the runs below `root` keep this checkpoint."""
        digest = hashlib.sha256(self.model_dump_json().encode()).hexdigest()[:12]
        return root.resolve() / "models" / f"tiny-{digest}"


class ModelConfig(Section):
    """Which model is trained and served."""

    checkpoint: UserPath | None = None
    """Directory of a checkpoint in Hugging Face format; empty with `tiny` set, where the run makes
    its own."""
    tiny: TinyModelConfig | None = None
    """Make a tiny random checkpoint in the run directory in place of loading one."""
    family: str = AUTO
    """How its config.json is read and its layers are built: auto, by the model_type; one of ours; or
    your own `module:Class` of a config.families.ModelFamily."""
    architecture: Architecture | None = None
    """The model's shape, for planning without its checkpoint (`gyre plan`); a run refuses another
    checkpoint."""

    @model_validator(mode="after")
    def _one_source(self) -> ModelConfig:
        if self.checkpoint is not None and self.tiny is not None:
            raise ValueError(
                "set exactly one of model.checkpoint (a directory) and model.tiny (sizes and a "
                "seed); both are set"
            )
        return self

    def shape(self) -> Architecture:
        """The model's shape, from `architecture` or else from the checkpoint.

        Raises:
            ConfigError: neither is set, or the checkpoint cannot be read.
        """
        if self.architecture is not None:
            return self.architecture
        if self.checkpoint is not None:
            return Architecture.from_checkpoint(self.checkpoint, self.family)
        raise ConfigError(
            "the configuration has no model.architecture and no model.checkpoint; add a file of "
            "configs/models under base:, or name a checkpoint"
        )
