"""Engine rates from measured operator tables (the package aiconfigurator-core), where it has them.

Optional. Some rows of such tables are wrong by an order of magnitude, so every value is held
against a roofline: it may not be faster than the hardware allows, nor slower than `SLOWEST` times
that; otherwise the roofline with stated efficiencies is taken in its place, and counted.
"""

from __future__ import annotations

import importlib
from functools import lru_cache
from typing import Any

from gyre_megatron.errors import ConfigError, VersionError
from gyre_megatron.simulation.config import SimulationConfig, TablesConfig
from gyre_megatron.simulation.rates import EfficiencyConfig, RooflineRates

SLOWEST = 10.0
"""Real engines reach at least a tenth of the roofline in the ranges that are simulated."""


class TableRates:
    """Rates of measured tables, checked.

    Args:
        stated: roofline with the efficiencies of the configuration; answers what tables cannot.
        config: names the model and system in the tables' own terms.

    Attributes:
        refused: values that the roofline contradicted.
        taken: values that were taken from the tables.

    Raises:
        VersionError: the package is not installed.
        ConfigError: it has no such model or system.
    """

    def __init__(self, stated: RooflineRates, config: SimulationConfig) -> None:
        tables = config.cluster.tables
        if tables is None:
            raise ConfigError(
                "rates: tables needs cluster.tables (model and system in the tables' names, "
                "tp, ep); set it, or take rates: roofline"
            )
        self._stated = stated
        cluster = config.cluster
        ideal = EfficiencyConfig(
            training_flops=1, prefill_flops=1, decode_bandwidth=1, decode_layer_us=0
        )
        self._ideal = RooflineRates(
            stated.costs, cluster.device, ideal, cluster.devices_per_cell, cluster.engines_per_cell
        )
        self._engines = cluster.engines_per_cell
        self._engine = _compile(tables)
        self.refused = 0
        self.taken = 0

    @lru_cache(maxsize=4096)  # noqa: B019  one object a simulation; a value takes 0.1 ms
    def decode_step_s(self, batch: float, context: float) -> float:
        share = max(round(batch / self._engines), 1)
        measured = self._engine.predict_decode_latency(share, int(context), 2) / 1000
        ideal = self._ideal.decode_step_s(share * self._engines, context)
        return self._checked(measured, ideal, self._stated.decode_step_s(batch, context))

    @lru_cache(maxsize=4096)  # noqa: B019
    def prefill_s(self, tokens: float, context: float) -> float:
        if tokens < 1:
            return 0.0
        total = int(context + tokens)
        measured = self._engine.predict_prefill_latency(1, total, int(context)) / 1000
        measured /= self._engines
        return self._checked(
            measured,
            self._ideal.prefill_s(tokens, context),
            self._stated.prefill_s(tokens, context),
        )

    def kv_capacity_tokens(self) -> float:
        return self._stated.kv_capacity_tokens()

    def _checked(self, measured: float, ideal: float, stated: float) -> float:
        if ideal <= measured <= SLOWEST * ideal:
            self.taken += 1
            return measured
        self.refused += 1
        return stated


def _compile(tables: TablesConfig) -> Any:
    try:
        engine = importlib.import_module("aiconfigurator_core.sdk.engine")
    except ImportError:
        raise VersionError(
            "rates: tables needs the package; pip install aiconfigurator-core, "
            "or take rates: roofline"
        ) from None
    try:
        return engine.EngineHandle.compile(
            tables.model,
            tables.system,
            "sglang",
            tp_size=tables.tp,
            moe_tp_size=1,
            moe_ep_size=tables.ep,
        )
    except Exception as error:  # whatever the package raises for names it does not know
        raise ConfigError(
            f"cluster.tables: the tables have no model {tables.model!r} on {tables.system!r} with "
            f"tp={tables.tp}, ep={tables.ep}: {type(error).__name__}: {error}"
        ) from error
