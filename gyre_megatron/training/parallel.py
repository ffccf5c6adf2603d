"""Megatron's process groups inside one cell, from the training config."""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist
from megatron.core import parallel_state as mpu
from megatron.core import tensor_parallel

from gyre_megatron.config.model import Architecture
from gyre_megatron.config.training import TrainingConfig
from gyre_megatron.errors import ConfigError
from gyre_megatron.weights.parallel import Parallelism, ParallelRank


def initialize(config: TrainingConfig, architecture: Architecture) -> None:
    """Create the model-parallel groups of this cell (the default world), once per process.

    Raises:
        ConfigError: the layout does not fit the cell's ranks or the model's shape.
    """
    check_layout(config, architecture, dist.get_world_size())
    if not mpu.model_parallel_is_initialized():
        mpu.initialize_model_parallel(
            config.tp,
            config.pp,
            config.vpp,
            context_parallel_size=config.cp,
            expert_model_parallel_size=config.ep,
            expert_tensor_parallel_size=config.expert_tp if architecture.moe else None,
        )
    tensor_parallel.model_parallel_cuda_manual_seed(config.seed, force_reset_rng=True)
    if torch.cuda.is_available():
        torch.backends.cuda.matmul.allow_tf32 = False


def check_layout(config: TrainingConfig, architecture: Architecture, num_ranks: int) -> None:
    """Refuse a layout that Megatron would refuse later or, worse, not at all."""
    size = config.min_ranks
    if num_ranks % size:
        raise ConfigError(
            f"a cell of {num_ranks} ranks cannot hold tp*pp*cp = {size}; change training.tp/pp/cp"
        )
    _divides("tp", config.tp, "num_attention_heads", architecture.num_attention_heads)
    if architecture.mla is None:
        _divides("tp", config.tp, "num_key_value_heads", architecture.num_key_value_heads)
    stages = config.pp * (config.vpp or 1)
    _divides("pp*vpp", stages, "num_layers", architecture.num_layers)
    if architecture.moe is not None:
        _divides("ep", config.ep, "num_experts", architecture.moe.num_experts)
        _divides(
            "ep*etp",
            config.ep * config.expert_tp,
            "ranks of a pipeline stage",
            num_ranks // config.pp,
        )
        if config.tp > 1 and not config.uses_sequence_parallel:
            raise ConfigError(
                "mixture-of-experts with tp > 1 needs training.sequence_parallel (Megatron's "
                "router)"
            )
    elif config.ep > 1:
        raise ConfigError(
            f"training.ep={config.ep} but the model has no experts; set training.ep to 1"
        )
    if architecture.gdn is not None:
        heads = architecture.gdn.num_key_heads
        _divides("tp*cp", config.tp * config.cp, "linear_num_key_heads", heads)
        if config.tp > 1 and not config.uses_sequence_parallel:
            raise ConfigError(
                "Gated DeltaNet with tp > 1 needs training.sequence_parallel (for its output norm)"
            )


def _divides(name: str, divisor: int, what: str, number: int) -> None:
    if number % divisor:
        raise ConfigError(
            f"training.{name} = {divisor} does not divide {what} = {number}; choose a divisor of "
            f"{number}"
        )


def parallel_rank(config: TrainingConfig, architecture: Architecture) -> ParallelRank:
    """This rank's place in the cell, in the weights room's words."""
    dp = dist.get_world_size() // config.min_ranks
    expert_tp = config.expert_tp if architecture.moe else None
    layout = Parallelism(
        tp=config.tp,
        pp=config.pp,
        vpp=config.vpp or 1,
        cp=config.cp,
        dp=dp,
        ep=config.ep,
        etp=expert_tp,
    )
    return layout.rank(dist.get_rank())


def mark_expert_parameters(config: TrainingConfig, chunks: Iterable[torch.nn.Module]) -> None:
    """Make Megatron reduce experts over their own data-parallel group where it would not.

    Megatron decides by `ep > 1` alone; with ep = 1 and etp != tp it sums different tensor-parallel
    shards.
    """
    if config.ep > 1 or config.expert_tp == config.tp:
        return
    for chunk in chunks:
        for name, parameter in chunk.named_parameters():
            if ".mlp.experts." in name:
                setattr(parameter, "allreduce", False)  # noqa: B010  (the mark Megatron reads)
