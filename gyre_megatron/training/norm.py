"""RMSNorm of Megatron's local layers: takes part in sequence parallelism, which the stock one
refuses."""

from __future__ import annotations

import torch
import torch.nn.functional as F


class RMSNorm(torch.nn.Module):
    """Root-mean-square norm in fp32; zero-centred where the config says so (weight stored minus
    one)."""

    def __init__(
        self, config, hidden_size: int, eps: float = 1e-6, zero_centered: bool | None = None, **_
    ) -> None:
        super().__init__()
        self.eps = eps
        self.zero_centered = (
            config.layernorm_zero_centered_gamma if zero_centered is None else zero_centered
        )
        initial = torch.zeros if self.zero_centered else torch.ones
        self.weight = torch.nn.Parameter(initial(hidden_size, dtype=config.params_dtype))
        setattr(self.weight, "sequence_parallel", config.sequence_parallel)  # noqa: B010  (Megatron sums its gradient)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight = self.weight.float() + 1 if self.zero_centered else self.weight.float()
        return F.rms_norm(x.float(), (x.shape[-1],), weight, self.eps).to(x.dtype)


class PlainRMSNorm(RMSNorm):
    """Never zero-centred: the output norm of a Gated DeltaNet layer."""

    def __init__(self, config, hidden_size: int, eps: float = 1e-6, **_) -> None:
        super().__init__(config, hidden_size, eps, zero_centered=False)
