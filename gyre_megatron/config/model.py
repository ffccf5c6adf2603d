"""What the model is: its architecture in one vocabulary for Megatron-Core, SGLang and Hugging
Face."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any, Literal

from pydantic import model_validator

from gyre_megatron.config.base import Section, UserPath
from gyre_megatron.errors import ConfigError

Family = Literal["qwen3", "qwen3_moe", "deepseek_v3", "qwen3_next"]

_HF_FAMILIES: dict[str, Family] = {
    "qwen3": "qwen3",
    "qwen3_moe": "qwen3_moe",
    "deepseek_v3": "deepseek_v3",
    "kimi_k2": "deepseek_v3",
    "qwen3_next": "qwen3_next",
}


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

    family: Family
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
        wanted = {"qwen3": (False, False, False), "qwen3_moe": (True, False, False)}
        wanted |= {"deepseek_v3": (True, True, False), "qwen3_next": (True, False, True)}
        has = (self.moe is not None, self.mla is not None, self.gdn is not None)
        if self.family != "qwen3_next" and has != wanted[self.family]:
            raise ValueError(
                f"family {self.family} needs (moe, mla, gdn) present = {wanted[self.family]}, "
                f"found {has}"
            )
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
    def from_hf(cls, config: dict[str, Any]) -> Architecture:
        """Read the fields of a Hugging Face `config.json`.

        Raises:
            ConfigError: the model_type is not one of the supported families.
        """
        family = _HF_FAMILIES.get(config.get("model_type", ""))
        if family is None:
            raise ConfigError(
                f"model_type {config.get('model_type')!r} is not supported; supported: "
                f"{sorted(_HF_FAMILIES)}"
            )
        rope = config.get("rope_parameters") or {}
        heads = config["num_attention_heads"]
        fields: dict[str, Any] = dict(
            family=family,
            vocab_size=config["vocab_size"],
            hidden_size=config["hidden_size"],
            num_layers=config["num_hidden_layers"],
            num_attention_heads=heads,
            num_key_value_heads=config.get("num_key_value_heads", heads),
            head_dim=config.get("head_dim") or config["hidden_size"] // heads,
            intermediate_size=config.get("intermediate_size", 0),
            rms_norm_eps=config.get("rms_norm_eps", 1e-6),
            rope_theta=rope.get("rope_theta", config.get("rope_theta", 10_000.0)),
            partial_rotary_factor=rope.get(
                "partial_rotary_factor", config.get("partial_rotary_factor", 1.0)
            ),
            max_position_embeddings=config.get("max_position_embeddings", 32_768),
            tie_word_embeddings=config.get("tie_word_embeddings", False),
            qk_norm=family != "deepseek_v3",
            attention_output_gate=family == "qwen3_next",
            num_mtp_layers=config.get("num_nextn_predict_layers", 0),
        )
        if family == "deepseek_v3":
            fields["mla"] = MlaArchitecture(
                q_lora_rank=config.get("q_lora_rank"),
                kv_lora_rank=config["kv_lora_rank"],
                qk_nope_head_dim=config["qk_nope_head_dim"],
                qk_rope_head_dim=config["qk_rope_head_dim"],
                v_head_dim=config["v_head_dim"],
            )
            fields["moe"] = MoeArchitecture(
                num_experts=config["n_routed_experts"],
                experts_per_token=config["num_experts_per_tok"],
                intermediate_size=config["moe_intermediate_size"],
                shared_expert_intermediate_size=config["moe_intermediate_size"]
                * (config.get("n_shared_experts") or 0),
                num_dense_layers=config.get("first_k_dense_replace", 0),
                normalize_topk=config.get("norm_topk_prob", True),
                score_function="sigmoid",
                expert_bias=True,
                num_groups=config.get("n_group") or 1,
                topk_groups=config.get("topk_group") or 1,
                routed_scaling_factor=config.get("routed_scaling_factor", 1.0),
            )
        elif num_experts := config.get("num_experts") or config.get("num_local_experts"):
            fields["moe"] = MoeArchitecture(
                num_experts=num_experts,
                experts_per_token=config["num_experts_per_tok"],
                intermediate_size=config["moe_intermediate_size"],
                shared_expert_intermediate_size=config.get("shared_expert_intermediate_size", 0),
                shared_expert_gate=family == "qwen3_next",
                normalize_topk=config.get("norm_topk_prob", True),
            )
        if family == "qwen3_next":
            fields["gdn"] = GatedDeltaNetArchitecture(
                num_key_heads=config["linear_num_key_heads"],
                num_value_heads=config["linear_num_value_heads"],
                key_head_dim=config["linear_key_head_dim"],
                value_head_dim=config["linear_value_head_dim"],
                conv_kernel=config.get("linear_conv_kernel_dim", 4),
                full_attention_interval=config.get("full_attention_interval", 4),
            )
        return cls(**fields)

    @classmethod
    def from_checkpoint(cls, path: str | Path) -> Architecture:
        """Read `config.json` of a Hugging Face checkpoint directory.

        Raises:
            ConfigError: the directory or its config.json does not exist.
        """
        file = Path(path) / "config.json"
        if not file.is_file():
            raise ConfigError(
                f"no checkpoint at {path}: {file} does not exist; set model.checkpoint to a "
                "directory "
                "in Hugging Face format (config.json, *.safetensors, tokenizer.json)"
            )
        return cls.from_hf(json.loads(file.read_text()))


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
            return Architecture.from_checkpoint(self.checkpoint)
        raise ConfigError(
            "the configuration has no model.architecture and no model.checkpoint; add a file of "
            "configs/models under base:, or name a checkpoint"
        )
