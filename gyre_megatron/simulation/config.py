"""A simulation in YAML: the model, the workload, the cluster and the scheduler's own section.

Composes like every configuration (`base:`, later wins, `--set`); unknown keys are refused with the
nearest valid name.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from gyre_megatron.config.base import Section
from gyre_megatron.config.model import Architecture
from gyre_megatron.config.scheduler import SchedulerConfig
from gyre_megatron.simulation.rates import DeviceConfig, EfficiencyConfig
from gyre_megatron.simulation.workload import WorkloadConfig


class TransitionConfig(Section):
    """What moves and boundaries cost. Defaults are the paper's means where it gives them."""

    leave_s: float = Field(8.52, ge=0)
    """Rollout to training: drain, release, the core's weights, gradients zeroed."""
    return_s: float = Field(3.46, ge=0)
    """Training to rollout: memory resumed, weights installed, first token."""
    sync_s: float = Field(1.0, ge=0)
    """A joiner pulls the core's weights in the middle of a burst."""
    publish_s: float = Field(3.0, ge=0)
    """Weights into every engine at the end of a burst; cells that serve go on meanwhile."""
    optimizer_s: float = Field(5.0, ge=0)
    """Gradients reduced to the core, optimizer step; training cells wait."""


class CapacityLoss(Section):
    """Engines of a cell die; its trainer does not."""

    cell: int = Field(ge=0)
    """Standalone cells are numbered after the others."""
    at_s: float = Field(gt=0)
    """Virtual time from the start of the run."""
    until_s: float | None = Field(None, gt=0)
    """When they are back; None: never."""
    share_left: float = Field(0.0, ge=0, lt=1)
    """Of the cell's capacity."""

    @model_validator(mode="after")
    def _ends_after_it_began(self) -> CapacityLoss:
        if self.until_s is not None and self.until_s <= self.at_s:
            raise ValueError(f"until_s={self.until_s:g} must lie after at_s={self.at_s:g}")
        return self


class MeasuredRates(Section):
    """Rates stated outright, for example those of a run on real engines."""

    call_s: float = Field(gt=0)
    """Seconds of a mean call with `scheduler.cell_capacity` executions on the cell."""
    slowdown: float = Field(1.0, ge=0)
    """b in (1 + b * load) / (1 + b): how much faster a call is on an idle cell."""
    recompute_us_per_token: float = Field(0.0, ge=0)
    """To compute a context again after a move or under new weights."""
    training_us_per_token: float = Field(gt=0)
    """One cell, one packed token, forward and backward."""


class TablesConfig(Section):
    """A model and a system in the names of the measured operator tables."""

    model: str
    system: str = "h200_sxm"
    tp: int = Field(8, ge=1)
    ep: int = Field(1, ge=1)


class PoolConfig(Section):
    """Cells and what they are made of."""

    num_cells: int = Field(8, ge=1)
    """Equal cells; cell 0 is the core."""
    standalone_cells: int = Field(0, ge=0)
    """Cells of the same size that only ever serve."""
    devices_per_cell: int = Field(32, ge=1)
    engines_per_cell: int = Field(1, ge=1)
    """Data-parallel engines that share a cell."""
    device: DeviceConfig = DeviceConfig()
    efficiency: EfficiencyConfig = EfficiencyConfig()
    weight_bytes: float = Field(2.0, gt=0)
    """Bytes of a weight while it serves: 2 for bf16, 1 for fp8."""
    kv_bytes: float = Field(2.0, gt=0)
    kv_store: bool = False
    """A moved call loads its prefix from a store that all cells share, in place of computing it."""
    kv_load_gb_per_s: float = Field(20.0, gt=0)
    """Of a cell, from the store."""
    transitions: TransitionConfig = TransitionConfig()
    losses: tuple[CapacityLoss, ...] = ()
    """Engines that die in the course of the run."""
    tables: TablesConfig | None = None
    """What `rates: tables` looks up."""
    measured: MeasuredRates | None = None
    """Replaces device, efficiency and model by stated rates."""

    @model_validator(mode="after")
    def _losses_have_a_cell(self) -> PoolConfig:
        total = self.num_cells + self.standalone_cells
        for loss in self.losses:
            if loss.cell >= total:
                raise ValueError(f"losses: there is no cell {loss.cell}, the last is {total - 1}")
        return self

    @model_validator(mode="after")
    def _engines_divide(self) -> PoolConfig:
        if self.devices_per_cell % self.engines_per_cell:
            raise ValueError(
                f"engines_per_cell={self.engines_per_cell} does not divide devices_per_cell="
                f"{self.devices_per_cell}"
            )
        return self


class SimulatedModel(Section):
    """The model's shape; a file of configs/models/ gives it."""

    architecture: Architecture | None = None


class SimulatedRun(Section):
    """Length and chance."""

    name: str = "simulation"
    num_steps: int = Field(48, ge=1)
    seed: int = 0


class TrainerConfig(Section):
    """How training is cut into work that cells claim."""

    token_budget: int = Field(131_072, ge=16)
    """Packed tokens of a micro-step of one cell."""
    streaming: bool = True
    """Whether training starts on finished groups while others run. Off: on a whole batch only."""


class SimulationConfig(Section):
    """Everything a simulation is made from."""

    run: SimulatedRun = SimulatedRun()
    model: SimulatedModel = SimulatedModel()
    workload: WorkloadConfig = WorkloadConfig()
    cluster: PoolConfig = PoolConfig()
    trainer: TrainerConfig = TrainerConfig()
    scheduler: SchedulerConfig = SchedulerConfig()
    rates: Literal["roofline", "tables"] = "roofline"
    """`tables` takes measured operator tables (the package aiconfigurator-core), each value held
    against the roofline."""

    @model_validator(mode="after")
    def _has_rates(self) -> SimulationConfig:
        if self.cluster.measured is None and self.model.architecture is None:
            raise ValueError(
                "model.architecture is missing: name a model under base: (configs/models/), or "
                "state the rates in cluster.measured"
            )
        return self
