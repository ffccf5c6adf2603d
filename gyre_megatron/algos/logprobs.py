"""Log-probabilities at loss edges over a vocabulary that is sharded and taken in chunks.

Legend: E edges, H hidden size, V vocabulary rows of this rank. At most `chunk` rows of logits exist
at a time, in the forward and in the backward pass; every reduction over the vocabulary is in fp32.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist


@dataclass(frozen=True)
class EdgeStatistics:
    """What the loss needs of each edge.

    Attributes:
        logprobs: fp32 [E]; log-probability of the label under softmax(logits / temperature), with
            gradient.
        entropies: fp32 [E]; entropy of that distribution in nats, with gradient.
        square_norms: fp32 [E]; squared norm of d logprob / d (logits / temperature), without
            gradient.
    """

    logprobs: torch.Tensor
    entropies: torch.Tensor
    square_norms: torch.Tensor


def edge_statistics(
    hidden_EH: torch.Tensor,
    weight_VH: torch.Tensor,
    labels_E: torch.Tensor,
    temperatures_E: torch.Tensor,
    *,
    group: dist.ProcessGroup | None = None,
    chunk: int = 4096,
    vocab_size: int | None = None,
    with_entropy_gradient: bool = True,
) -> EdgeStatistics:
    """Score each edge's label without ever holding all logits.

    Args:
        hidden_EH: hidden state at the edge's source; replicated over `group`. Its gradient is this
            rank's share (sum over `group` to get the whole).
        weight_VH: this rank's consecutive rows of the output projection.
        labels_E: int64, global vocabulary ids.
        temperatures_E: fp32, positive.
        group: ranks that hold the other rows, in rank order; None where this rank holds all.
        vocab_size: rows of the true vocabulary; padded rows beyond it get no probability.
    """
    values = _EdgeStatistics.apply(
        hidden_EH,
        weight_VH,
        labels_E,
        temperatures_E,
        group,
        chunk,
        vocab_size,
        with_entropy_gradient,
    )
    return EdgeStatistics(*values)


def _sum(x: torch.Tensor, group: dist.ProcessGroup | None, op=dist.ReduceOp.SUM) -> torch.Tensor:
    if group is not None and group.size() > 1:
        dist.all_reduce(x, op=op, group=group)
    return x


class _Shard:
    """The rows of the vocabulary that this rank holds."""

    def __init__(
        self, weight_VH: torch.Tensor, group: dist.ProcessGroup | None, vocab_size: int | None
    ) -> None:
        rank = 0 if group is None else group.rank()
        self.rows = weight_VH.shape[0]
        self.first = rank * self.rows
        beyond = self.first + self.rows if vocab_size is None else vocab_size
        self.valid = max(0, min(self.rows, beyond - self.first))

    def logits(
        self, hidden: torch.Tensor, weight: torch.Tensor, temperatures: torch.Tensor
    ) -> torch.Tensor:
        logits = (hidden @ weight.t()).float()
        logits = logits / temperatures[:, None]
        if self.valid < self.rows:
            logits[:, self.valid :] = float("-inf")
        return logits

    def local(self, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Row of each label here (0 where it is not here), and whether it is here."""
        index = labels - self.first
        here = (index >= 0) & (index < self.rows)
        return torch.where(here, index, 0), here


class _EdgeStatistics(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx, hidden, weight, labels, temperatures, group, chunk, vocab_size, with_entropy_gradient
    ):
        shard = _Shard(weight, group, vocab_size)
        columns = [hidden.new_empty(len(labels), dtype=torch.float32) for _ in range(4)]
        for start in range(0, len(labels), chunk):
            rows = slice(start, start + chunk)
            logits = shard.logits(hidden[rows], weight, temperatures[rows])
            for column, values in zip(
                columns, _statistics(logits, labels[rows], shard, group), strict=True
            ):
                column[rows] = values
        logprobs, entropies, norms, log_sums = columns
        ctx.save_for_backward(hidden, weight, labels, temperatures, log_sums, entropies)
        ctx.shard = shard
        ctx.chunk = chunk
        ctx.with_entropy = with_entropy_gradient
        ctx.mark_non_differentiable(norms)
        return logprobs, entropies, norms

    @staticmethod
    def backward(ctx, grad_logprobs, grad_entropies, _):
        hidden, weight, labels, temperatures, log_sums, entropies = ctx.saved_tensors
        grad_hidden = torch.empty_like(hidden)
        grad_weight = torch.zeros_like(weight, dtype=torch.float32)
        for start in range(0, len(labels), ctx.chunk):
            rows = slice(start, start + ctx.chunk)
            log_p = (
                ctx.shard.logits(hidden[rows], weight, temperatures[rows]) - log_sums[rows, None]
            )
            p = log_p.exp()
            grad = p * -grad_logprobs[rows, None]
            index, here = ctx.shard.local(labels[rows])
            grad.scatter_add_(1, index[:, None], (grad_logprobs[rows] * here)[:, None])
            if ctx.with_entropy:
                slope = -p * (torch.where(p > 0, log_p, 0.0) + entropies[rows, None])
                grad += grad_entropies[rows, None] * slope
            grad = (grad / temperatures[rows, None]).to(hidden.dtype)
            grad_hidden[rows] = grad @ weight
            grad_weight += grad.t() @ hidden[rows]
        return grad_hidden, grad_weight.to(weight.dtype), None, None, None, None, None, None


def _statistics(logits, labels, shard: _Shard, group) -> tuple[torch.Tensor, ...]:
    """log p(label), entropy, squared gradient norm, log-sum-exp of one chunk."""
    peak = _sum(logits.max(dim=-1).values, group, dist.ReduceOp.MAX)
    index, here = shard.local(labels)
    label_logits = torch.where(here, logits.gather(1, index[:, None])[:, 0], 0.0)
    e = (logits - peak[:, None]).exp()
    finite = torch.where(e > 0, logits, 0.0)
    sums = torch.stack([e.sum(-1), (e * finite).sum(-1), e.square().sum(-1), label_logits])
    total, weighted, squares, label_logits = _sum(sums, group)
    log_sums = peak + total.log()
    logprobs = label_logits - log_sums
    entropies = log_sums - weighted / total
    norms = 1 - 2 * logprobs.exp() + squares / total.square()
    return logprobs, entropies, norms, log_sums
