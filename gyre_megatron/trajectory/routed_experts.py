"""Which experts each token took, as engines report it, laid over the nodes of a call.

An engine reports rows for input positions [start, sequence length - 1) when a request ends. A call
that moved has one report a leg; a token's row is that of the leg that sampled after it, never one
recomputed later by other weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from gyre_megatron.errors import EngineError
from gyre_megatron.trajectory.records import Node

MISSING = -1


@dataclass(frozen=True)
class RoutingShape:
    """Layers as the engine counts them, how many leading ones are dense, experts per token."""

    num_layers: int
    num_dense_layers: int
    experts_per_token: int

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> RoutingShape | None:
        """Read a Hugging Face config.json; None for a model without experts."""
        if not config.get("num_experts_per_tok"):
            return None
        return cls(
            config["num_hidden_layers"],
            config.get("first_k_dense_replace") or 0,
            config["num_experts_per_tok"],
        )

    def rows(self, raw: bytes) -> np.ndarray:
        """int16 [positions, MoE layers, experts per token] of an engine's int32 bytes."""
        row = 4 * self.num_layers * self.experts_per_token
        if len(raw) % row:
            raise EngineError(
                f"{len(raw)} bytes of routed experts are no multiple of {row}: another model is "
                "served"
            )
        shaped = np.frombuffer(raw, np.int32).reshape(-1, self.num_layers, self.experts_per_token)
        return shaped[:, self.num_dense_layers :].astype(np.int16)


class RouteRecorder:
    """Collects the reports of one call.

    Args:
        start: First position of interest: the first token of the first node that is new.
    """

    def __init__(self, shape: RoutingShape, start: int) -> None:
        self._shape = shape
        self.start = start
        self._legs: list[tuple[int, np.ndarray]] = []

    def add(self, prompt_length: int, raw: bytes) -> None:
        """The report of a leg that was fed `prompt_length` tokens."""
        self._legs.append((prompt_length, self._shape.rows(raw)))

    def assign(self, nodes: Sequence[Node]) -> None:
        """Give each node its rows; positions that nobody reported are MISSING (a call's last token
        always is)."""
        if not self._legs or not nodes:
            return
        first = nodes[0].start
        end = nodes[-1].end
        rows = np.full((end - first, *self._legs[0][1].shape[1:]), MISSING, np.int16)
        for number, (prompt_length, reported) in enumerate(self._legs):
            begin = self.start if number == 0 else max(prompt_length - 1, self.start)
            stop = min(self.start + len(reported), end)
            rows[begin - first : stop - first] = reported[begin - self.start : stop - self.start]
        for node in nodes:
            node.routed_experts = rows[node.start - first : node.end - first]
