"""Tree attention as Megatron's core attention; with context parallelism, keys and values are
gathered.

Legend: T this rank's queries, S all tokens of the bin, N heads, G key-value heads, D head size.
"""

from __future__ import annotations

import math

import torch
import torch.distributed as dist
from megatron.core.transformer.module import MegatronModule

from gyre_megatron.cpu import local_device
from gyre_megatron.errors import ConfigError
from gyre_megatron.training.attention_cores import load_attention_core
from gyre_megatron.training.tree_batch import TreeParams


class TreeAttention(MegatronModule):
    """Drop-in for DotProductAttention where `packed_seq_params` is a TreeParams.

    `core` is the name of the kernel, as in `training.attention`; Megatron gives the other arguments.
    """

    def __init__(
        self,
        config,
        layer_number: int,
        attn_mask_type,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        cp_comm_type: str | None = None,
        pg_collection=None,
        core: str = "auto",
        **_,
    ) -> None:
        super().__init__(config=config)
        if config.attention_dropout if attention_dropout is None else attention_dropout:
            raise ConfigError("tree attention has no dropout; set attention_dropout to 0")
        self.scale = softmax_scale or 1.0 / math.sqrt(config.kv_channels)
        self.cp_group = pg_collection.cp
        self.core = load_attention_core(core, local_device().type)

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        attn_mask_type=None,
        attention_bias: torch.Tensor | None = None,
        packed_seq_params: TreeParams | None = None,
    ) -> torch.Tensor:
        """Attend along the tree: query [T, 1, N, D], key and value [T, 1, G, D] -> [T, 1, N *
        D]."""
        if not isinstance(packed_seq_params, TreeParams):
            raise ConfigError(
                "tree attention needs packed_seq_params to be a TreeParams; run the model on a "
                "TreeBatch"
            )
        params = packed_seq_params
        if params.order is not None:
            key, value = gather_tokens(
                torch.cat([key, value], dim=-1), params.order, self.cp_group
            ).chunk(2, dim=-1)
        # [tokens, 1, heads, D] -> [heads, tokens, D]
        query, key, value = (x.squeeze(1).transpose(0, 1) for x in (query, key, value))
        out = self.core(query, key, value, params, self.scale)
        return out.transpose(0, 1).reshape(out.shape[1], 1, -1)


class _GatherTokens(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, order, group):
        ctx.group = group
        ctx.length = x.shape[0]
        ctx.save_for_backward(order)
        gathered = x.new_empty((group.size() * x.shape[0], *x.shape[1:]))
        dist.all_gather_into_tensor(gathered, x.contiguous(), group=group)
        return gathered.index_select(0, order)

    @staticmethod
    def backward(ctx, grad):
        (order,) = ctx.saved_tensors
        by_rank = grad.new_empty(grad.shape).index_copy_(0, order, grad)
        mine = grad.new_empty((ctx.length, *grad.shape[1:]))
        dist.reduce_scatter_tensor(mine, by_rank, group=ctx.group)
        return mine, None, None


def gather_tokens(x: torch.Tensor, order: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """All tokens of the bin in DFS order from every rank's share [T, ...]; gradients go back to the
    owners, summed."""
    return _GatherTokens.apply(x, order, group)
