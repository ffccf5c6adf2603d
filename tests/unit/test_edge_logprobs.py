"""Chunked log-probabilities against the plain float64 form."""

from __future__ import annotations

import pytest
import torch

from gyre_megatron.algos.logprobs import edge_statistics


def plain(hidden, weight, labels, temperatures, vocab_size):
    logits = hidden @ weight[:vocab_size].t() / temperatures[:, None]
    logp = logits.log_softmax(-1)
    entropy = -(logp.exp() * logp).sum(-1)
    grad = torch.nn.functional.one_hot(labels, vocab_size) - logp.exp()
    return logp.gather(1, labels[:, None])[:, 0], entropy, grad.square().sum(-1)


@pytest.mark.parametrize("chunk", [1, 3, 64])
@pytest.mark.parametrize("vocab_size", [37, 40])
def test_equals_log_softmax(chunk: int, vocab_size: int) -> None:
    torch.manual_seed(0)
    hidden, weight = (
        torch.randn(11, 8, dtype=torch.float64),
        torch.randn(40, 8, dtype=torch.float64),
    )
    labels, temperatures = (
        torch.randint(0, vocab_size, (11,)),
        torch.rand(11, dtype=torch.float64) + 0.5,
    )
    down = torch.randn(2, 11, dtype=torch.float64)

    exact = [x.clone().requires_grad_() for x in (hidden, weight)]
    logprobs, entropies, norms = plain(*exact, labels, temperatures, vocab_size)
    (logprobs * down[0] + entropies * down[1]).sum().backward()
    ours = [x.float().requires_grad_() for x in (hidden, weight)]
    result = edge_statistics(
        *ours, labels, temperatures.float(), chunk=chunk, vocab_size=vocab_size
    )
    (result.logprobs * down[0].float() + result.entropies * down[1].float()).sum().backward()

    torch.testing.assert_close(result.logprobs.double(), logprobs.detach(), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(result.entropies.double(), entropies.detach(), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(result.square_norms.double(), norms.detach(), rtol=1e-4, atol=1e-5)
    for mine, other in zip(ours, exact, strict=True):
        torch.testing.assert_close(mine.grad.double(), other.grad, rtol=1e-5, atol=1e-5)


def test_padded_rows_have_no_probability_and_no_gradient() -> None:
    hidden, weight = torch.randn(5, 8), torch.randn(40, 8, requires_grad=True)
    result = edge_statistics(hidden, weight, torch.arange(5), torch.ones(5), vocab_size=33)
    (result.logprobs.sum() + result.entropies.sum()).backward()
    assert weight.grad is not None and not weight.grad[33:].any() and weight.grad[:33].any()


def test_no_edges() -> None:
    hidden = torch.randn(0, 8, requires_grad=True)
    weight = torch.randn(40, 8, requires_grad=True)
    result = edge_statistics(hidden, weight, torch.zeros(0, dtype=torch.long), torch.ones(0))
    result.logprobs.sum().backward()
    assert weight.grad is not None and not weight.grad.any()


def test_logits_never_exist_at_once() -> None:
    """Peak of live logits stays at one chunk: 20,000 edges over 8,192 rows would be 655 MB."""
    import resource

    hidden, weight = (
        torch.randn(20_000, 16, requires_grad=True),
        torch.randn(8192, 16, requires_grad=True),
    )
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    result = edge_statistics(
        hidden, weight, torch.zeros(20_000, dtype=torch.long), torch.ones(20_000), chunk=512
    )
    result.logprobs.sum().backward()
    assert (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024 < 400
