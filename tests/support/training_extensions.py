"""What a user could bring to training: an objective and an attention core."""

from __future__ import annotations

import dataclasses

import numpy as np
import torch

from gyre_megatron.algos import EdgeBatch, ObjectiveContext, ObjectiveResult, gspo_loss
from gyre_megatron.ops.tree_attention import tree_attention_reference


def scaled_gspo(
    logprobs: torch.Tensor, entropies: torch.Tensor, edges: EdgeBatch, context: ObjectiveContext
) -> ObjectiveResult:
    """Ours times `objective_options.factor`."""
    result = gspo_loss(
        logprobs,
        entropies,
        edges,
        context.config,
        reference_logprobs=context.reference_logprobs,
        current_version=context.weight_version,
        reduce=context.reduce,
    )
    return dataclasses.replace(result, loss=context.options["factor"] * result.loss)


def imitate(
    logprobs: torch.Tensor, entropies: torch.Tensor, edges: EdgeBatch, context: ObjectiveContext
) -> ObjectiveResult:
    """Supervised: every trained token, whatever its advantage."""
    return ObjectiveResult(-(edges.weights * logprobs).sum())


def vector_loss(logprobs, entropies, edges, context) -> ObjectiveResult:
    return ObjectiveResult(logprobs)


def no_result(logprobs, entropies, edges, context) -> torch.Tensor:
    return logprobs.sum()


def too_few(logprobs, entropies) -> ObjectiveResult:
    return ObjectiveResult(logprobs.sum())


calls = 0


def dense_core(query, key, value, params, scale) -> torch.Tensor:
    """Attention over a dense mask, from the tree's definition."""
    global calls
    calls += 1
    starts, ends, subtree_ends = params.nodes
    until = np.repeat(subtree_ends, ends - starts)
    queries = np.concatenate([np.arange(a, b) for a, b in params.intervals])[:, None]
    keys = np.arange(key.shape[1])[None]
    visible = torch.from_numpy((keys <= queries) & (queries < until[keys]))
    return tree_attention_reference(query, key, value, visible, scale)
