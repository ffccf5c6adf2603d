"""One rank's trainer: gradients of packed trees, and on the core cell the optimizer.

The runtime calls it on every rank of a cell, in the same order: `begin_batch`, `micro_step` any
number of times, `finish_gradients`, then on the core `optimizer_step`. Weights are frozen between
`begin_batch` and the step.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

from gyre_megatron.algos.extensions import load_objective
from gyre_megatron.config.model import Architecture
from gyre_megatron.config.training import TrainingConfig
from gyre_megatron.cpu import local_device, require_device
from gyre_megatron.errors import ConfigError
from gyre_megatron.training import checkpoint, parallel, parameters
from gyre_megatron.training.loss import objective_loss
from gyre_megatron.training.model import build_model_chunks, check_parameters
from gyre_megatron.training.model_config import DTYPES
from gyre_megatron.training.optimizer import build_optimizer
from gyre_megatron.training.pipeline import replica_batches, run_pipeline
from gyre_megatron.training.reference import ReferencePolicy
from gyre_megatron.training.scoring import collect_logprobs, sequence_bins, split_by_sequence
from gyre_megatron.training.step_metrics import reduce_sums
from gyre_megatron.training.tree_batch import TreeBatch
from gyre_megatron.trajectory.packing import PackedBin
from gyre_megatron.weights.checkpoint import load_hf_checkpoint
from gyre_megatron.weights.parallel import ParallelRank


class Trainer:
    """Megatron model, gradients and (core cell only) optimizer of this rank."""

    def __init__(
        self,
        config: TrainingConfig,
        architecture: Architecture,
        checkpoint: str | Path | None = None,
        *,
        with_optimizer: bool = True,
    ) -> None:
        """Build the model in the cell's layout; collective over the cell, whose default process
        group must exist.

        Args:
            checkpoint: directory in Hugging Face format; None initialises at random from
                `config.seed`.
            with_optimizer: whether this cell steps weights (the core) or only makes gradients.

        Raises:
            ConfigError: the layout does not fit the ranks or the model.
            DeviceError: there is no CUDA device and `enable_cpu` was not called.
        """
        require_device()
        self.config = config
        self.architecture = architecture
        self._objective = load_objective(config)
        parallel.initialize(config, architecture)
        self.device = local_device()
        self.weight_version: int | None = None
        self.model_chunks = build_model_chunks(architecture, config)
        check_parameters(self.model_chunks, architecture, self.parallel_rank())
        if checkpoint is not None:
            load_hf_checkpoint(self.model_chunks, architecture, self.parallel_rank(), checkpoint)
        parallel.mark_expert_parameters(config, self.model_chunks)
        buffers = (
            [] if config.optimizer.distributed else parameters.flatten_parameters(self.model_chunks)
        )
        self._wrapped = [
            self._wrap(chunk, first=i == 0) for i, chunk in enumerate(self.model_chunks)
        ]
        self._parameter_buffers = buffers or parameters.parameter_buffers_of(self._wrapped)
        self._reference = (
            ReferencePolicy(self._parameter_buffers) if config.gspo.kl_coefficient else None
        )
        self.optimizer: MegatronOptimizer | None = None
        self.lr_schedule: OptimizerParamScheduler | None = None
        if with_optimizer:
            self.optimizer, self.lr_schedule = build_optimizer(
                config.optimizer, DTYPES[config.dtype], self._wrapped
            )

    def _wrap(self, chunk: torch.nn.Module, *, first: bool) -> DistributedDataParallel:
        ddp_config = DistributedDataParallelConfig(
            grad_reduce_in_fp32=True,
            overlap_grad_reduce=False,
            use_distributed_optimizer=self.config.optimizer.distributed,
        )
        return DistributedDataParallel(chunk.config, ddp_config, chunk, disable_bucketing=not first)

    def parallel_rank(self) -> ParallelRank:
        """Where this rank stands in the cell's layout, as the weights room describes it."""
        return parallel.parallel_rank(self.config, self.architecture)

    # Gradients of one batch

    def begin_batch(self, weight_version: int | None = None) -> None:
        """Zero the gradients; `weight_version` is the version in training, for staleness."""
        self.weight_version = weight_version
        for chunk in self._wrapped:
            chunk.train()
            chunk.zero_grad_buffer()
        if self.optimizer is not None:
            self.optimizer.zero_grad()

    def micro_step(self, bins: list[PackedBin]) -> dict[str, float]:
        """Forward and backward on a list of bins, the same on every rank of the cell; gradients
        accumulate.

        Returns:
            Sums over the cell (see `step_metrics`), the same on every rank; add them over
            micro-steps and cells.
        """
        batches = replica_batches(bins, self.config, self.architecture, self.device)
        reference = self._reference_logprobs(batches)

        loss_function = objective_loss(self.config, self._objective, self.weight_version, reference)
        kept = run_pipeline(self._wrapped, batches, loss_function, forward_only=False)
        return reduce_sums(kept, self.device)

    def _reference_logprobs(self, batches: list[TreeBatch]) -> dict[int, torch.Tensor]:
        if self._reference is None:
            return {}
        with self._reference.weights():
            return self._logprobs(batches)

    def finish_gradients(self) -> None:
        """Reduce gradients inside the cell: data and context parallelism, sequence parallelism,
        tied embeddings."""
        finalize_model_grads(self._wrapped, None)

    def gradient_buffers(self) -> list[torch.Tensor]:
        """This rank's fp32 gradients, contiguous; same order and shapes at the same position of
        every cell."""
        return parameters.gradient_buffers(self._wrapped)

    def optimizer_step(self) -> dict[str, float]:
        """Clip, update, advance the learning rate (core cell only)."""
        if self.optimizer is None or self.lr_schedule is None:
            raise ConfigError(
                "optimizer_step was called on a satellite cell; only the core cell has an optimizer"
            )
        self.lr_schedule.step(increment=1)
        success, grad_norm, _ = self.optimizer.step()
        lr = max(group["lr"] for group in self.optimizer.param_groups)
        return {"grad_norm": float(grad_norm or 0.0), "lr": lr, "skipped": float(not success)}

    # Parameters

    def parameter_buffers(self) -> list[torch.Tensor]:
        """This rank's weights and persistent buffers, contiguous; writing to them changes the
        model."""
        return [*self._parameter_buffers, *parameters.persistent_buffers(self.model_chunks)]

    def named_parameters(self) -> Iterator[tuple[str, torch.nn.Parameter]]:
        """Parameters by name, prefixed with their chunk."""
        return parameters.named_parameters(self.model_chunks)

    def weights_changed(self) -> None:
        """Tell the optimizer that weights were written from outside, so that its fp32 copies
        follow."""
        if self.optimizer is not None:
            self.optimizer.reload_model_params()

    # Scoring

    @torch.no_grad()
    def _logprobs(self, batches: list[TreeBatch]) -> dict[int, torch.Tensor]:
        """Log-probabilities of the edges of each batch by the batch's index on the last stage;
        nothing on others."""

        def keep(batch: TreeBatch, statistics: torch.Tensor):
            return statistics.sum(), (batch.index, statistics[0].detach())

        return dict(run_pipeline(self._wrapped, batches, keep, forward_only=True))

    def score(self, sequences: list[list[int]], temperature: float = 1.0) -> list[np.ndarray]:
        """Log-probability of each next token of each sequence, float32 [len - 1]; the same on every
        rank."""
        bins = sequence_bins(sequences, temperature, self.config.token_budget or 0)
        batches = replica_batches(bins, self.config, self.architecture, self.device)
        logprobs = collect_logprobs(bins, batches, self._logprobs(batches), self.device)
        return split_by_sequence(bins, logprobs, len(sequences))

    # Checkpoints

    def save_checkpoint(self, directory: str | Path) -> None:
        """Write model, optimizer and learning-rate schedule (collective over the core cell) into an existing
        directory."""
        checkpoint.save(directory, self.model_chunks, self.optimizer, self.lr_schedule)

    def load_checkpoint(self, directory: str | Path) -> None:
        """Read what `save_checkpoint` wrote, possibly in another layout.

        Raises:
            CheckpointError: the directory holds no complete checkpoint.
        """
        checkpoint.load(directory, self.model_chunks, self.optimizer, self.lr_schedule)
