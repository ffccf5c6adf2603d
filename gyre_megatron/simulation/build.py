"""From a simulation's configuration to a world: rates, costs, capacities, executions."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from gyre_megatron.config.scheduler import SchedulerConfig
from gyre_megatron.errors import ConfigError
from gyre_megatron.simulation.config import MeasuredRates, PoolConfig, SimulationConfig
from gyre_megatron.simulation.costs import Costs
from gyre_megatron.simulation.rates import EngineRates, ModelCosts, RooflineRates
from gyre_megatron.simulation.serving import EngineServing, LoadServing
from gyre_megatron.simulation.tables import TableRates
from gyre_megatron.simulation.workload import Executions, draw
from gyre_megatron.simulation.world import World


@dataclass(frozen=True)
class Setting:
    """What every policy of a comparison shares.

    Attributes:
        capacity: C_e; executions a cell serves, at most what its KV cache holds.
    """

    config: SimulationConfig
    executions: Executions
    costs: Costs
    capacity: int

    def world(self, policy: str, training_cells: int = 1) -> World:
        """A fresh world under `policy`; `training_cells` is the split of the policy async."""
        config = self.config
        scheduler = config.scheduler.model_copy(
            update={
                "policy": policy,
                "cell_capacity": self.capacity,
                "async_training_cells": training_cells,
            }
        )
        return World(
            scheduler,
            config.cluster.num_cells,
            config.cluster.standalone_cells,
            config.run.num_steps,
            self.executions,
            self.costs,
            config.workload.timeout_s,
            config.cluster.losses,
        )


def build(config: SimulationConfig) -> Setting:
    """Work out rates and draw the executions, once for all policies.

    Raises:
        ConfigError: the model does not fit a cell.
        VersionError: measured tables are asked for and their package is not installed.
    """
    scheduler, workload = config.scheduler, config.workload
    num_groups = config.run.num_steps * scheduler.groups_per_step
    executions = draw(workload, num_groups, scheduler.executions_per_group, config.run.seed)
    context = float(np.average(executions.context_tokens, weights=executions.calls))
    if config.cluster.measured is not None:
        costs = _measured(config, config.cluster.measured)
        return Setting(config, executions, costs, scheduler.cell_capacity)
    roofline = _roofline(config)
    engine: EngineRates = roofline
    if config.rates == "tables":
        engine = TableRates(roofline, config)
    serving = EngineServing(engine, workload, context)
    capacity = _capacity(scheduler, engine, context)
    tokens = config.trainer.token_budget
    costs = Costs(
        serving=serving,
        training_s_per_token=roofline.training_s(tokens, context / 2) / tokens,
        tokens_per_micro_step=tokens,
        transitions=config.cluster.transitions,
        move_s=_move_cost(config.cluster, engine, roofline.costs),
        streaming=config.trainer.streaming,
    )
    return Setting(config, executions, costs, capacity)


def _roofline(config: SimulationConfig) -> RooflineRates:
    architecture = config.model.architecture
    assert architecture is not None  # the configuration was checked for it
    cluster = config.cluster
    costs = ModelCosts(architecture, cluster.weight_bytes, cluster.kv_bytes)
    return RooflineRates(
        costs,
        cluster.device,
        cluster.efficiency,
        cluster.devices_per_cell,
        cluster.engines_per_cell,
    )


def _capacity(scheduler: SchedulerConfig, engine: EngineRates, context: float) -> int:
    """C_e: as configured, but no more executions than the KV cache holds contexts."""
    held = int(engine.kv_capacity_tokens() / context)
    if held < 1:
        raise ConfigError(
            f"a cell's KV cache holds {engine.kv_capacity_tokens():.0f} tokens, less than one mean "
            f"context of {context:.0f}; raise cluster.devices_per_cell or lower "
            "cluster.engines_per_cell, cluster.weight_bytes or cluster.kv_bytes"
        )
    return min(scheduler.cell_capacity, held)


def _move_cost(cluster: PoolConfig, engine: EngineRates, costs: ModelCosts):
    """Seconds that a moved execution loses: its prefix computed again, or loaded."""

    def recompute(context: float) -> float:
        return engine.prefill_s(context, context / 2)

    def load(context: float) -> float:
        moved = context * costs.kv_bytes_per_token
        return min(moved / (cluster.kv_load_gb_per_s * 1e9), recompute(context))

    # Gated DeltaNet states are not kept per block, so such a model computes its prefix again.
    can_load = cluster.kv_store and costs.architecture.gdn is None
    return load if can_load else recompute


def _measured(config: SimulationConfig, rates: MeasuredRates) -> Costs:
    serving = LoadServing(
        rates.call_s,
        rates.slowdown,
        config.scheduler.cell_capacity,
        rates.recompute_us_per_token * 1e-6,
    )
    return Costs(
        serving=serving,
        training_s_per_token=rates.training_us_per_token * 1e-6,
        tokens_per_micro_step=config.trainer.token_budget,
        transitions=config.cluster.transitions,
        move_s=(lambda _: 0.0) if config.cluster.kv_store else serving.recompute_s,
        streaming=config.trainer.streaming,
    )
