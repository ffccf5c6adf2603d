"""Megatron's process groups inside one cell, from the training config."""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist
from megatron.core import parallel_state as mpu
from megatron.core import tensor_parallel

from gyre_megatron.config.layout_rules import check_training
from gyre_megatron.config.model import Architecture
from gyre_megatron.config.training import TrainingConfig
from gyre_megatron.cpu import require_device
from gyre_megatron.weights.parallel import ParallelRank, parallelism_of


def initialize(config: TrainingConfig, architecture: Architecture) -> None:
    """Create the model-parallel groups of this cell (the default world), once per process.

    Raises:
        ConfigError: the layout does not fit the cell's ranks or the model's shape.
        DeviceError: there is no CUDA device and `enable_cpu` was not called.
    """
    require_device()
    check_training(config, architecture, dist.get_world_size())
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


def parallel_rank(config: TrainingConfig, architecture: Architecture) -> ParallelRank:
    """This rank's place in the cell, in the weights room's words."""
    dp = dist.get_world_size() // config.min_ranks
    return parallelism_of(config, architecture, dp).rank(dist.get_rank())


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
