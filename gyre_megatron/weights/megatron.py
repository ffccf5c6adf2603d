"""A whole Megatron cell as a layout, and the binding of its description to a rank's real modules.

`MegatronLayout` knows every rank of the cell from numbers alone. `bind` checks the local rank's modules against
it, so a wrong guess about names, sizes or layers is refused before anything moves.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Literal

import torch

from gyre_megatron.config.model import Architecture
from gyre_megatron.errors import LayoutError
from gyre_megatron.weights.boxes import Block, LocalTensor, stack
from gyre_megatron.weights.canonical import EMBEDDING, FINAL_NORM, OUTPUT, layer_prefix
from gyre_megatron.weights.layout import (
    Layout,
    Shard,
    check_bound,
    index_by_name,
    merge_replicas,
    place_of,
)
from gyre_megatron.weights.megatron_names import LayerBlocks, MegatronStyle
from gyre_megatron.weights.parallel import Parallelism, ParallelRank
from gyre_megatron.weights.shards import vocabulary

_PERSISTENT_BUFFERS = ("router.expert_bias",)


class MegatronLayout(Layout):
    """The training layout of one cell."""

    def __init__(
        self,
        architecture: Architecture,
        parallelism: Parallelism,
        style: MegatronStyle | None = None,
    ) -> None:
        self.architecture = architecture
        self.parallelism = parallelism
        self.style = style or MegatronStyle()
        self.num_ranks = parallelism.world_size
        self._place = {
            layer: (stage, chunk, index)
            for stage, chunks in enumerate(parallelism.layers_of(architecture.num_layers))
            for chunk, layers in enumerate(chunks)
            for index, layer in enumerate(layers)
        }
        self._dense = lru_cache(None)(self._build_dense)
        self._experts = lru_cache(None)(self._build_experts)
        self._outer = lru_cache(None)(self._build_outer)
        self._by_name = lru_cache(None)(index_by_name)

    def digest(self) -> str:
        """A short hash of what all ranks must agree on; the style is each rank's own (a stage may
        have no experts)."""
        state = repr((self.architecture.model_dump_json(), self.parallelism))
        return hashlib.blake2b(state.encode(), digest_size=16).hexdigest()

    def tensors(self, rank: int) -> Sequence[LocalTensor]:
        at = self.parallelism.rank(rank)
        tensors = list(self._outer(at.pp_rank, at.tp_rank))
        for layer in self.layers(at.pp_rank):
            tensors += self._dense(layer, at.tp_rank)
            if self.architecture.is_moe_layer(layer):
                tensors += self._experts(layer, at.ep_rank, at.etp_rank)
        return tensors

    def layers(self, stage: int) -> list[int]:
        """Global numbers of a stage's layers; the last stage also has the multi-token-prediction
        layers."""
        layers = [layer for layer, (where, _, _) in self._place.items() if where == stage]
        first_mtp = self.architecture.num_layers
        mtp = (
            range(first_mtp, first_mtp + self.architecture.num_mtp_layers)
            if self._is_last(stage)
            else ()
        )
        return [*layers, *mtp]

    def shards(self, name: str) -> Sequence[Shard]:
        (layer, expert), p = place_of(name), self.parallelism
        if layer is None:
            return self._outer_shards(name)
        if layer >= self.architecture.num_layers + self.architecture.num_mtp_layers:
            return ()
        stage = self._place[layer][0] if layer in self._place else p.pp - 1
        base, inner = stage * p.tp * p.cp * p.dp, p.tp * p.cp * p.dp
        if expert is None:
            found = (
                (self._by_name(self._dense(layer, t)).get(name), range(t, inner, p.tp))
                for t in range(p.tp)
            )
        else:
            assert self.architecture.moe is not None
            ep_rank = expert // (self.architecture.moe.num_experts // p.ep)
            step = p.expert_tp * p.ep
            found = (
                (
                    self._by_name(self._experts(layer, ep_rank, t)).get(name),
                    range(t + p.expert_tp * ep_rank, inner, step),
                )
                for t in range(p.expert_tp)
            )
        return merge_replicas(
            (local_boxes, [base + r for r in ranks]) for local_boxes, ranks in found if local_boxes
        )

    def _outer_shards(self, name: str) -> Sequence[Shard]:
        p = self.parallelism
        inner = p.tp * p.cp * p.dp
        stages = dict.fromkeys((0, p.pp - 1))
        found = (
            (
                self._by_name(self._outer(stage, t)).get(name),
                [stage * inner + r for r in range(t, inner, p.tp)],
            )
            for stage in stages
            for t in range(p.tp)
        )
        return merge_replicas((local_boxes, ranks) for local_boxes, ranks in found if local_boxes)

    def _is_last(self, stage: int) -> bool:
        return stage == self.parallelism.pp - 1

    def _prefix(self, layer: int) -> str:
        if layer >= self.architecture.num_layers:
            return f"{self.parallelism.vpp - 1}.mtp.layers.{layer - self.architecture.num_layers}.transformer_layer."
        _, chunk, index = self._place[layer]
        return f"{chunk}.decoder.layers.{index}."

    def _build_dense(self, layer: int, tp_rank: int) -> tuple[LocalTensor, ...]:
        blocks = LayerBlocks(self.architecture, self.style, self._prefix(layer), layer)
        tensors = blocks.dense(self.parallelism.tp, tp_rank)
        if layer >= self.architecture.num_layers:
            tensors += self._mtp_head(layer, tp_rank)
        return tuple(tensors)

    def _build_experts(self, layer: int, ep_rank: int, etp_rank: int) -> tuple[LocalTensor, ...]:
        blocks = LayerBlocks(self.architecture, self.style, self._prefix(layer), layer)
        p = self.parallelism
        return tuple(blocks.experts(p.ep, ep_rank, p.expert_tp, etp_rank))

    def _mtp_head(self, layer: int, tp_rank: int) -> list[LocalTensor]:
        prefix, hf = self._prefix(layer).removesuffix("transformer_layer."), layer_prefix(layer)
        hidden, tp = self.architecture.hidden_size, self.parallelism.tp
        names = {"enorm": "enorm", "hnorm": "hnorm", "final_layernorm": "shared_head.norm"}
        norms = [
            stack(
                f"{prefix}{mine}.weight",
                (hidden,),
                [Block(f"{hf}{theirs}.weight", (0,), (hidden,))],
            )
            for mine, theirs in names.items()
        ]
        rows = hidden // tp
        block = Block(f"{hf}eh_proj.weight", (tp_rank * rows, 0), (rows, 2 * hidden))
        return [*norms, stack(f"{prefix}eh_proj.weight", (rows, 2 * hidden), [block])]

    def _build_outer(self, stage: int, tp_rank: int) -> tuple[LocalTensor, ...]:
        arch, last_chunk = self.architecture, self.parallelism.vpp - 1
        tensors = []
        has_mtp = self._is_last(stage) and arch.num_mtp_layers > 0
        if stage == 0:
            tensors.append(
                self._vocab("0.embedding.word_embeddings.weight", EMBEDDING, tp_rank, True)
            )
        if has_mtp and (
            stage > 0 or last_chunk > 0
        ):  # Megatron keeps a second copy beside the MTP layers
            tensors.append(
                self._vocab(
                    f"{last_chunk}.embedding.word_embeddings.weight", EMBEDDING, tp_rank, False
                )
            )
        if self._is_last(stage):
            norm = Block(FINAL_NORM, (0,), (arch.hidden_size,))
            tensors.append(
                stack(f"{last_chunk}.decoder.final_layernorm.weight", (arch.hidden_size,), [norm])
            )
            tied = arch.tie_word_embeddings
            if not tied:
                tensors.append(
                    self._vocab(f"{last_chunk}.output_layer.weight", OUTPUT, tp_rank, True)
                )
            elif not has_mtp and (stage > 0 or last_chunk > 0):
                tensors.append(
                    self._vocab(f"{last_chunk}.output_layer.weight", EMBEDDING, tp_rank, False)
                )
        return tuple(tensors)

    def _vocab(self, key: str, name: str, tp_rank: int, source: bool) -> LocalTensor:
        vocab = self.architecture.vocab_size
        hidden = self.architecture.hidden_size
        tp = self.parallelism.tp
        total = self.style.padded_vocab_size or vocab
        if total % tp or total < vocab:
            raise LayoutError(
                f"{key}: {total} rows cannot hold {vocab} tokens over tp={tp}; set "
                "padded_vocab_size to the padded "
                "vocabulary that the model was built with"
            )
        return vocabulary(key, name, (vocab, hidden), total // tp, tp_rank, source)


def named_tensors(model_chunks: Sequence[torch.nn.Module]) -> Iterator[tuple[str, torch.Tensor]]:
    """The weights of a rank's model chunks as `"<chunk>.<parameter name>"`, wrappers (DDP,
    Float16Module) removed."""
    for index, chunk in enumerate(model_chunks):
        module = _unwrap(chunk)
        for name, parameter in module.named_parameters():
            yield f"{index}.{name}", parameter.data
        for name, buffer in module.named_buffers():
            if name.endswith(_PERSISTENT_BUFFERS):
                yield f"{index}.{name}", buffer


def detect_style(model_chunks: Sequence[torch.nn.Module]) -> MegatronStyle:
    """Read the naming style from a rank's parameter names and embedding or output shapes."""
    tensors = dict(named_tensors(model_chunks))
    names = list(tensors)
    experts: Literal["sequential", "te_grouped", "grouped"] = "sequential"
    if any(n.endswith("mlp.experts.weight1") for n in names):
        experts = "grouped"
    elif any(".mlp.experts.linear_fc1.weight" in n for n in names):
        experts = "te_grouped"
    return MegatronStyle(
        experts=experts, fused_norms=any(n.endswith("layer_norm_weight") for n in names)
    )


def bind(
    layout: MegatronLayout, rank: int, model_chunks: Sequence[torch.nn.Module]
) -> dict[str, torch.Tensor]:
    """Match the layout's description of `rank` with its real modules.

    Returns:
        Local tensor key -> the live parameter or buffer.

    Raises:
        LayoutError: names, shapes or layer numbers differ.
    """
    tensors = dict(named_tensors(model_chunks))
    check_bound(rank, layout.tensors(rank), {key: tuple(t.shape) for key, t in tensors.items()})
    expected = {
        f"{layout._prefix(layer)}": layer
        for layer in layout.layers(layout.parallelism.rank(rank).pp_rank)
    }
    for index, chunk in enumerate(model_chunks):
        for name, module in _unwrap(chunk).named_modules():
            layer = expected.get(f"{index}.{name}.")
            number = getattr(module, "layer_number", None)
            if layer is not None and layer < layout.architecture.num_layers and number != layer + 1:
                raise LayoutError(
                    f"rank {rank}: chunk {index} {name} is layer {number}, but the layout expects "
                    f"layer {layer + 1}; "
                    "pass the model's own stage_layers"
                )
    return tensors


def layout_of(
    architecture: Architecture, place: ParallelRank, model_chunks: Sequence[torch.nn.Module]
) -> MegatronLayout:
    """The layout of the whole cell, its naming style read from the local modules."""
    style = detect_style(model_chunks)
    padded = _padded_vocab(model_chunks, place.tp)
    style = MegatronStyle(style.experts, style.fused_norms, style.sharded_mla_down, padded)
    return MegatronLayout(architecture, place.parallelism, style)


def _padded_vocab(model_chunks: Sequence[torch.nn.Module], tp: int) -> int | None:
    ends = ("embedding.word_embeddings.weight", "output_layer.weight")
    return next(
        (t.shape[0] * tp for key, t in named_tensors(model_chunks) if key.endswith(ends)), None
    )


def _unwrap(module: torch.nn.Module) -> torch.nn.Module:
    while isinstance(inner := getattr(module, "module", None), torch.nn.Module):
        module = inner
    return module
