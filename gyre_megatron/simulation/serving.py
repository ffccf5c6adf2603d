"""How fast the executions on a cell advance, given how many there are.

An execution alternates between a call, whose time depends on who else generates, and a tool, whose
time does not. With n of them on a cell the number that generates settles where arrivals and
departures agree; that fixed point is solved once for each n and kept.
"""

from __future__ import annotations

from typing import Protocol

from gyre_megatron.errors import ConfigError
from gyre_megatron.simulation.rates import EngineRates
from gyre_megatron.simulation.workload import WorkloadConfig

MAX_PREFILL_SHARE = 0.9
"""Beyond this share of an engine's time spent on prefill the fluid picture is not trusted."""


class ServingModel(Protocol):
    """One cell's serving."""

    def call_s(self, residents: int) -> float:
        """Mean seconds of a call while `residents` executions live on the cell."""

    def recompute_s(self, context_tokens: float) -> float:
        """Seconds to compute a context again, after a move or under new weights."""


class EngineServing:
    """Serving from engine rates and the mean shape of a call.

    Args:
        rates: of one cell.
        workload: its mean call.
        context_tokens: mean context over all executions.
    """

    def __init__(self, rates: EngineRates, workload: WorkloadConfig, context_tokens: float) -> None:
        self._rates = rates
        self._workload = workload
        self._context = context_tokens
        self._calls: dict[int, float] = {}

    def call_s(self, residents: int) -> float:
        known = self._calls.get(residents)
        if known is None:
            known = self._calls[residents] = self._settle(residents)
        return known

    def recompute_s(self, context_tokens: float) -> float:
        return self._rates.prefill_s(context_tokens, context_tokens / 2)

    def evicted_share(self, residents: int) -> float:
        """Share of calls whose prefix is gone, because contexts exceed the cell's KV cache."""
        wanted = residents * self._context
        return max(0.0, 1.0 - self._rates.kv_capacity_tokens() / wanted) if wanted else 0.0

    def _settle(self, residents: int) -> float:
        """Solve call = output * step(active) / (1 - prefill share) + prefill by damped iteration."""
        work = self._workload
        lost = self.evicted_share(residents) * self._context
        prefill = self._rates.prefill_s(work.appended_tokens, self._context)
        prefill += self.recompute_s(lost)
        call = work.output_tokens * self._rates.decode_step_s(1, self._context) + prefill
        for _ in range(100):
            cycle = call + work.tool_s
            active = max(residents * call / cycle, 1.0)
            share = min(residents * prefill / cycle, MAX_PREFILL_SHARE)
            decode = work.output_tokens * self._rates.decode_step_s(active, self._context)
            settled = decode / (1.0 - share) + prefill
            if abs(settled - call) < 1e-6 * call:
                break
            call = (call + settled) / 2
        # An engine that prefills all the time finishes no more than one prefill after another.
        return max(call, residents * prefill - work.tool_s)


class LoadServing:
    """Serving whose speed falls with the load: (1 + b) / (1 + b * load) calls where full load
    gives one.

    Args:
        full_call_s: seconds of a call at full load.
        slowdown: b; 0 makes the speed independent of the load.
        capacity: executions at full load.
        recompute_s_per_token: of a context.
    """

    def __init__(
        self, full_call_s: float, slowdown: float, capacity: int, recompute_s_per_token: float = 0.0
    ) -> None:
        if full_call_s < 0 or slowdown < 0 or capacity < 1:
            raise ConfigError(
                f"a cell's serving needs full_call_s >= 0, slowdown >= 0 and capacity >= 1, found "
                f"{full_call_s}, {slowdown}, {capacity}"
            )
        self._full_call_s = full_call_s
        self._slowdown = slowdown
        self._capacity = capacity
        self._recompute = recompute_s_per_token

    def call_s(self, residents: int) -> float:
        load = residents / self._capacity
        return self._full_call_s * (1.0 + self._slowdown * load) / (1.0 + self._slowdown)

    def recompute_s(self, context_tokens: float) -> float:
        return self._recompute * context_tokens
