"""Megatron's rank arithmetic: which shard of the model a rank of a cell holds.

Pure numbers, no process groups: a planner on one rank must know the place of every other rank. The
order is Megatron-Core's default `tp-cp-ep-dp-pp` (attention) and `etp-ep-edp-pp` (experts).
"""

from __future__ import annotations

from dataclasses import dataclass, field

from gyre_megatron.config.model import Architecture
from gyre_megatron.config.training import TrainingConfig
from gyre_megatron.errors import LayoutError

StageLayers = tuple[tuple[tuple[int, ...], ...], ...]
"""[pipeline rank][virtual chunk] -> global layer numbers, 0-based."""


@dataclass(frozen=True)
class Parallelism:
    """Sizes of a Megatron training layout."""

    tp: int = 1
    pp: int = 1
    vpp: int = 1
    cp: int = 1
    dp: int = 1
    ep: int = 1
    etp: int | None = None
    """Expert tensor parallelism; None follows `tp`, as Megatron does."""
    stage_layers: StageLayers | None = None
    """Layers of every stage and virtual chunk; None divides them evenly."""

    def __post_init__(self) -> None:
        sizes = {name: getattr(self, name) for name in ("tp", "pp", "vpp", "cp", "dp", "ep")}
        if min(sizes.values()) < 1 or self.expert_tp < 1:
            raise LayoutError(f"parallel sizes must be at least 1, found {sizes}, etp={self.etp}")
        if (self.tp * self.cp * self.dp) % (self.expert_tp * self.ep):
            raise LayoutError(
                f"tp*cp*dp = {self.tp * self.cp * self.dp} is not a multiple of etp*ep = "
                f"{self.expert_tp * self.ep}"
            )

    @property
    def expert_tp(self) -> int:
        return self.tp if self.etp is None else self.etp

    @property
    def expert_dp(self) -> int:
        return self.tp * self.cp * self.dp // (self.expert_tp * self.ep)

    @property
    def world_size(self) -> int:
        return self.tp * self.cp * self.dp * self.pp

    def layers_of(self, num_layers: int) -> StageLayers:
        """The layers of every stage and chunk.

        Raises:
            LayoutError: the layers do not divide evenly and no `stage_layers` were given, or these
            do not list
                every layer exactly once.
        """
        if self.stage_layers is None:
            chunks = self.pp * self.vpp
            if num_layers % chunks:
                raise LayoutError(
                    f"{num_layers} layers do not divide over pp={self.pp} x vpp={self.vpp}; give "
                    "stage_layers"
                )
            per = num_layers // chunks
            first = [[(v * self.pp + p) * per for v in range(self.vpp)] for p in range(self.pp)]
            return tuple(tuple(tuple(range(f, f + per)) for f in stage) for stage in first)
        listed = sorted(layer for stage in self.stage_layers for chunk in stage for layer in chunk)
        if listed != list(range(num_layers)) or len(self.stage_layers) != self.pp:
            raise LayoutError(
                f"stage_layers must list layers 0..{num_layers - 1} once over {self.pp} stages, "
                f"found {listed}"
            )
        return self.stage_layers

    def rank(self, index: int) -> ParallelRank:
        """Where rank `index` of the cell stands."""
        tp, rest = index % self.tp, index // self.tp
        cp, rest = rest % self.cp, rest // self.cp
        dp, pp = rest % self.dp, rest // self.dp
        inner = index % (self.tp * self.cp * self.dp)
        etp, inner = inner % self.expert_tp, inner // self.expert_tp
        return ParallelRank(
            tp=self.tp,
            tp_rank=tp,
            pp=self.pp,
            pp_rank=pp,
            vpp=self.vpp,
            cp=self.cp,
            cp_rank=cp,
            dp=self.dp,
            dp_rank=dp,
            ep=self.ep,
            ep_rank=inner % self.ep,
            etp=self.expert_tp,
            etp_rank=etp,
            stage_layers=self.stage_layers,
        )


@dataclass(frozen=True)
class ParallelRank:
    """One rank's place in a Megatron layout (sizes and ranks, as `parallel_state` reports them)."""

    tp: int = 1
    tp_rank: int = 0
    pp: int = 1
    pp_rank: int = 0
    vpp: int = 1
    cp: int = 1
    cp_rank: int = 0
    dp: int = 1
    dp_rank: int = 0
    ep: int = 1
    ep_rank: int = 0
    etp: int = 1
    etp_rank: int = 0
    stage_layers: StageLayers | None = field(default=None)

    @property
    def parallelism(self) -> Parallelism:
        return Parallelism(
            self.tp, self.pp, self.vpp, self.cp, self.dp, self.ep, self.etp, self.stage_layers
        )

    @property
    def index(self) -> int:
        """This rank's number inside the cell."""
        return self.tp_rank + self.tp * (
            self.cp_rank + self.cp * (self.dp_rank + self.dp * self.pp_rank)
        )

    @property
    def expert_index(self) -> int:
        """This rank's number inside its pipeline stage, in the experts' order."""
        return self.index % (self.tp * self.cp * self.dp)


def parallelism_of(training: TrainingConfig, architecture: Architecture, dp: int) -> Parallelism:
    """The sizes of a cell that trains `architecture` as `training` says, on `dp` replicas."""
    return Parallelism(
        tp=training.tp,
        pp=training.pp,
        vpp=training.vpp or 1,
        cp=training.cp,
        dp=dp,
        ep=training.ep,
        etp=training.expert_tp if architecture.moe else None,
    )
