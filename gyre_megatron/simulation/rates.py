"""How fast a cell serves and trains, from its devices and its model: a roofline with stated
efficiencies.

Every rate is a time for a unit of work of one cell. A cluster may also state rates outright
(`measured`), for instance those of a real run that a simulation is held against.
"""

from __future__ import annotations

from typing import Protocol

from pydantic import Field

from gyre_megatron.config.base import Section
from gyre_megatron.config.model import Architecture


class DeviceConfig(Section):
    """One accelerator. Figures are the vendor's, dense, without sparsity."""

    name: str = "H200"
    peak_tflops: float = Field(989.0, gt=0)
    """bf16."""
    memory_gb_per_s: float = Field(4800.0, gt=0)
    memory_gib: float = Field(141.0, gt=0)
    network_gb_per_s: float = Field(50.0, gt=0)
    """Per device, one direction."""


class EfficiencyConfig(Section):
    """Shares of the roofline that real kernels reach."""

    training_flops: float = Field(0.35, gt=0, le=1)
    """Model flops utilisation of a training micro-step, recomputation not counted as useful."""
    prefill_flops: float = Field(0.45, gt=0, le=1)
    decode_bandwidth: float = Field(0.6, gt=0, le=1)
    """Of the memory bandwidth, weights and KV cache together."""
    decode_layer_us: float = Field(25.0, ge=0)
    """Time of a layer's collectives and launches in a decode step, whatever the batch."""


class EngineRates(Protocol):
    """What serving costs on one cell."""

    def decode_step_s(self, batch: float, context: float) -> float:
        """Seconds of one decode step of `batch` sequences of `context` tokens, over the cell."""

    def prefill_s(self, tokens: float, context: float) -> float:
        """Seconds to compute `tokens` new tokens that follow `context` tokens, over the cell."""

    def kv_capacity_tokens(self) -> float:
        """Tokens whose keys and values the cell's engines hold."""


class ModelCosts:
    """Operation and byte counts of an architecture.

    Source: two operations a parameter and token forward; attention adds four per head dimension,
    query and key.
    """

    def __init__(self, architecture: Architecture, weight_bytes: float = 2, kv_bytes: float = 2):
        self.architecture = architecture
        self.weight_bytes = weight_bytes
        self.kv_bytes = kv_bytes
        arch = architecture
        layers = range(arch.num_layers)
        self.attention_layers = sum(not arch.is_gdn_layer(layer) for layer in layers)
        self.moe_layers = sum(arch.is_moe_layer(layer) for layer in layers)
        self.expert_parameters = 0.0
        if arch.moe is not None:
            self.expert_parameters = 3.0 * arch.hidden_size * arch.moe.intermediate_size
        self.dense_parameters = self._dense_parameters()

    @property
    def active_parameters(self) -> float:
        """Parameters that one token meets."""
        moe = self.architecture.moe
        routed = 0.0 if moe is None else moe.experts_per_token * self.expert_parameters
        return self.dense_parameters + self.moe_layers * routed

    @property
    def total_parameters(self) -> float:
        """All parameters of the decoder."""
        moe = self.architecture.moe
        routed = 0.0 if moe is None else moe.num_experts * self.expert_parameters
        return self.dense_parameters + self.moe_layers * routed

    @property
    def kv_bytes_per_token(self) -> float:
        """Bytes of keys and values that one token leaves, over all layers."""
        arch = self.architecture
        if arch.mla is not None:
            width = arch.mla.kv_lora_rank + arch.mla.qk_rope_head_dim
        else:
            width = 2 * arch.num_key_value_heads * arch.head_dim
        return self.attention_layers * width * self.kv_bytes

    def forward_flops(self, tokens: float, context: float) -> float:
        """Operations of a forward pass over `tokens` tokens whose mean visible context is
        `context`."""
        arch = self.architecture
        pairs = 4.0 * arch.num_attention_heads * arch.head_dim * context * self.attention_layers
        return tokens * (2.0 * self.active_parameters + pairs)

    def decode_bytes(self, batch: float, context: float) -> float:
        """Bytes that one decode step reads: the weights that the batch meets, and its context."""
        moe = self.architecture.moe
        experts = 0.0
        if moe is not None:
            miss = (1 - moe.experts_per_token / moe.num_experts) ** batch
            experts = self.moe_layers * moe.num_experts * (1 - miss) * self.expert_parameters
        weights = (self.dense_parameters + experts) * self.weight_bytes
        return weights + batch * context * self.kv_bytes_per_token

    def _dense_parameters(self) -> float:
        arch = self.architecture
        hidden = arch.hidden_size
        total = 2.0 * arch.vocab_size * hidden
        for layer in range(arch.num_layers):
            total += self._mixer_parameters(layer)
            if arch.is_moe_layer(layer):
                assert arch.moe is not None
                total += hidden * arch.moe.num_experts
                total += 3.0 * hidden * arch.moe.shared_expert_intermediate_size
            else:
                total += 3.0 * hidden * arch.intermediate_size
        return total

    def _mixer_parameters(self, layer: int) -> float:
        arch = self.architecture
        hidden = arch.hidden_size
        if arch.gdn is not None and arch.is_gdn_layer(layer):
            keys = arch.gdn.num_key_heads * arch.gdn.key_head_dim
            values = arch.gdn.num_value_heads * arch.gdn.value_head_dim
            return hidden * (2.0 * keys + 3.0 * values + 2.0 * arch.gdn.num_value_heads)
        if arch.mla is not None:
            mla = arch.mla
            query = mla.qk_nope_head_dim + mla.qk_rope_head_dim
            rank = mla.q_lora_rank or 0
            q = hidden * rank + rank * arch.num_attention_heads * query
            kv = hidden * (mla.kv_lora_rank + mla.qk_rope_head_dim)
            up = arch.num_attention_heads * (mla.qk_nope_head_dim + mla.v_head_dim)
            out = arch.num_attention_heads * mla.v_head_dim * hidden
            return q + kv + mla.kv_lora_rank * up + out
        heads = arch.num_attention_heads * (2 if arch.attention_output_gate else 1)
        return (
            hidden
            * arch.head_dim
            * (heads + 2.0 * arch.num_key_value_heads + arch.num_attention_heads)
        )


class RooflineRates:
    """Rates of a cell of `num_devices` devices by counting operations and bytes.

    Args:
        num_devices: devices of the cell.
        engines: engines that share the cell's devices (data parallel); a batch divides over them.
    """

    def __init__(
        self,
        costs: ModelCosts,
        device: DeviceConfig,
        efficiency: EfficiencyConfig,
        num_devices: int,
        engines: int = 1,
    ) -> None:
        self.costs = costs
        self._efficiency = efficiency
        self._engines = engines
        self._devices = num_devices / engines
        self._device = device

    def decode_step_s(self, batch: float, context: float) -> float:
        share = batch / self._engines
        read = self.costs.decode_bytes(share, context)
        bandwidth = self._devices * self._device.memory_gb_per_s * 1e9
        moved = read / (bandwidth * self._efficiency.decode_bandwidth)
        fixed = self.costs.architecture.num_layers * self._efficiency.decode_layer_us * 1e-6
        return max(moved, self._flops_s(self.costs.forward_flops(share, context))) + fixed

    def prefill_s(self, tokens: float, context: float) -> float:
        return self._flops_s(self.costs.forward_flops(tokens, context)) / self._engines

    def kv_capacity_tokens(self) -> float:
        memory = self._devices * self._device.memory_gib * 2**30 * 0.88  # SGLang's usual share
        weights = self.costs.total_parameters * self.costs.weight_bytes
        return max(memory - weights, 0.0) * self._engines / self.costs.kv_bytes_per_token

    def training_s(self, tokens: float, context: float) -> float:
        """Seconds of forward and backward over `tokens` packed tokens: three forward passes, one
        more where activations are computed again."""
        flops = 3.0 * self.costs.forward_flops(tokens, context)
        peak = self._devices * self._engines * self._device.peak_tflops * 1e12
        return flops / (peak * self._efficiency.training_flops)

    def _flops_s(self, flops: float) -> float:
        peak = self._devices * self._device.peak_tflops * 1e12
        return flops / (peak * self._efficiency.prefill_flops)
