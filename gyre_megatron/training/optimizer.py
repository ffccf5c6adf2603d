"""The core cell's optimizer and its learning-rate schedule."""

from __future__ import annotations

import warnings

import torch
from megatron.core.optimizer import MegatronOptimizer, get_megatron_optimizer
from megatron.core.optimizer import OptimizerConfig as MegatronOptimizerConfig
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

from gyre_megatron.config.training import OptimizerConfig
from gyre_megatron.errors import ConfigError


def build_optimizer(
    config: OptimizerConfig, dtype: torch.dtype, wrapped_chunks: list
) -> tuple[MegatronOptimizer, OptimizerParamScheduler]:
    """Adam over the wrapped model chunks, and the schedule of its learning rate.

    Raises:
        ConfigError: min_lr is above lr.
    """
    if config.min_lr > config.lr:
        raise ConfigError(
            f"training.optimizer.min_lr={config.min_lr} is above lr={config.lr}; lower min_lr"
        )
    fields = dict(
        lr=config.lr,
        min_lr=config.min_lr,
        weight_decay=config.weight_decay,
        clip_grad=config.clip_grad,
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        optimizer = get_megatron_optimizer(
            MegatronOptimizerConfig(
                optimizer="adam",
                adam_beta1=config.beta1,
                adam_beta2=config.beta2,
                adam_eps=config.eps,
                use_distributed_optimizer=config.distributed,
                params_dtype=dtype,
                bf16=dtype == torch.bfloat16,
                **fields,
            ),
            wrapped_chunks,
        )
    lr_schedule = OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=config.lr,
        min_lr=config.min_lr,
        lr_warmup_steps=config.warmup_steps,
        lr_decay_steps=max(config.decay_steps, config.warmup_steps + 1),
        lr_decay_style=config.decay_style,
        start_wd=config.weight_decay,
        end_wd=config.weight_decay,
        wd_incr_steps=1,
        wd_incr_style="constant",
    )
    return optimizer, lr_schedule
