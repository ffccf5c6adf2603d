"""The gated delta rule over a forest: every segment starts from its parent's final state.

Source: Gated DeltaNet (arXiv 2412.06464); per token, S <- exp(g) S, then S <- S + k (beta (v - S^T
k))^T, out = S^T q. Segments of one level of the tree run together, those of similar length in one
batch, each with its own state: nothing passes between siblings.

Legend: T tokens, B segments of a batch, L its longest segment, C chunk, N heads, K key size, V
value size.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

import numpy as np
import torch

CHUNK = 64


@dataclass(frozen=True)
class SegmentBatch:
    """Segments that run together.

    Attributes:
        tokens: int64 [B, L]; global token of each place, T where there is none.
        parents: int64 [B]; segment whose final state each starts from; the number of segments
            stands for zero.
        segments: int64 [B]; their own numbers.
    """

    tokens: torch.Tensor
    parents: torch.Tensor
    segments: torch.Tensor


@dataclass(frozen=True)
class ForestPlan:
    """Order of computation of one bin; `previous` [T] is each token's predecessor on its path (T
    for a first token)."""

    batches: list[SegmentBatch]
    num_segments: int
    previous: torch.Tensor


def plan_forest(
    starts: np.ndarray, ends: np.ndarray, subtree_ends: np.ndarray, device: torch.device
) -> ForestPlan:
    """Segments (runs of only children), their levels and batches."""
    num_tokens = int(ends[-1])
    previous = np.arange(-1, num_tokens - 1)
    segments: list[list[int]] = []  # start, end, parent, level
    stack: list[tuple[int, int]] = []  # (segment, subtree_end) of the open path
    for start, end, last in zip(starts.tolist(), ends.tolist(), subtree_ends.tolist(), strict=True):
        while stack and stack[-1][1] <= start:
            stack.pop()
        if stack and stack[-1][1] == last and segments[stack[-1][0]][1] == start:
            segments[stack[-1][0]][1] = end  # the only child continues its parent's segment
            continue
        parent = stack[-1][0] if stack else -1
        previous[start] = segments[parent][1] - 1 if stack else num_tokens
        segments.append([start, end, parent, segments[parent][3] + 1 if stack else 0])
        stack.append((len(segments) - 1, last))
    groups = defaultdict(list)
    for number, (start, end, _, level) in enumerate(segments):
        groups[level, (end - start).bit_length()].append(number)
    batches = [
        _batch([(n, *segments[n][:3]) for n in groups[key]], num_tokens, len(segments), device)
        for key in sorted(groups)
    ]
    return ForestPlan(batches, len(segments), torch.from_numpy(previous).to(device))


def _batch(members, num_tokens: int, num_segments: int, device: torch.device) -> SegmentBatch:
    longest = max(end - start for _, start, end, _ in members)
    tokens = np.full((len(members), longest), num_tokens)
    for row, (_, start, end, _) in zip(tokens, members, strict=True):
        row[: end - start] = np.arange(start, end)
    parents = [num_segments if parent < 0 else parent for *_, parent in members]
    columns = tokens, np.array(parents), np.array([n for n, *_ in members])
    return SegmentBatch(*(torch.from_numpy(c).to(device) for c in columns))


def forest_delta_rule(
    query, key, value, decay, beta, plan: ForestPlan, kernel=None
) -> torch.Tensor:
    """Run the rule over a forest.

    Args:
        query, key: [T, N, K]; value: [T, N, V]; decay (log, <= 0) and beta: [T, N].
        kernel: (query, key, value, decay, beta, state) -> (out, state) on [B, L, ...]; default
            `chunked_delta_rule`.

    Returns:
        fp32 [T, N, V].
    """
    kernel = kernel or chunked_delta_rule
    inputs = [
        torch.cat([x.float(), x.new_zeros(1, *x.shape[1:]).float()])
        for x in (query, key, value, decay, beta)
    ]
    states: list[torch.Tensor] = []
    rows: dict[int, int] = {}  # segment -> row of its final state
    out = value.new_zeros(value.shape[0] + 1, *value.shape[1:], dtype=torch.float32)
    zero = value.new_zeros(1, value.shape[1], key.shape[-1], value.shape[-1], dtype=torch.float32)
    for batch in plan.batches:
        known = torch.cat([*states, zero])
        pick = [rows.get(p, len(known) - 1) for p in batch.parents.tolist()]
        initial = known[torch.tensor(pick, device=known.device)]
        result, final = kernel(*(x[batch.tokens] for x in inputs), initial)
        out = out.index_put((batch.tokens,), result)
        for segment in batch.segments.tolist():
            rows[segment] = len(rows)
        states.append(final)
    return out[:-1]


def chunked_delta_rule(query, key, value, decay, beta, state) -> tuple[torch.Tensor, torch.Tensor]:
    """The gated delta rule in chunks, by a triangular solve per chunk (the WY form of arXiv
    2406.06484).

    Args:
        query, key: fp32 [B, L, N, K]; value: [B, L, N, V]; decay, beta: [B, L, N]; zero decay and
            beta at unused places leave the state as it is.
        state: fp32 [B, N, K, V].

    Returns:
        Outputs [B, L, N, V] and the final state.
    """
    length = query.shape[1]
    chunk = min(CHUNK, 1 << max(0, length - 1).bit_length())
    pad = -length % chunk
    query, key, value, decay, beta = (
        torch.nn.functional.pad(x, (0, 0) * (x.dim() - 2) + (0, pad))
        .transpose(1, 2)
        .unflatten(2, (-1, chunk))
        for x in (query * query.shape[-1] ** -0.5, key, value, decay, beta)
    )  # [B, N, chunks, C, ...]
    # Sums of decay from each place to each later one, never a difference of two large sums (which
    # loses the digits).
    between = decay[..., None].expand(*decay.shape, chunk).tril(-1).cumsum(-2)
    ratio = between.exp().tril()
    total = decay.cumsum(-1)
    weighted = key * beta[..., None]
    lower = ((weighted @ key.transpose(-1, -2)) * ratio).tril(-1)
    right = torch.cat([value * beta[..., None], weighted * total.exp()[..., None]], dim=-1)
    solved = torch.linalg.solve_triangular(lower, right, upper=False, unitriangular=True)
    values, keys = solved.split([value.shape[-1], key.shape[-1]], dim=-1)
    scores = (query @ key.transpose(-1, -2)) * ratio
    reads = query * total.exp()[..., None]
    writes = key * between[..., -1, :].exp()[..., None]
    outputs = []
    for i in range(query.shape[2]):
        fresh = values[:, :, i] - keys[:, :, i] @ state
        outputs.append(reads[:, :, i] @ state + scores[:, :, i] @ fresh)
        state = (
            state * total[:, :, i, -1, None, None].exp() + writes[:, :, i].transpose(-1, -2) @ fresh
        )
    out = torch.stack(outputs, dim=2).flatten(2, 3)[:, :, :length]
    return out.transpose(1, 2), state
