"""The MoE router on packed trees: statistics count unique tokens, and recorded routes can be
replayed."""

from __future__ import annotations

import torch
from megatron.core.transformer.moe.moe_utils import (
    MoEAuxLossAutoScaler,
    compute_routing_scores_for_aux_loss,
    get_tokens_per_expert_and_token_count,
    switch_load_balancing_loss_func,
    topk_routing_with_score_function,
)
from megatron.core.transformer.moe.router import TopKRouter

from gyre_megatron.training.tree_batch import TreeParams


class RecordedRoutes:
    """Chooses the experts that were recorded, and the router's own choice for tokens without a
    record."""

    def __init__(self, routes: torch.Tensor) -> None:
        self.routes = routes  # int64 [tokens, topk]; -1 where nothing was recorded

    def get_replay_topk(
        self, scores, topk, num_groups=None, group_topk=None, default_compute_topk=None
    ):
        """Megatron's replay hook: scores [tokens, experts] -> (chosen scores, chosen experts)."""
        _, own = default_compute_topk(scores, topk, num_groups=num_groups, group_topk=group_topk)
        chosen = torch.where(self.routes >= 0, self.routes, own)
        return scores.gather(1, chosen), chosen


class TreeRouter(TopKRouter):
    """TopKRouter that ignores padding, weighs its balancing loss by the bin, and replays routes."""

    params: TreeParams | None = None
    """Set by the layer before each forward pass, also when activations are recomputed."""
    moe_index: int = 0
    """Index of this layer among the MoE layers: the column of the recorded routes."""

    def routing(self, logits: torch.Tensor, padding_mask: torch.Tensor | None = None):
        """Probabilities and map [tokens, experts] of this rank's tokens."""
        params = self.params
        logits = logits.view(-1, self.config.num_moe_experts)
        routes = (
            None if params is None or params.routes is None else params.routes[:, self.moe_index]
        )
        probs, routing_map = topk_routing_with_score_function(
            logits,
            self.topk,
            use_pre_softmax=self.config.moe_router_pre_softmax,
            num_groups=self.config.moe_router_num_groups,
            group_topk=self.config.moe_router_group_topk,
            scaling_factor=self.config.moe_router_topk_scaling_factor,
            score_function=self.score_function,
            expert_bias=self.expert_bias,
            router_replay=None if routes is None else RecordedRoutes(routes),
        )
        if params is not None and torch.is_grad_enabled():
            if self.training and self.config.moe_aux_loss_coeff:
                probs = self._with_balancing_loss(probs, logits, params)
            if self.enable_expert_bias:
                with torch.no_grad():
                    self.local_tokens_per_expert += (routing_map & ~params.padding[:, None]).sum(
                        dim=0
                    )
        return probs, routing_map

    def _with_balancing_loss(self, probs, logits, params: TreeParams):
        """Switch Transformer's loss (arXiv 2101.03961) over the bin's unique tokens, times the
        bin's share."""
        chosen, scores = compute_routing_scores_for_aux_loss(
            logits, self.topk, self.score_function, padding_mask=params.padding
        )
        per_expert, _, total = get_tokens_per_expert_and_token_count(
            chosen, self.tp_cp_group, topk=self.topk, with_padding_mask=True
        )
        loss = switch_load_balancing_loss_func(
            scores,
            per_expert,
            total.clamp(min=1),
            self.topk,
            self.num_experts,
            self.config.moe_aux_loss_coeff,
        )
        return MoEAuxLossAutoScaler.apply(probs, loss * params.aux_weight)
