"""One node's tokens as columns of equal length: what was sampled, how likely, by which weights."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from gyre_megatron.trajectory.records import Node

NOT_SAMPLED = -1
"""Weight version of a token that no policy sampled."""


@dataclass(frozen=True)
class TokenColumns:
    """Columns of the n tokens of a node.

    Attributes:
        token_ids: int32 [n].
        sampled: bool [n]; False for context.
        logprobs: float32 [n]; 0 where not sampled.
        weight_versions: int32 [n]; NOT_SAMPLED where not sampled.
        temperatures: float32 [n]; 1 where not sampled.
    """

    token_ids: np.ndarray
    sampled: np.ndarray
    logprobs: np.ndarray
    weight_versions: np.ndarray
    temperatures: np.ndarray


def token_columns(node: Node) -> TokenColumns:
    """Lay a stored node out token by token."""
    length = len(node.token_ids)
    columns = TokenColumns(
        token_ids=node.token_ids,
        sampled=np.zeros(length, bool),
        logprobs=np.zeros(length, np.float32),
        weight_versions=np.full(length, NOT_SAMPLED, np.int32),
        temperatures=np.ones(length, np.float32),
    )
    if node.sampled:
        answer = slice(node.num_context, None)
        columns.sampled[answer] = True
        columns.logprobs[answer] = node.logprobs
        columns.weight_versions[answer] = sampled_versions(node)
        columns.temperatures[answer] = node.temperature
    return columns


def sampled_versions(node: Node) -> np.ndarray:
    """int64 [sampled tokens]: the weight version that sampled each."""
    versions = [version for version, _ in node.versions]
    counts = [count for _, count in node.versions]
    return np.repeat(np.asarray(versions, np.int64), counts)
