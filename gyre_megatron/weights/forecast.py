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

import numpy as np
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
from gyre_megatron.weights.traffic import traffic

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

    Bytes and bound are those of the busiest of all processes. The bound is what the wire alone
    takes; how close a publish comes to it is for a measurement to say.

    Args:
        ranks: processes whose planning is timed; default: the first, the last, and those with most
            to send and to receive.

    Raises:
        ConfigError: the engines do not fit the cell.
        PlanError: a tensor has no plan.
    """
    check_engine_in_cell(serve.num_ranks, train.num_ranks)
    engines = ReplicatedLayout(serve, train.num_ranks // serve.num_ranks)
    tensors = canonical_tensors(train.architecture)
    sizes = {name: prod(shape) for name, shape in tensors.items()}
    flows = traffic(train, engines, tensors, rates.ranks_per_node)
    extremes = {0, train.num_ranks - 1, int(flows.out.argmax()), int(flows.incoming.argmax())}
    picked = sorted(extremes) if ranks is None else list(ranks)
    plans = [_in_child(train, engines, rank) for rank in picked]
    largest = sorted(sizes, key=lambda name: -sizes[name])[:10]
    seconds = (
        np.maximum(far / rates.network, near / rates.intra_node)
        for far, near in ((flows.out_far, flows.out_near), (flows.in_far, flows.in_near))
    )
    bound = bytes_per_parameter / 1e9 * max(float(side.max()) for side in seconds)
    return dict(
        params_total=sum(sizes.values()),
        ranks_train=train.num_ranks,
        ranks_serve=serve.num_ranks,
        engines=train.num_ranks // serve.num_ranks,
        ranks_planned=picked,
        plan_seconds_max=max(plan["seconds"] for plan in plans),
        plan_peak_mib=max(plan["peak_mib"] for plan in plans),
        bytes_out_max=bytes_per_parameter * int(flows.out.max()),
        bytes_in_max=bytes_per_parameter * int(flows.incoming.max()),
        bytes_local_max=bytes_per_parameter * int(flows.local.max()),
        imbalance=imbalance(flows.out),
        bytes_serve_max=bytes_per_parameter * _largest_rank(serve),
        parcels_max=max(plan["parcels"] for plan in plans),
        bound_seconds=bound,
        staging_mib=staging_mib,
        largest_tensors=[
            dict(name=n, shape=tensors[n], bytes=sizes[n] * bytes_per_parameter) for n in largest
        ],
    )


def imbalance(sent: np.ndarray) -> float:
    """The most that a process sends over the mean of all; 1 where nothing is sent."""
    return float(sent.max() / sent.mean()) if sent.any() else 1.0


def _largest_rank(serve: SglangLayout) -> int:
    """Parameters of the engine rank that holds most of them: the first, which has the most of an
    uneven vocabulary."""
    return sum(prod(tensor.shape) for tensor in serve.tensors(0))


def _in_child(train: MegatronLayout, engines: ReplicatedLayout, rank: int) -> dict[str, Any]:
    """Plan one rank in a forked child and bring back its figures."""
    context = multiprocessing.get_context("fork")
    mine, theirs = context.Pipe(duplex=False)
    child = context.Process(target=_plan_one, args=(train, engines, rank, theirs))
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


def _plan_one(train: MegatronLayout, engines: ReplicatedLayout, rank: int, pipe) -> None:
    """The child: answers with the figures, or with the error that the parent shall raise."""
    try:
        pipe.send(_measure(train, engines, rank))
    except GyreError as error:
        pipe.send(error)
    pipe.close()


def _measure(train: MegatronLayout, engines: ReplicatedLayout, rank: int) -> dict[str, Any]:
    before = _resident_mib()
    start = time.perf_counter()
    plan = plan_rank(train, engines, rank)
    seconds = time.perf_counter() - start
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024 - before
    sides = (*plan.sends.values(), *plan.receives.values(), plan.local)
    return dict(seconds=seconds, peak_mib=peak, parcels=sum(len(parcels) for parcels in sides))


def _resident_mib() -> float:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize() / 2**20
