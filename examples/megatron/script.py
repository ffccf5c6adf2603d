"""A Megatron-Core program of one's own that trains on trees: its groups, its configuration, its
optimizer and its loop; what is Gyre's comes from `gyre_megatron.integrations.megatron`.

`setup` and `step` are what such a program would hold; torch.distributed and Megatron's groups exist
when they are called.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer.transformer_config import TransformerConfig

from gyre_megatron.config.model import Architecture
from gyre_megatron.config.training import GspoConfig, TrainingConfig
from gyre_megatron.integrations.megatron import (
    parallel_rank,
    step_sums,
    training_config,
    tree_batches,
    tree_forward_step,
    tree_model,
)
from gyre_megatron.trajectory import PackedBin
from gyre_megatron.weights import load_hf_checkpoint


@dataclass
class Program:
    """What the program keeps between steps."""

    config: TransformerConfig
    architecture: Architecture
    training: TrainingConfig
    model: list[torch.nn.Module]
    optimizer: Any


def setup(config: TransformerConfig, checkpoint: Path, lr: float) -> Program:
    """Build the model over Megatron's groups, load a Hugging Face checkpoint, make an optimizer."""
    config.finalize_model_grads_func = finalize_model_grads  # as Megatron-LM does
    architecture = Architecture.from_checkpoint(checkpoint)
    gspo = GspoConfig(eps_low=0.2, eps_high=0.2)
    training = training_config(config, architecture, token_budget=1024, gspo=gspo)
    stages = range(training.vpp) if training.vpp else [None]
    chunks = [tree_model(config, architecture, training, stage) for stage in stages]
    load_hf_checkpoint(chunks, architecture, parallel_rank(config), checkpoint)
    ddp = DistributedDataParallelConfig(grad_reduce_in_fp32=True)
    model: list[torch.nn.Module] = [
        DistributedDataParallel(config, ddp, chunk, disable_bucketing=index > 0)
        for index, chunk in enumerate(chunks)
    ]
    adam = OptimizerConfig(optimizer="adam", lr=lr, weight_decay=0.0, clip_grad=1.0)
    return Program(config, architecture, training, model, get_megatron_optimizer(adam, model))


def step(program: Program, bins: list[PackedBin], weight_version: int) -> dict[str, float]:
    """One optimizer step on packed trees; loss and other sums, the same on every rank."""
    for chunk in program.model:
        chunk.zero_grad_buffer()
    program.optimizer.zero_grad()
    batches = tree_batches(bins, program.training, program.architecture)
    iterators = [iter(batches) for _ in program.model]
    kept = get_forward_backward_func()(
        forward_step_func=tree_forward_step(program.training, weight_version),
        data_iterator=iterators if len(iterators) > 1 else iterators[0],
        model=program.model,
        num_microbatches=len(batches),
        seq_length=batches[0].token_ids.shape[1] * program.training.cp,
        micro_batch_size=1,
        forward_only=False,
    )
    program.optimizer.step()
    return step_sums(kept)
