"""What a reshard will cost, from two layouts alone: no weights, no devices, no processes.

Used by `gyre plan`. Ranks are planned one by one in forked children, so that each one's time and
memory are its own, as they would be in a job.
"""

from __future__ import annotations

import multiprocessing
import resource
import time
from collections.abc import Sequence
from dataclasses import dataclass
from math import isfinite, lcm, prod
from typing import Any

from pydantic import ValidationError

from gyre_megatron.config.base import one_line
from gyre_megatron.config.layout_rules import check_engine_in_cell, check_serving, check_training
from gyre_megatron.config.model import Architecture
from gyre_megatron.config.training import TrainingConfig
from gyre_megatron.errors import ConfigError, GyreError, PlanError
from gyre_megatron.weights.canonical import canonical_tensors
from gyre_megatron.weights.layout import ReplicatedLayout
from gyre_megatron.weights.megatron import MegatronLayout
from gyre_megatron.weights.megatron_names import MegatronStyle
from gyre_megatron.weights.parallel import parallelism_of
from gyre_megatron.weights.planner import plan_rank
from gyre_megatron.weights.sglang import SglangLayout

_PLAN_TIMEOUT_S = 600


@dataclass(frozen=True)
class Rates:
    """What the hardware carries, per rank, in GB/s (1e9 bytes)."""

    network: float = 50.0
    """One 400 Gb/s port."""
    intra_node: float = 450.0
    """NVLink of an H100/H200, one direction."""
    ranks_per_node: int = 8

    def __post_init__(self) -> None:
        for name, rate in (("network", self.network), ("intra-node", self.intra_node)):
            if not (isfinite(rate) and rate > 0):
                raise ConfigError(f"the {name} rate is {rate} GB/s; a number above 0 was expected")


def parse_layout(text: str, allowed: Sequence[str]) -> dict[str, int]:
    """`"tp4,pp8,ep64"` as sizes by name.

    Raises:
        ConfigError: a part is not a known name followed by a number, or a name stands twice.
    """
    sizes: dict[str, int] = {}
    for part in text.split(","):
        name = part.strip().rstrip("0123456789")
        digits = part.strip()[len(name) :]
        if name not in allowed or not digits or int(digits) < 1:
            raise ConfigError(
                f"{part!r} in layout {text!r} is not one of {', '.join(f'{n}N' for n in allowed)}"
            )
        if name in sizes:
            raise ConfigError(
                f"{name} stands twice in layout {text!r}: {name}{sizes[name]} and {part.strip()}"
            )
        sizes[name] = int(digits)
    return sizes


def training_layout(architecture: Architecture, text: str) -> MegatronLayout:
    """A Megatron layout from text, e.g. `"tp4,pp4,ep64,etp1"`: what a run's `training` section
    with the same sizes gives; without `dp` just enough data parallelism for the experts.

    Raises:
        ConfigError: a cell could not train the model in this layout.
    """
    sizes = parse_layout(text, ("tp", "pp", "vpp", "ep", "etp", "cp", "dp"))
    if sizes.get("vpp") == 1:
        del sizes["vpp"]  # one chunk a stage is no interleaving
    dp = sizes.pop("dp", None)
    try:
        training = TrainingConfig(**sizes)
    except ValidationError as error:
        raise ConfigError(f"layout {text!r}: {one_line(error)}") from None
    if dp is None:
        ranks, expert_ranks = training.tp * training.cp, training.ep * training.expert_tp
        dp = lcm(ranks, expert_ranks) // ranks if architecture.moe else 1
    check_training(training, architecture, training.min_ranks * dp)
    style = MegatronStyle(padded_vocab_size=architecture.padded_vocab_size(training.tp))
    return MegatronLayout(architecture, parallelism_of(training, architecture, dp), style)


def serving_layout(architecture: Architecture, text: str) -> SglangLayout:
    """An SGLang layout from text; `dp` is attention data parallelism.

    Raises:
        ConfigError: a server could not hold the model in this layout.
    """
    sizes = parse_layout(text, ("tp", "ep", "dp"))
    tp, ep, attention_dp = (sizes.get(name, 1) for name in ("tp", "ep", "dp"))
    check_serving(architecture, tp, ep, attention_dp)
    return SglangLayout(architecture, tp, ep, attention_dp)


def sample_ranks(num_ranks: int, stride: int) -> list[int]:
    """First and last rank of every `stride` ranks (a pipeline stage): where the extremes lie."""
    picked = {0, num_ranks - 1, *range(0, num_ranks, stride), *range(stride - 1, num_ranks, stride)}
    return sorted(picked)


def forecast(
    train: MegatronLayout,
    serve: SglangLayout,
    rates: Rates,
    bytes_per_parameter: int = 2,
    staging_mib: int = 128,
    ranks: Sequence[int] | None = None,
) -> dict[str, Any]:
    """Bytes, bound and planning cost of publishing a training cell to the engines on the same
    devices.

    Args:
        ranks: processes to plan; default: the first and last of every pipeline stage.

    Raises:
        ConfigError: the engines do not fit the cell.
        PlanError: a tensor has no plan.
    """
    check_engine_in_cell(serve.num_ranks, train.num_ranks)
    engines = ReplicatedLayout(serve, train.num_ranks // serve.num_ranks)
    picked = (
        sample_ranks(train.num_ranks, train.num_ranks // train.parallelism.pp)
        if ranks is None
        else list(ranks)
    )
    plans = [_in_child(train, engines, rank, bytes_per_parameter, rates) for rank in picked]
    tensors = canonical_tensors(train.architecture)
    sizes = {name: prod(shape) for name, shape in tensors.items()}
    largest = sorted(sizes, key=lambda name: -sizes[name])[:10]
    bound = max(plan["bound_seconds"] for plan in plans)
    return dict(
        params_total=sum(sizes.values()),
        ranks_train=train.num_ranks,
        ranks_serve=serve.num_ranks,
        engines=train.num_ranks // serve.num_ranks,
        ranks_planned=picked,
        plan_seconds_max=max(plan["seconds"] for plan in plans),
        plan_peak_mib=max(plan["peak_mib"] for plan in plans),
        bytes_out_max=max(plan["bytes_out"] for plan in plans),
        bytes_in_max=max(plan["bytes_in"] for plan in plans),
        bytes_local_max=max(plan["bytes_local"] for plan in plans),
        parcels_max=max(plan["parcels"] for plan in plans),
        bound_seconds=bound,
        predicted_seconds=1.5 * bound,
        staging_mib=staging_mib,
        largest_tensors=[
            dict(name=n, shape=tensors[n], bytes=sizes[n] * bytes_per_parameter) for n in largest
        ],
    )


def _in_child(
    train: MegatronLayout, engines: ReplicatedLayout, rank: int, size: int, rates: Rates
) -> dict[str, Any]:
    """Plan one rank in a forked child and bring back its figures."""
    context = multiprocessing.get_context("fork")
    mine, theirs = context.Pipe(duplex=False)
    child = context.Process(target=_plan_one, args=(train, engines, rank, size, rates, theirs))
    child.start()
    theirs.close()
    try:
        if not mine.poll(_PLAN_TIMEOUT_S):
            raise PlanError(f"planning rank {rank} took longer than {_PLAN_TIMEOUT_S} s")
        result = mine.recv()
    except EOFError as error:
        raise PlanError(
            f"planning rank {rank} ended without an answer; its reason is printed above"
        ) from error
    finally:
        child.join(5)
        child.kill()
    if isinstance(result, GyreError):
        raise result
    return result


def _plan_one(
    train: MegatronLayout, engines: ReplicatedLayout, rank: int, size: int, rates: Rates, pipe
) -> None:
    """The child: answers with the figures, or with the error that the parent shall raise."""
    try:
        pipe.send(_measure(train, engines, rank, size, rates))
    except GyreError as error:
        pipe.send(error)
    pipe.close()


def _measure(
    train: MegatronLayout, engines: ReplicatedLayout, rank: int, size: int, rates: Rates
) -> dict[str, Any]:
    before = _resident_mib()
    start = time.perf_counter()
    plan = plan_rank(train, engines, rank)
    seconds = time.perf_counter() - start
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024 - before
    node = rank // rates.ranks_per_node
    flows = []
    for parcels_by_peer in (plan.sends, plan.receives):
        near = far = 0
        for peer, parcels in parcels_by_peer.items():
            nbytes = size * sum(parcel.numel for parcel in parcels)
            if peer // rates.ranks_per_node == node:
                near += nbytes
            else:
                far += nbytes
        flows.append((near, far))
    count = sum(len(p) for side in (plan.sends, plan.receives) for p in side.values()) + len(
        plan.local
    )
    return dict(
        rank=rank,
        seconds=seconds,
        peak_mib=peak,
        bytes_out=sum(flows[0]),
        bytes_in=sum(flows[1]),
        parcels=count,
        bytes_local=size * sum(parcel.numel for parcel in plan.local),
        bound_seconds=max(
            max(far / rates.network, near / rates.intra_node) / 1e9 for near, far in flows
        ),
    )


def _resident_mib() -> float:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize() / 2**20
