"""AdamW for CPU with the state layout of NVIDIA's fused Adam: `step` in the parameter group."""

from __future__ import annotations

import torch


class GroupStepAdam(torch.optim.Optimizer):
    """Adam with decoupled weight decay (Loshchilov and Hutter, arXiv 1711.05101), one step counter
    per group."""

    def __init__(
        self, params, lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.0, adam_w_mode=True, **_
    ):
        if not adam_w_mode:
            raise ValueError(
                "GroupStepAdam decays weights decoupled from the gradient; adam_w_mode must be True"
            )
        super().__init__(
            params,
            dict(lr=lr, betas=betas, eps=eps, weight_decay=weight_decay, bias_correction=True),
        )

    @torch.no_grad()
    def step(self, closure=None) -> None:  # type: ignore[override]
        """Update every parameter that has a gradient."""
        for group in self.param_groups:
            if group["params"]:
                group["step"] = group.get("step", 0) + 1
            params = [p for p in group["params"] if p.grad is not None]
            if params:
                self._update(group, params)

    def _update(self, group: dict, params: list[torch.Tensor]) -> None:
        for p in params:
            if "exp_avg" not in self.state[p]:
                self.state[p]["exp_avg"] = torch.zeros_like(p, dtype=torch.float32)
                self.state[p]["exp_avg_sq"] = torch.zeros_like(p, dtype=torch.float32)
        grads = [p.grad.float() for p in params if p.grad is not None]
        means = [self.state[p]["exp_avg"] for p in params]
        squares = [self.state[p]["exp_avg_sq"] for p in params]
        beta1, beta2 = group["betas"]
        step = group["step"]
        lr = group["lr"]
        if group["weight_decay"]:
            torch._foreach_mul_(params, 1 - lr * group["weight_decay"])
        torch._foreach_lerp_(means, grads, 1 - beta1)
        torch._foreach_mul_(squares, beta2)
        torch._foreach_addcmul_(squares, grads, grads, 1 - beta2)
        scale = torch._foreach_sqrt(squares)
        torch._foreach_div_(scale, (1 - beta2**step) ** 0.5)
        torch._foreach_add_(scale, group["eps"])
        torch._foreach_addcdiv_(params, means, scale, -lr / (1 - beta1**step))
