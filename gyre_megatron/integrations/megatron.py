"""Gyre inside a Megatron-Core program of your own: its process groups, its `TransformerConfig`, its
optimizer and its loop; our trees, objective and weight publication.

Everything is read from what the program has set up already, `megatron.core.parallel_state` above
all; nothing here initialises or replaces a part of Megatron. docs/integrations.md shows a training
script. On a machine without CUDA call `gyre_megatron.cpu.enable_cpu()` before Megatron is imported.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state as mpu
from megatron.core.transformer.transformer_block import get_num_layers_to_build
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

from gyre_megatron.algos.extensions import load_objective
from gyre_megatron.config.layout_rules import check_training
from gyre_megatron.config.model import Architecture
from gyre_megatron.config.training import TrainingConfig
from gyre_megatron.config.weights import WeightsConfig
from gyre_megatron.cpu import local_device, require_device
from gyre_megatron.errors import ConfigError, LayoutError
from gyre_megatron.integrations.megatron_shape import architecture_from_args, architecture_of
from gyre_megatron.training.loss import objective_loss
from gyre_megatron.training.model import TreeGPTModel, build_chunk
from gyre_megatron.training.model_config import DTYPES
from gyre_megatron.training.pipeline import forward_step_of, replica_batches
from gyre_megatron.training.step_metrics import reduce_sums
from gyre_megatron.training.tree_batch import TreeBatch
from gyre_megatron.trajectory.packing import PackedBin
from gyre_megatron.weights.cell_sync import CellWeightSync
from gyre_megatron.weights.engine import ServingEngine
from gyre_megatron.weights.parallel import Parallelism, ParallelRank, StageLayers

__all__ = [
    "architecture_from_args",
    "architecture_of",
    "parallel_rank",
    "step_sums",
    "training_config",
    "tree_batches",
    "tree_forward_step",
    "tree_model",
    "weight_sync",
]

_ROPE_AND_VOCABULARY = (
    "vocab_size",
    "rope_theta",
    "partial_rotary_factor",
    "max_position_embeddings",
    "tie_word_embeddings",
)
"""Fields of an architecture that a TransformerConfig does not hold."""


def parallel_rank(config: TransformerConfig) -> ParallelRank:
    """This rank's place, and the layers of every stage, as Megatron's groups have them.

    Args:
        config: the model's; says how layers are divided over stages, evenly or not.

    Raises:
        LayoutError: Megatron is not initialised, or its ranks are numbered in another order than
            its default (tp, cp, ep, dp, pp).
    """
    if not mpu.model_parallel_is_initialized():
        raise LayoutError(
            "Megatron's groups do not exist yet; call parallel_state.initialize_model_parallel first"
        )
    vpp = mpu.get_virtual_pipeline_model_parallel_world_size() or 1
    parallelism = Parallelism(
        tp=mpu.get_tensor_model_parallel_world_size(),
        pp=mpu.get_pipeline_model_parallel_world_size(),
        vpp=vpp,
        cp=mpu.get_context_parallel_world_size(),
        dp=mpu.get_data_parallel_world_size(),
        ep=mpu.get_expert_model_parallel_world_size(),
        etp=mpu.get_expert_tensor_parallel_world_size(),
        stage_layers=_stage_layers(config, vpp),
    )
    place = parallelism.rank(dist.get_rank())
    found = dict(
        tp_rank=mpu.get_tensor_model_parallel_rank(),
        pp_rank=mpu.get_pipeline_model_parallel_rank(),
        cp_rank=mpu.get_context_parallel_rank(),
        dp_rank=mpu.get_data_parallel_rank(),
        ep_rank=mpu.get_expert_model_parallel_rank(),
        etp_rank=mpu.get_expert_tensor_parallel_rank(),
    )
    expected = {name: getattr(place, name) for name in found}
    if dist.get_world_size() != parallelism.world_size or found != expected:
        raise LayoutError(
            f"rank {dist.get_rank()} of {dist.get_world_size()} stands at {found} in Megatron's "
            f"groups, expected {expected} of {parallelism.world_size}; initialise them with the "
            "default order and over the whole default process group"
        )
    return place


def _stage_layers(config: TransformerConfig, vpp: int) -> StageLayers | None:
    """[stage][chunk] -> layers, by Megatron's own division; None where it is the even one."""
    stages = range(mpu.get_pipeline_model_parallel_world_size())
    chunks = range(vpp) if vpp > 1 else (None,)
    divided = tuple(tuple(_layers(config, stage, chunk) for chunk in chunks) for stage in stages)
    per_chunk = {len(layers) for stage in divided for layers in stage}
    return None if len(per_chunk) == 1 else divided


def _layers(config: TransformerConfig, stage: int, chunk: int | None) -> tuple[int, ...]:
    first = get_transformer_layer_offset(config, vp_stage=chunk, pp_rank=stage)
    count = get_num_layers_to_build(config, vp_stage=chunk, pp_rank=stage)
    return tuple(range(first, first + count))


def training_config(
    config: TransformerConfig, architecture: Architecture, **options: Any
) -> TrainingConfig:
    """Gyre's training section for a model and a layout that Megatron was given already.

    Args:
        options: other fields of the section: `token_budget`, `gspo`, `objective`, `attention`,
            `head_chunk`, `router_replay`, `transformer_engine`, ...

    Raises:
        ConfigError: the two describe different models, the configuration would make the loss wrong,
            or trees cannot be trained in this layout.
    """
    _check_same_model(config, architecture)
    _check_exact(config)
    place = parallel_rank(config)
    dtypes = {dtype: name for name, dtype in DTYPES.items()}
    if config.params_dtype not in dtypes:
        raise ConfigError(
            f"params_dtype={config.params_dtype}: parameters of {list(DTYPES)} are supported"
        )
    taken = dict(
        tp=place.tp,
        pp=place.pp,
        vpp=place.vpp if place.vpp > 1 else None,
        cp=place.cp,
        ep=place.ep,
        etp=place.etp if architecture.moe is not None else None,
        sequence_parallel=config.sequence_parallel,
        dtype=dtypes[config.params_dtype],
        moe_dispatcher=config.moe_token_dispatcher_type,
        moe_aux_loss=config.moe_aux_loss_coeff if architecture.moe is not None else 0.0,
    )
    if clash := sorted(taken.keys() & options.keys()):
        raise ConfigError(f"{', '.join(clash)} follow from Megatron; leave them out")
    training = TrainingConfig(**taken, **options)
    check_training(training, architecture, dist.get_world_size())
    return training


def _check_same_model(config: TransformerConfig, architecture: Architecture) -> None:
    told = {name: getattr(architecture, name) for name in _ROPE_AND_VOCABULARY}
    found = architecture_of(config, family=architecture.family, **told)
    different = [
        f"{name} {getattr(found, name)!r} vs {getattr(architecture, name)!r}"
        for name in Architecture.model_fields
        if getattr(found, name) != getattr(architecture, name)
    ]
    if different:
        raise ConfigError(
            f"Megatron's configuration and the architecture differ in {', '.join(different)}"
        )


def _check_exact(config: TransformerConfig) -> None:
    """Refuse what makes log-probabilities random or gradients wrong by a factor."""
    if config.hidden_dropout or config.attention_dropout:
        raise ConfigError(
            f"hidden_dropout={config.hidden_dropout}, attention_dropout={config.attention_dropout}: "
            "ratios to the sampling policy need both at 0"
        )
    if not config.calculate_per_token_loss:
        raise ConfigError(
            "calculate_per_token_loss=False makes Megatron divide gradients once more; set it to "
            "True before the model is wrapped: the weights of the loss hold every denominator"
        )


def tree_model(
    config: TransformerConfig,
    architecture: Architecture,
    training: TrainingConfig,
    vp_stage: int | None = None,
) -> TreeGPTModel:
    """This rank's part of the model, for your model provider: a GPTModel that takes a `TreeBatch`
    and whose last stage gives the statistics of its edges, float32 [3, E].

    Args:
        vp_stage: virtual pipeline stage, where there are several.

    Raises:
        ConfigError: the layers cannot be built.
        DeviceError: there is no CUDA device and `enable_cpu` was not called.
    """
    require_device()
    return build_chunk(config, architecture, training, vp_stage)


def tree_batches(
    bins: Sequence[PackedBin], training: TrainingConfig, architecture: Architecture
) -> list[TreeBatch]:
    """This data-parallel replica's micro-batches of a list of bins, the same list on every rank.

    Their number is `num_microbatches`, and the same on every rank; give each model chunk an
    iterator over them.
    """
    return replica_batches(list(bins), training, architecture, local_device())


def tree_forward_step(training: TrainingConfig, weight_version: int | None = None) -> Callable:
    """Megatron's `forward_step_func` for `tree_model` and the training section's objective.

    Gradients need no scaling afterwards: `finalize_model_grads` works as Megatron-LM calls it. Give
    what the schedule returns to `step_sums`.

    Args:
        weight_version: the version in training, for staleness.

    Raises:
        ConfigError: the objective cannot be loaded, or asks for a KL to a reference policy, which
            only the Trainer keeps.
    """
    if training.gspo.kl_coefficient:
        raise ConfigError(
            "training.gspo.kl_coefficient needs the reference policy of training.Trainer; set it to "
            "0 here"
        )
    return forward_step_of(objective_loss(training, load_objective(training), weight_version))


def step_sums(kept: Sequence[torch.Tensor]) -> dict[str, float]:
    """What Megatron's schedule returned, summed over all ranks: loss, edges, clipped edges and
    more, by name, the same on every rank. Divide a `_sum` by `num_edges` for its mean.

    Args:
        kept: the list that the schedule gave this rank; empty but on the last stage.
    """
    return reduce_sums(list(kept), local_device())


def weight_sync(
    model: Sequence[torch.nn.Module],
    config: TransformerConfig,
    architecture: Architecture,
    engine: ServingEngine | None,
    weights: WeightsConfig | None = None,
    name: str = "gyre/weights/program",
) -> CellWeightSync:
    """Publication of a model's weights into an SGLang server; collective over all ranks.

    Args:
        model: this rank's chunks, wrapped or not; any GPTModel, of ours or of Megatron's.
        engine: the server; only rank 0 needs it.
        name: unique among the publishers of this program.

    Raises:
        LayoutError: the modules are not those that Megatron's groups and the architecture say.
    """
    place = parallel_rank(config)
    return CellWeightSync(model, architecture, place, engine, weights, name=name)
