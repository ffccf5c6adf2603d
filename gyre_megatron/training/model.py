"""GPT on packed trees: rotary embeddings by depth, and edge statistics instead of logits."""

from __future__ import annotations

import torch
from megatron.core import parallel_state as mpu
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

from gyre_megatron.algos.logprobs import edge_statistics
from gyre_megatron.config.families import FAMILIES, load_family
from gyre_megatron.config.model import Architecture
from gyre_megatron.config.training import TrainingConfig
from gyre_megatron.cpu import local_device
from gyre_megatron.errors import ConfigError, LayoutError
from gyre_megatron.training.layer_spec import tree_layer_spec
from gyre_megatron.training.model_config import transformer_config
from gyre_megatron.training.tree_batch import TreeBatch
from gyre_megatron.weights.megatron import bind, layout_of
from gyre_megatron.weights.parallel import ParallelRank


class TreeGPTModel(GPTModel):
    """Megatron's GPTModel; the last stage returns fp32 [3, E]: log-probability, entropy, squared
    gradient norm."""

    def __init__(
        self,
        config: TransformerConfig,
        spec,
        architecture: Architecture,
        training: TrainingConfig,
        **kwargs,
    ):
        super().__init__(
            config=config,
            transformer_layer_spec=spec,
            vocab_size=architecture.padded_vocab_size(training.tp),
            max_sequence_length=architecture.max_position_embeddings,
            position_embedding_type="none",  # rotary embeddings are made here, from depths
            share_embeddings_and_output_weights=architecture.tie_word_embeddings,
            parallel_output=True,
            **kwargs,
        )
        self.true_vocab_size = architecture.vocab_size
        self.head_chunk = training.head_chunk
        rotary = int(architecture.head_dim * architecture.partial_rotary_factor)
        steps = torch.arange(0, rotary, 2, dtype=torch.float32) / rotary
        self.register_buffer(
            "inverse_frequencies", 1.0 / architecture.rope_theta**steps, persistent=False
        )
        self.batch: TreeBatch | None = None

    def forward(self, batch: TreeBatch) -> torch.Tensor:
        """Hidden states [T, 1, H] for the next stage, or the statistics of the batch's edges."""
        self.batch = batch
        return super().forward(
            input_ids=batch.token_ids,
            position_ids=None,
            attention_mask=None,
            packed_seq_params=batch.params,
        )

    def _preprocess(self, *args, packed_seq_params=None, **kwargs):
        outputs = list(super()._preprocess(*args, packed_seq_params=packed_seq_params, **kwargs))
        angles = packed_seq_params.positions[:, None].float() * self.inverse_frequencies
        outputs[1] = torch.cat([angles, angles], dim=-1)[:, None, None, :]  # [T, 1, 1, rotary size]
        return tuple(outputs)

    def _postprocess(self, hidden_states, **_) -> torch.Tensor:
        if not self.post_process:
            return hidden_states
        batch = self.batch
        self.batch = None  # the pipeline may hold the model long after the batch is done
        assert batch is not None
        group = mpu.get_tensor_model_parallel_group()
        if self.config.sequence_parallel:
            hidden_states = gather_from_sequence_parallel_region(
                hidden_states, tensor_parallel_output_grad=True
            )
        else:
            hidden_states = copy_to_tensor_model_parallel_region(hidden_states)
        tied = self.share_embeddings_and_output_weights
        statistics = edge_statistics(
            hidden_states.squeeze(1).index_select(0, batch.sources),
            self.shared_embedding_or_output_weight() if tied else self.output_layer.weight,
            batch.labels,
            batch.temperatures,
            group=group if group.size() > 1 else None,
            chunk=self.head_chunk,
            vocab_size=self.true_vocab_size,
        )
        return torch.stack([statistics.logprobs, statistics.entropies, statistics.square_norms])


def build_model_chunks(architecture: Architecture, training: TrainingConfig) -> list[TreeGPTModel]:
    """This rank's chunks of the model, one per virtual pipeline stage, on its device."""
    config = transformer_config(architecture, training)
    stages = range(training.vpp) if training.vpp else [None]
    return [build_chunk(config, architecture, training, stage) for stage in stages]


def build_chunk(
    config: TransformerConfig,
    architecture: Architecture,
    training: TrainingConfig,
    vp_stage: int | None = None,
) -> TreeGPTModel:
    """One chunk of the model in Megatron's configuration `config`, on this rank's device."""
    place = dict(ignore_virtual=vp_stage is None, vp_stage=vp_stage)
    spec = tree_layer_spec(
        config,
        vp_stage=vp_stage,
        transformer_engine=training.transformer_engine,
        attention=training.attention,
    )
    family = load_family(architecture.family)
    first = get_transformer_layer_offset(config, vp_stage=vp_stage)
    spec.layer_specs = [
        family.layer_spec(layer_spec, config, layer)
        for layer, layer_spec in enumerate(spec.layer_specs, first)
    ]
    chunk = TreeGPTModel(
        config,
        spec,
        architecture,
        training,
        pre_process=mpu.is_pipeline_first_stage(**place),
        post_process=mpu.is_pipeline_last_stage(**place),
        rotary_percent=architecture.partial_rotary_factor,
        vp_stage=vp_stage,
    )
    return chunk.to(local_device())


def check_parameters(
    chunks: list[TreeGPTModel], architecture: Architecture, place: ParallelRank
) -> None:
    """Check that a family of the user's built modules whose weights can be loaded and published.

    Raises:
        ConfigError: it built parameters that the layouts do not know.
    """
    if architecture.family in FAMILIES.builtin:
        return  # tests hold ours to the layouts
    try:
        bind(layout_of(architecture, place, chunks), place.index, chunks)
    except LayoutError as error:
        raise ConfigError(
            f"{FAMILIES.key}: {architecture.family} builds parameters that cannot be loaded or "
            f"published ({error}). Which parameters a layer has is not open to families: their "
            "names and shapes follow from the architecture"
        ) from None
