"""Gated DeltaNet layers on packed trees, on Megatron's module: same parameters, another forward
pass.

The convolution reads each token's predecessors on its own path; the recurrence runs over the
forest. Under context parallelism, tokens are exchanged for heads (all-to-all) around both, so each
rank runs whole paths of its heads.

Legend: t this rank's tokens, T all tokens of the bin, N heads of this rank.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import megatron.core.ssm.gated_delta_net as megatron_gdn
import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.spec_utils import ModuleSpec

from gyre_megatron.cpu import cpu_enabled
from gyre_megatron.errors import ConfigError, VersionError
from gyre_megatron.training.delta_rule import ForestPlan, forest_delta_rule, plan_forest
from gyre_megatron.training.norm import PlainRMSNorm
from gyre_megatron.training.tree_batch import TreeParams

FUSED_RULE = megatron_gdn.chunk_gated_delta_rule if megatron_gdn.HAVE_FLA else None
"""fla's kernel, where it is installed."""


def tree_gdn_spec(config, transformer_engine: bool = False) -> ModuleSpec:
    """Spec of a Gated DeltaNet layer's `self_attention`."""
    column = ColumnParallelLinear
    row = RowParallelLinear
    if transformer_engine:
        from megatron.core.extensions.transformer_engine import (
            TEColumnParallelLinear,
            TERowParallelLinear,
        )

        column = TEColumnParallelLinear
        row = TERowParallelLinear
    submodules = megatron_gdn.GatedDeltaNetSubmodules(
        in_proj=column, out_norm=PlainRMSNorm, out_proj=row
    )
    return ModuleSpec(module=TreeGatedDeltaNet, submodules=submodules)


class TreeGatedDeltaNet(megatron_gdn.GatedDeltaNet):
    """Each node starts from its parent's recurrent state and convolution tail; siblings never see
    each other."""

    def __init__(self, *args, cp_comm_type: str | None = None, **kwargs) -> None:
        with buildable_without_fla():
            super().__init__(*args, **kwargs)
        self.cp_group = self.pg_collection.cp

    def forward(
        self, hidden_states, attention_mask=None, packed_seq_params: TreeParams | None = None, **_
    ):
        """hidden_states [t / sp, 1, H] -> ([t / sp, 1, H], bias)."""
        if not isinstance(packed_seq_params, TreeParams):
            raise ConfigError(
                "a tree Gated DeltaNet layer needs packed_seq_params to be a TreeParams"
            )
        params = packed_seq_params
        projected = self.in_proj(hidden_states)[0].squeeze(1)
        widths = [
            self.qk_dim,
            self.qk_dim,
            self.v_dim,
            self.v_dim,
            self.num_value_heads,
            self.num_value_heads,
        ]
        *mixed, gate, beta, alpha = projected.split([w // self.tp_size for w in widths], dim=-1)
        out = self._mix([*mixed, beta, alpha], params)
        out = self._apply_gated_norm(out.to(gate.dtype), gate.reshape(-1, self.value_head_dim))
        return self.out_proj(out.reshape(gate.shape[0], 1, -1))

    def _mix(self, columns: list[torch.Tensor], params: TreeParams) -> torch.Tensor:
        """query, key, value, beta, alpha [t, ...] -> recurrence output [t, heads, value size]."""
        cp = self.cp_group.size()
        rank = self.cp_group.rank()
        if cp == 1:
            return self._recur(columns, self._parameters_of(1, 0), params)
        order = params.order
        assert order is not None
        shares = [torch.cat([c.chunk(cp, dim=-1)[r] for c in columns], dim=-1) for r in range(cp)]
        whole = _exchange(torch.stack(shares), self.cp_group).flatten(0, 1).index_select(0, order)
        whole = whole.split([c.shape[-1] // cp for c in columns], dim=-1)
        out = self._recur(whole, self._parameters_of(cp, rank), params)
        by_rank = torch.empty_like(out).index_copy(0, order, out)
        # [cp, t, heads / cp, size]
        local = _exchange(by_rank.unflatten(0, (cp, -1)), self.cp_group)
        return local.transpose(0, 1).flatten(1, 2)

    def _parameters_of(self, cp: int, rank: int):
        """Convolution, decay and time-step parameters of this rank's heads."""
        widths = [w // self.tp_size for w in (self.qk_dim, self.qk_dim, self.v_dim)]
        parts = [p.chunk(cp)[rank] for p in self.conv1d.weight.squeeze(1).split(widths)]
        return torch.cat(parts), self.A_log.chunk(cp)[rank], self.dt_bias.chunk(cp)[rank]

    def _recur(self, columns, parameters, params: TreeParams) -> torch.Tensor:
        plan = _plan(params, columns[0].device)
        conv, a_log, dt_bias = parameters
        query, key, value, beta, alpha = columns
        mixed = self.act_fn(
            path_convolution(torch.cat([query, key, value], dim=-1), conv, plan.previous)
        )
        query, key, value = mixed.split([query.shape[-1], key.shape[-1], value.shape[-1]], dim=-1)
        query, key = (l2_norm(x.unflatten(-1, (-1, self.key_head_dim))) for x in (query, key))
        value = value.unflatten(-1, (-1, self.value_head_dim))
        repeats = value.shape[1] // key.shape[1]
        query, key = (x.repeat_interleave(repeats, dim=1) for x in (query, key))
        decay = -a_log.float().exp() * F.softplus(alpha.float() + dt_bias.float())
        kernel = _fused if FUSED_RULE is not None and value.is_cuda else None
        return forest_delta_rule(query, key, value, decay, beta.float().sigmoid(), plan, kernel)


@contextlib.contextmanager
def buildable_without_fla() -> Iterator[None]:
    """Let Megatron's constructor pass where fla is missing and the slow rule below is meant to run.

    The flag is raised for this one construction and lowered again: other users of Megatron's module
    must still be told that fla is missing. On a GPU the slow rule would be a silent loss of speed.

    Raises:
        VersionError: fla is missing and `enable_cpu` was not called.
    """
    if megatron_gdn.HAVE_FLA:
        yield
        return
    if not cpu_enabled():
        raise VersionError(
            "Gated DeltaNet layers need flash-linear-attention, which is not installed; install it "
            "(pip install flash-linear-attention), or call gyre_megatron.cpu.enable_cpu() on a "
            "machine without CUDA"
        )
    megatron_gdn.HAVE_FLA = True
    try:
        yield
    finally:
        megatron_gdn.HAVE_FLA = False


def _plan(params: TreeParams, device: torch.device) -> ForestPlan:
    if "forest" not in params.cache:
        params.cache["forest"] = plan_forest(*params.nodes, device)
    return params.cache["forest"]


def _fused(query, key, value, decay, beta, state):
    """fla's kernel on one batch of segments."""
    assert FUSED_RULE is not None
    return FUSED_RULE(
        query.contiguous(),
        key.contiguous(),
        value.contiguous(),
        g=decay,
        beta=beta,
        initial_state=state,
        output_final_state=True,
    )


def path_convolution(x: torch.Tensor, weight: torch.Tensor, previous: torch.Tensor) -> torch.Tensor:
    """Causal depthwise convolution along each token's path: x [T, C], weight [C, taps], previous
    [T] -> [T, C]."""
    padded = torch.cat([x, x.new_zeros(1, x.shape[1])])
    steps = torch.cat([previous, previous.new_tensor([len(previous)])])  # nothing precedes nothing
    index = torch.arange(len(x), device=x.device)
    out = padded[:-1] * weight[:, -1]
    for tap in range(2, weight.shape[1] + 1):
        index = steps[index]
        out = out + padded[index] * weight[:, -tap]
    return out


def l2_norm(x: torch.Tensor, eps: float = 1e-6) -> torch.Tensor:
    """Unit length in the last dimension, in fp32."""
    return x.float() * torch.rsqrt(x.float().square().sum(-1, keepdim=True) + eps)


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        out = x.new_empty(x.shape)  # empty_like would keep the strides of a transposed gradient
        dist.all_to_all_single(out, x.contiguous(), group=group)
        return out

    @staticmethod
    def backward(ctx, grad):
        return _Exchange.apply(grad, ctx.group), None


def _exchange(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Row r of x [ranks, ...] goes to rank r; row s of the result came from rank s."""
    return _Exchange.apply(x, group)
