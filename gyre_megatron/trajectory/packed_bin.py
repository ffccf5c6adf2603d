"""The packed form: what a micro-step computes, as plain arrays.

Made by `trajectory.packing`, sent as bytes, read by training. Invariants: nodes lie in depth-first
order, so the subtree of a node is one interval of tokens; token k is visible to token q exactly
when `k <= q < subtree_ends[node(k)]`.
"""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields

import numpy as np


@dataclass(frozen=True)
class PackedBin:
    """A forest of token nodes in depth-first order, and the edges that carry the loss.

    Attributes:
        token_ids: int32 [T].
        positions: int32 [T]; depth of the token on its path, for rotary embeddings.
        node_starts, node_ends, subtree_ends: int32 [M]; token offsets, nodes in depth-first order,
            none empty.
        edge_sources: int32 [E]; token whose hidden state predicts the label.
        edge_labels: int32 [E].
        edge_weights: float32 [E]; share of the edge in the batch's loss.
        edge_behaviour_logprobs, edge_temperatures: float32 [E].
        edge_versions: int32 [E]; weight version that sampled the label.
        edge_trajectories: int32 [E]; index into the trajectory columns.
        trajectory_advantages: float32 [J].
        trajectory_executions: int32 [J]; index of the execution in the list that was packed.
        trajectory_roles: str [J].
        bin_weight: float32 []; the bin's share of the batch's unique tokens, each execution
            counting alike.
        routed_experts: int16 [T, num_moe_layers, experts_per_token], -1 where the engine returned
            none; or None.
    """

    token_ids: np.ndarray
    positions: np.ndarray
    node_starts: np.ndarray
    node_ends: np.ndarray
    subtree_ends: np.ndarray
    edge_sources: np.ndarray
    edge_labels: np.ndarray
    edge_weights: np.ndarray
    edge_behaviour_logprobs: np.ndarray
    edge_temperatures: np.ndarray
    edge_versions: np.ndarray
    edge_trajectories: np.ndarray
    trajectory_advantages: np.ndarray
    trajectory_executions: np.ndarray
    trajectory_roles: np.ndarray
    bin_weight: np.ndarray
    routed_experts: np.ndarray | None = None

    @property
    def num_tokens(self) -> int:
        """Unique tokens of the bin."""
        return len(self.token_ids)

    @property
    def num_trajectories(self) -> int:
        """Trajectories that train in this bin."""
        return len(self.trajectory_advantages)

    @property
    def num_pairs(self) -> int:
        """Visible (query, key) pairs: the operation count of attention."""
        length = (self.node_ends - self.node_starts).astype(np.int64)
        below = (self.subtree_ends - self.node_ends).astype(np.int64)
        return int((length * (length + 1) // 2 + length * below).sum())

    @classmethod
    def empty(cls) -> PackedBin:
        """A bin without tokens, for a data-parallel replica that has nothing left to do."""
        return cls.concatenate([])

    @classmethod
    def concatenate(cls, bins: Sequence[PackedBin]) -> PackedBin:
        """Lay bins behind each other: their trees do not see each other, their weights add up."""
        at_token = _offsets([b.num_tokens for b in bins])
        at_trajectory = _offsets([b.num_trajectories for b in bins])
        return cls(
            token_ids=_ints(b.token_ids for b in bins),
            positions=_ints(b.positions for b in bins),
            node_starts=_ints(b.node_starts + at for b, at in zip(bins, at_token, strict=True)),
            node_ends=_ints(b.node_ends + at for b, at in zip(bins, at_token, strict=True)),
            subtree_ends=_ints(b.subtree_ends + at for b, at in zip(bins, at_token, strict=True)),
            edge_sources=_ints(b.edge_sources + at for b, at in zip(bins, at_token, strict=True)),
            edge_labels=_ints(b.edge_labels for b in bins),
            edge_weights=_floats(b.edge_weights for b in bins),
            edge_behaviour_logprobs=_floats(b.edge_behaviour_logprobs for b in bins),
            edge_temperatures=_floats(b.edge_temperatures for b in bins),
            edge_versions=_ints(b.edge_versions for b in bins),
            edge_trajectories=_ints(
                b.edge_trajectories + at for b, at in zip(bins, at_trajectory, strict=True)
            ),
            trajectory_advantages=_floats(b.trajectory_advantages for b in bins),
            trajectory_executions=_ints(b.trajectory_executions for b in bins),
            trajectory_roles=np.concatenate(
                [np.zeros(0, "<U1"), *(b.trajectory_roles for b in bins)]
            ),
            bin_weight=np.asarray(sum(float(b.bin_weight) for b in bins), np.float32),
            routed_experts=_routes(bins),
        )

    def to_bytes(self) -> bytes:
        """Serialise as an npz archive (no pickle)."""
        buffer = io.BytesIO()
        columns = {f.name: getattr(self, f.name) for f in fields(self)}
        np.savez(buffer, **{name: v for name, v in columns.items() if v is not None})
        return buffer.getvalue()

    @classmethod
    def from_bytes(cls, data: bytes) -> PackedBin:
        """Inverse of `to_bytes`."""
        with np.load(io.BytesIO(data), allow_pickle=False) as archive:
            return cls(**{name: archive[name] for name in archive.files})


def _offsets(lengths: Sequence[int]) -> list[int]:
    return np.cumsum([0, *lengths])[:-1].tolist()


def _ints(parts: Iterator[np.ndarray]) -> np.ndarray:
    return np.concatenate([np.zeros(0, np.int32), *parts]).astype(np.int32)


def _floats(parts: Iterator[np.ndarray]) -> np.ndarray:
    return np.concatenate([np.zeros(0, np.float32), *parts]).astype(np.float32)


def _routes(bins: Sequence[PackedBin]) -> np.ndarray | None:
    """Routes of all tokens, -1 where unknown; None where no bin has any."""
    known = [b.routed_experts for b in bins if b.routed_experts is not None]
    if not known:
        return None
    row = known[0].shape[1:]
    parts = [
        np.full((b.num_tokens, *row), -1, np.int16)
        if b.routed_experts is None
        else b.routed_experts
        for b in bins
    ]
    return np.concatenate(parts).astype(np.int16)
