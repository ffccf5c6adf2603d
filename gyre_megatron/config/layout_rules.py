"""Which parallel layouts can work, in one place: pure arithmetic on sizes.

Entered from three sides, so that none accepts what another refuses: `gyre plan` (weights.forecast),
a run's start (runtime.checks) and the trainer (training.parallel). A rule that Megatron-Core or
SGLang would apply later is here as well, because they apply it after engines were started.
"""

from __future__ import annotations

from gyre_megatron.config.model import Architecture
from gyre_megatron.config.training import TrainingConfig
from gyre_megatron.errors import ConfigError

_MAX_CHOICES = 12
"""Divisors named in an error message; more are of no help."""


def check_training(
    training: TrainingConfig, architecture: Architecture, ranks_per_cell: int
) -> None:
    """Check that a cell can train the model in this layout.

    Raises:
        ConfigError: it cannot; the message names both numbers and the keys to change.
    """
    check_trainable(architecture)
    if ranks_per_cell % training.min_ranks:
        raise ConfigError(
            f"a cell has {ranks_per_cell} ranks, training.tp*pp*cp = "
            f"{training.tp}*{training.pp}*{training.cp} = {training.min_ranks} does not divide it; "
            f"change these keys, or give each cell a multiple of {training.min_ranks} ranks"
        )
    _check_attention(training, architecture)
    _check_stages(training, architecture)
    _check_widths(training, architecture)
    _check_experts(training, architecture, ranks_per_cell)
    _check_gated_delta_net(training, architecture)


def check_trainable(architecture: Architecture) -> None:
    """Check that the trainer has layers for this model, in any layout.

    Raises:
        ConfigError: it has none.
    """
    if architecture.mla is not None:
        raise ConfigError(
            f"model family {architecture.family} cannot be trained: there is no tree attention for "
            "multi-head latent attention; train qwen3, qwen3_moe or qwen3_next"
        )
    moe = architecture.moe
    if moe is None:
        return
    if not moe.normalize_topk:
        raise ConfigError(
            "norm_topk_prob=False cannot be trained: the router normalises over the chosen experts"
        )
    if moe.experts_per_token == 1 and moe.score_function == "softmax":
        raise ConfigError(
            "num_experts_per_tok=1 cannot be trained with a softmax router: normalised over one "
            "expert, its probability is 1 and carries no gradient"
        )


def check_serving(architecture: Architecture, tp: int, ep: int = 1, attention_dp: int = 1) -> None:
    """Check that an SGLang server can hold the model in this layout.

    Args:
        tp: ranks of the server.
        ep: expert-parallel ranks among them.
        attention_dp: groups of ranks that each serve their own requests' attention.

    Raises:
        ConfigError: it cannot; the message names both numbers.
    """
    for name, size in (("ep", ep), ("dp", attention_dp)):
        if tp % size:
            raise ConfigError(
                f"engine.{name}={size} does not divide engine.tp={tp}; choose one of "
                f"{_divisors(tp)}"
            )
    attention_tp = tp // attention_dp
    attention_key = "engine.tp" if attention_dp == 1 else "engine.tp/dp"
    _divides(attention_key, attention_tp, "attention heads", architecture.num_attention_heads)
    kv_heads = architecture.num_key_value_heads
    if architecture.mla is None and attention_tp % kv_heads and kv_heads % attention_tp:
        raise ConfigError(
            f"{attention_key}={attention_tp} neither divides the model's {kv_heads} key-value "
            "heads nor is a multiple of them"
        )
    if architecture.gdn is not None:
        _divides(attention_key, attention_tp, "linear key heads", architecture.gdn.num_key_heads)
        values = architecture.gdn.num_value_heads
        _divides(attention_key, attention_tp, "linear value heads", values)
    if _has_dense_layers(architecture):
        _divides("engine.tp", tp, "MLP width (intermediate_size)", architecture.intermediate_size)
    moe = architecture.moe
    if moe is None:
        if ep > 1:
            raise ConfigError(f"engine.ep={ep}, but the model has no experts; set engine.ep to 1")
        return
    _divides("engine.ep", ep, "experts", moe.num_experts)
    _divides("engine.tp/ep", tp // ep, "expert width", moe.intermediate_size)
    _divides("engine.tp", tp, "shared expert width", moe.shared_expert_intermediate_size)


def check_engine_in_cell(engine_tp: int, ranks_per_cell: int) -> None:
    """Check that engines tile the ranks of a cell.

    Raises:
        ConfigError: they do not.
    """
    if ranks_per_cell % engine_tp:
        raise ConfigError(
            f"engine.tp={engine_tp} does not divide the {ranks_per_cell} ranks of a cell; choose "
            f"one of {_divisors(ranks_per_cell)}"
        )


def _check_attention(training: TrainingConfig, architecture: Architecture) -> None:
    _divides("training.tp", training.tp, "attention heads", architecture.num_attention_heads)
    kv_heads = architecture.num_key_value_heads
    note = " (the trainer does not replicate key-value heads)" if training.tp > kv_heads else ""
    _divides("training.tp", training.tp, "key-value heads", kv_heads, note)


def _check_stages(training: TrainingConfig, architecture: Architecture) -> None:
    chunks = training.pp * (training.vpp or 1)
    key = "training.pp" if training.vpp is None else "training.pp*vpp"
    note = " (the trainer takes stages of equal length only)"
    _divides(key, chunks, "layers", architecture.num_layers, note)


def _check_widths(training: TrainingConfig, architecture: Architecture) -> None:
    if _has_dense_layers(architecture):
        width = architecture.intermediate_size
        _divides("training.tp", training.tp, "MLP width (intermediate_size)", width)
    if (moe := architecture.moe) is not None:
        shared = moe.shared_expert_intermediate_size
        _divides("training.tp", training.tp, "shared expert width", shared)
        _divides("training.etp", training.expert_tp, "expert width", moe.intermediate_size)


def _check_experts(
    training: TrainingConfig, architecture: Architecture, ranks_per_cell: int
) -> None:
    if architecture.moe is None:
        for name, size in (("ep", training.ep), ("etp", training.etp or 1)):
            if size > 1:
                raise ConfigError(
                    f"training.{name}={size}, but {architecture.family} has no experts; remove "
                    f"training.{name}"
                )
        return
    _divides("training.ep", training.ep, "experts", architecture.moe.num_experts)
    ranks_per_stage = ranks_per_cell // training.pp
    if ranks_per_stage % (training.ep * training.expert_tp):
        how = "" if training.etp is not None else " (training.etp is unset and follows training.tp)"
        raise ConfigError(
            f"training.ep*etp = {training.ep}*{training.expert_tp} = "
            f"{training.ep * training.expert_tp} does not divide the {ranks_per_stage} ranks of a "
            f"pipeline stage{how}; lower training.ep or training.etp, or give each cell more ranks"
        )
    _needs_sequence_parallel(training, "mixture-of-experts", "Megatron's router")


def _check_gated_delta_net(training: TrainingConfig, architecture: Architecture) -> None:
    gdn = architecture.gdn
    if gdn is None:
        return
    shards = training.tp * training.cp
    _divides("training.tp*cp", shards, "linear key heads", gdn.num_key_heads)
    _divides("training.tp*cp", shards, "linear value heads", gdn.num_value_heads)
    _needs_sequence_parallel(training, "Gated DeltaNet", "its output norm")


def _needs_sequence_parallel(training: TrainingConfig, what: str, why: str) -> None:
    if training.tp > 1 and not training.uses_sequence_parallel:
        raise ConfigError(
            f"training.sequence_parallel=false, but {what} with training.tp={training.tp} needs it "
            f"({why}); remove training.sequence_parallel, or set training.tp to 1"
        )


def _has_dense_layers(architecture: Architecture) -> bool:
    return not all(architecture.is_moe_layer(layer) for layer in range(architecture.num_layers))


def _divides(key: str, size: int, what: str, count: int, note: str = "") -> None:
    if count % size:
        raise ConfigError(
            f"{key}={size} does not divide the model's {count} {what}{note}; choose one of "
            f"{_divisors(count)}"
        )


def _divisors(count: int) -> str:
    """The divisors of `count` as text, cut where a person would stop reading."""
    found = [divisor for divisor in range(1, count + 1) if count % divisor == 0]
    shown = ", ".join(map(str, found[:_MAX_CHOICES]))
    return f"[{shown}]" if len(found) <= _MAX_CHOICES else f"[{shown}, ...]"
