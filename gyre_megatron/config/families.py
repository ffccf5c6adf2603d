"""Model families: how a checkpoint's config.json becomes an `Architecture`, and what its layers need
beyond it. The extension point `model.family`.

A family of your own is a class derived from `ModelFamily`. Open to it are the shape, Megatron's
configuration and the layers' modules. Not open are which parameters a layer has and what they are
called in the checkpoint: weights could not be loaded, published or saved; it is refused by name.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from gyre_megatron.errors import ConfigError
from gyre_megatron.extensions import ExtensionPoint

if TYPE_CHECKING:
    from gyre_megatron.config.model import Architecture

AUTO = "auto"


class ModelFamily:
    """What models of one kind have in common.

    Attributes:
        model_types: values of `model_type` in config.json that `auto` takes for this family.
        parts: which of `moe`, `mla` and `gdn` its architectures have; None: any.
        shared_expert: name of the module of shared experts in the checkpoint.
    """

    model_types: tuple[str, ...] = ()
    parts: tuple[str, ...] | None = None
    shared_expert: str = "shared_expert"

    def architecture(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """Fields of `Architecture`, without `family`: here those that most models name alike.

        Args:
            config: the checkpoint's config.json.

        Raises:
            ConfigError: the model needs what an `Architecture` cannot say.
        """
        rope = config.get("rope_parameters") or {}
        heads = config["num_attention_heads"]
        fields: dict[str, Any] = dict(
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
            num_mtp_layers=config.get("num_nextn_predict_layers", 0),
        )
        if num_experts := config.get("num_experts") or config.get("num_local_experts"):
            fields["moe"] = dict(
                num_experts=num_experts,
                experts_per_token=config["num_experts_per_tok"],
                intermediate_size=config["moe_intermediate_size"],
                shared_expert_intermediate_size=config.get("shared_expert_intermediate_size", 0),
                normalize_topk=config.get("norm_topk_prob", True),
            )
        return fields

    def transformer_fields(self, architecture: Architecture) -> dict[str, Any]:
        """Fields of Megatron's `TransformerConfig` that differ from what follows from the
        architecture, such as `activation_func`. Those of the parallel layout are not open."""
        return {}

    def layer_spec(self, spec: Any, config: Any, layer: int) -> Any:
        """Megatron's spec of one layer, changed or as it is.

        Args:
            spec: a `ModuleSpec` of ours, with tree attention.
            config: Megatron's `TransformerConfig`.
            layer: number of the layer in the model, from 0.
        """
        return spec


class Qwen3(ModelFamily):
    """Qwen3, dense."""

    model_types = ("qwen3",)
    parts = ()


class Qwen3Moe(ModelFamily):
    """Qwen3 with a mixture of experts."""

    model_types = ("qwen3_moe",)
    parts = ("moe",)


class Qwen3Next(ModelFamily):
    """Gated DeltaNet layers between layers of gated attention (Qwen3-Next, 3.5, 3.8)."""

    model_types = ("qwen3_next",)

    def architecture(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """See ModelFamily.architecture."""
        fields = super().architecture(config)
        if "moe" in fields:
            fields["moe"]["shared_expert_gate"] = True
        gdn = dict(
            num_key_heads=config["linear_num_key_heads"],
            num_value_heads=config["linear_num_value_heads"],
            key_head_dim=config["linear_key_head_dim"],
            value_head_dim=config["linear_value_head_dim"],
            conv_kernel=config.get("linear_conv_kernel_dim", 4),
            full_attention_interval=config.get("full_attention_interval", 4),
        )
        return fields | dict(attention_output_gate=True, gdn=gdn)


class DeepseekV3(ModelFamily):
    """Multi-head latent attention and sigmoid routing (DeepSeek-V3, Kimi-K2)."""

    model_types = ("deepseek_v3", "kimi_k2")
    parts = ("moe", "mla")
    shared_expert = "shared_experts"

    def architecture(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """See ModelFamily.architecture."""
        mla = dict(
            q_lora_rank=config.get("q_lora_rank"),
            kv_lora_rank=config["kv_lora_rank"],
            qk_nope_head_dim=config["qk_nope_head_dim"],
            qk_rope_head_dim=config["qk_rope_head_dim"],
            v_head_dim=config["v_head_dim"],
        )
        width = config["moe_intermediate_size"]
        moe = dict(
            num_experts=config["n_routed_experts"],
            experts_per_token=config["num_experts_per_tok"],
            intermediate_size=width,
            shared_expert_intermediate_size=width * (config.get("n_shared_experts") or 0),
            num_dense_layers=config.get("first_k_dense_replace", 0),
            normalize_topk=config.get("norm_topk_prob", True),
            score_function="sigmoid",
            expert_bias=True,
            num_groups=config.get("n_group") or 1,
            topk_groups=config.get("topk_group") or 1,
            routed_scaling_factor=config.get("routed_scaling_factor", 1.0),
        )
        return super().architecture(config) | dict(qk_norm=False, mla=mla, moe=moe)


FAMILIES: ExtensionPoint[Callable[[], ModelFamily]] = ExtensionPoint(
    key="model.family",
    parameters=(),
    builtin={
        "qwen3": Qwen3,
        "qwen3_moe": Qwen3Moe,
        "deepseek_v3": DeepseekV3,
        "qwen3_next": Qwen3Next,
    },
    returns="config.families.ModelFamily",
)


@lru_cache(maxsize=64)
def load_family(name: str) -> ModelFamily:
    """The family of that name; what a user's class or function makes is made once.

    Raises:
        ConfigError: there is none, or it is no `ModelFamily`.
    """
    family = FAMILIES.load(name)()
    if not isinstance(family, ModelFamily):
        raise ConfigError(
            f"{FAMILIES.key}: {name} made a {type(family).__name__}; derive it from "
            "gyre_megatron.config.families.ModelFamily"
        )
    return family


def family_name(config: Mapping[str, Any], name: str = AUTO) -> str:
    """The family of a checkpoint: `name`, or with `auto` the one that takes its model_type.

    Raises:
        ConfigError: none of ours does.
    """
    if name != AUTO:
        return name
    by_type = {kind: name for name in FAMILIES.builtin for kind in load_family(name).model_types}
    model_type = config.get("model_type", "")
    if model_type not in by_type:
        raise ConfigError(
            f"model_type {model_type!r} is not supported; supported: {sorted(by_type)}; a family of "
            f"your own is named by {FAMILIES.key}"
        )
    return by_type[model_type]
