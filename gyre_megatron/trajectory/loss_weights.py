"""How much one trained token counts: the denominators of the loss.

Pure. Decided over all executions of a group before any of them leaves (because its advantage is 0,
because a bin is full), and fixed from then on: an edge's weight depends neither on the packing nor
on who computes it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from gyre_megatron.errors import TrajectoryError
from gyre_megatron.trajectory.tree import ExecutionTree

Denominator = Literal["execution", "batch_tokens", "constant"]


def token_weights(
    trees: Sequence[ExecutionTree],
    num_executions: int,
    denominator: Denominator = "execution",
    constant_length: int | None = None,
) -> list[float]:
    """Loss weight of one trained token of each tree.

    Args:
        trees: All trees that share the weight, also those that will be left out of the packing.
        num_executions: Executions that share the loss: the outer mean. May exceed `len(trees)`:
            an execution that sampled nothing counts and has no tree.
        denominator: `execution`: mean over an execution's trained tokens, then over executions;
            `batch_tokens`: mean over all trained tokens of `trees`, times their share
            `len(trees) / num_executions`; `constant`: sum over `constant_length` (Dr. GRPO,
            arXiv 2503.20783), then mean over executions.
        constant_length: Tokens to divide by under `constant`.

    Raises:
        TrajectoryError: a denominator is not positive or has no such name.
    """
    if num_executions < 1:
        raise TrajectoryError(
            f"num_executions={num_executions} must be at least 1: it is the denominator of the loss"
        )
    counts = [tree.num_trained_tokens for tree in trees]
    match denominator:
        case "execution":
            return [1.0 / (max(1, count) * num_executions) for count in counts]
        case "batch_tokens":
            return [len(trees) / (max(1, sum(counts)) * num_executions)] * len(trees)
        case "constant":
            if not constant_length or constant_length < 1:
                raise TrajectoryError(
                    "denominator 'constant' needs constant_length, the tokens to divide by (>= 1)"
                )
            return [1.0 / (constant_length * num_executions)] * len(trees)
    raise TrajectoryError(
        f"denominator {denominator!r} must be 'execution', 'batch_tokens' or 'constant'"
    )
