"""What the fork server of the ranks imports: Megatron on the CPU, and the trainer."""

from __future__ import annotations

import torch

from gyre_megatron.cpu import enable_cpu

if not torch.cuda.is_available():
    enable_cpu()

import gyre_megatron.training.trainer  # noqa: E402, F401  (after enable_cpu: loads without a compiler)
