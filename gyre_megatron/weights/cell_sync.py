"""Publishing: the weights of one training cell become the weights that the cell's engine serves.

Collective over the ranks of a cell. A publish is a reshard whose targets are the shadows of the
engine's ranks, next versions in shared memory beside those that serve. A training rank on an engine
rank's host holds its shadow; the configured transport brings the boxes there, straight into the
shadow where it can. The engine is held only while it verifies and copies. Until the commit nothing
of the old version is touched; a failure on any rank leaves it serving, and the next publish starts
afresh.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import msgspec
import torch
import torch.distributed as dist

from gyre_megatron.config.model import Architecture
from gyre_megatron.config.weights import WeightsConfig
from gyre_megatron.errors import ConfigError, GyreError, TransferError
from gyre_megatron.weights.direct import Sums, add_sums
from gyre_megatron.weights.engine import Outcome, ServingEngine
from gyre_megatron.weights.executor import Resharder
from gyre_megatron.weights.installer import EngineInstaller
from gyre_megatron.weights.megatron import bind, layout_of, named_tensors
from gyre_megatron.weights.messages import Status
from gyre_megatron.weights.parallel import ParallelRank
from gyre_megatron.weights.planner import plan_digest
from gyre_megatron.weights.rendezvous import Rendezvous
from gyre_megatron.weights.shadow_plan import ShadowPlan
from gyre_megatron.weights.shared_memory import memory_identity
from gyre_megatron.weights.transports.base import Transport
from gyre_megatron.weights.transports.choose import open_transport


@dataclass(frozen=True)
class PublishReport:
    """What one publish cost on this rank, in seconds and bytes."""

    version: int
    seconds: float
    plan_seconds: float
    """0 when the plan of an earlier publish could be used again."""
    pack_seconds: float
    """Bringing this rank's boxes into the shadows, checksums included."""
    install_seconds: float
    """The leader's view of pausing, verifying and committing; other ranks wait for it."""
    bytes_written: int
    """What this rank's boxes hold, in the engine's dtypes."""


class PublishError(TransferError):
    """A publish did not go well.

    Attributes:
        outcome: what is known of the engine.
    """

    def __init__(self, message: str, outcome: Outcome) -> None:
        super().__init__(message)
        self.outcome = outcome


class _Attached(msgspec.Struct, array_like=True):
    """What the ranks tell each other before they plan; only the leader has answers."""

    memory: str
    """Identity of this rank's shared memory."""
    directory: str = ""
    answers: list[Status] = []


Result = TypeVar("Result")

_encode = msgspec.msgpack.Encoder().encode
_decode_attached = msgspec.msgpack.Decoder(_Attached).decode
_decode_sums = msgspec.msgpack.Decoder(Sums).decode
_decode_outcome = msgspec.msgpack.Decoder(Outcome).decode


class CellWeightSync:
    """One rank's part in publishing its cell's weights.

    Args:
        model_chunks: this rank's Megatron modules.
        place: this rank's place in the cell.
        engine: the cell's server; only rank 0 talks to it, other ranks may pass None.
        kv_store: reached by all ranks of the cell; default: that of the default process group.
        name: unique among the publishers of one store.
    """

    def __init__(
        self,
        model_chunks: Sequence[torch.nn.Module],
        architecture: Architecture,
        place: ParallelRank,
        engine: ServingEngine | None,
        config: WeightsConfig | None = None,
        kv_store: dist.Store | None = None,
        name: str = "gyre/weights/cell",
    ) -> None:
        self._config = config or WeightsConfig()
        self._architecture = architecture
        self._chunks = model_chunks
        self._layout = layout_of(architecture, place, model_chunks)
        self._sources = bind(self._layout, place.index, model_chunks)
        self._kv_store = dist.PrefixStore(
            name, kv_store or dist.distributed_c10d._get_default_store()
        )
        self._meeting = Rendezvous(
            self._kv_store, place.index, self._layout.num_ranks, self._config.timeout_s
        )
        self._engine = None
        if place.index == 0:
            if engine is None:
                raise ConfigError("rank 0 of a cell publishes into its engine; pass one")
            self._engine = EngineInstaller(engine, self._config)
        self._transport: Transport | None = None
        self._plan: ShadowPlan | None = None
        self._resharder: Resharder | None = None
        self._epoch = 0

    def attach(self) -> float:
        """Learn the engine's geometry and map its memory, so that the first publish is as quick as
        all others; collective. A publish does it where it has not been done.

        Returns:
            Seconds it took; 0 where it had been done.

        Raises:
            PublishError: on every rank alike; the engine is as it was.
        """
        self._meeting.start(limit_s=self._config.timeout_s)
        return self._before_commit("attaching to the engine", self._prepare)

    def publish(self, version: int) -> PublishReport:
        """Make the engine serve the current parameters as `version`; collective.

        Raises:
            PublishError: on every rank alike; `outcome` and the message say what is known of the
                engine.
        """
        start = time.perf_counter()
        self._meeting.start(limit_s=self._config.timeout_s)
        planned = self._before_commit(f"publishing version {version}", self._prepare)
        sums = self._before_commit(f"publishing version {version}", self._write)
        written = time.perf_counter()
        self._install(version, sums)
        end = time.perf_counter()
        assert self._plan is not None
        return PublishReport(
            version,
            end - start,
            planned,
            written - start - planned,
            end - written,
            self._plan.nbytes_sent,
        )

    def close(self) -> None:
        """Drop the shadow; the next publish attaches afresh. A rank that woke up late writes where
        nobody reads."""
        self._plan = None
        self._resharder = None
        if self._transport is not None:
            self._transport.recover()
        if self._engine is not None:
            self._engine.discard()

    def _before_commit(self, what: str, action: Callable[[], Result]) -> Result:
        """Run a collective step that leaves the engine's weights alone, whatever happens in it."""
        try:
            return action()
        except TransferError as error:
            self.close()
            raise PublishError(
                f"{what} failed: {error}; the previous weights stay in place",
                Outcome("not committed", str(error)),
            ) from error

    # -- attaching ---------------------------------------------------

    def _prepare(self) -> float:
        if self._resharder is not None:
            return 0.0
        start = time.perf_counter()
        self._epoch += 1
        ranks = [_decode_attached(said) for said in self._step("attaching", self._attach)]
        if self._transport is None:
            self._transport = open_transport(
                self._config, self._kv_store, self._meeting.process, len(ranks), "transport"
            )
        keys = self._step("planning the publish", lambda: self._map(ranks))
        if len(set(keys)) > 1:
            raise TransferError(
                "the ranks of the cell plan for different layouts (keys "
                f"{[key.decode()[:8] for key in keys]}); give all of them the same parallel sizes, "
                "stage layers and architecture"
            )
        assert self._resharder is not None
        self._resharder.connect(2 * self._meeting.undertaking)
        if self._engine is not None:
            self._engine.unlink()
        return time.perf_counter() - start

    def _attach(self) -> bytes:
        here = memory_identity(self._config.shared_memory_dir)
        if self._engine is None:
            return _encode(_Attached(here))
        answers = self._engine.attach(self._architecture)
        return _encode(_Attached(here, str(self._engine.directory), answers))

    def _map(self, ranks: Sequence[_Attached]) -> bytes:
        """Plan, prove that every element of this rank's shadows will be written, and map them."""
        assert self._transport is not None
        leader = ranks[0]
        plan = ShadowPlan(
            self._layout,
            self._meeting.process,
            leader.answers,
            leader.directory,
            [process for process, rank in enumerate(ranks) if rank.memory == leader.memory],
        )
        self._resharder = plan.resharder(self._sources, self._transport, self._config.verify)
        self._plan = plan
        return plan_digest(self._layout, plan.target, self._epoch, plan.dtype_names).encode()

    # -- one publish ---------------------------------------------------

    def _write(self) -> list[Sums] | None:
        """Bring this rank's boxes into the shadows; returns the checksums of every shadow."""
        assert self._resharder is not None and self._plan is not None
        # Their storage may have moved since the plan was made.
        sources = dict(named_tensors(self._chunks))
        times = self._resharder.run(sources, 2 * self._meeting.undertaking + 1)
        if not self._config.verify:
            return None
        everyone = self._meeting.exchange("adding up checksums", payload=_encode(times.sums))
        total: Sums = {}
        for sums in everyone:
            add_sums(total, _decode_sums(sums))
        return self._plan.sums_of_ranks(total)

    def _install(self, version: int, sums: list[Sums] | None) -> None:
        """Let the leader commit, and everyone know how it ended."""
        settle_s = settle_seconds(self._config.timeout_s)
        said = b""
        if self._engine is not None:
            left = self._meeting.seconds_left
            said = _encode(self._engine.install(version, sums, left, settle_s))
        try:
            answers = self._meeting.exchange(
                f"installing version {version}", payload=said, longer_s=2 * settle_s
            )
        except TransferError as error:
            self.close()
            outcome = _decode_outcome(said) if said else Outcome("unknown", str(error))
            raise PublishError(
                _told(version, outcome)
                if said
                else f"whether the engine has version {version} is unknown: {error}",
                outcome,
            ) from error
        outcome = _decode_outcome(answers[0])
        if outcome.state != "committed" or outcome.problem:
            self.close()
            raise PublishError(_told(version, outcome), outcome)

    def _step(self, what: str, action: Callable[[], bytes]) -> list[bytes]:
        """Run `action` on this rank and go on only if it succeeded on all; returns everyone's
        result."""
        failure: BaseException | None = None
        result = b""
        try:
            result = action()
        except (GyreError, OSError, RuntimeError) as error:
            failure = error
        return self._meeting.exchange(what, failure, result)


def settle_seconds(timeout_s: float) -> float:
    """How much longer than its time limit a publish may take to learn how a commit ended."""
    return min(30.0, max(5.0, timeout_s / 2))


def _told(version: int, outcome: Outcome) -> str:
    """What is known, in one sentence."""
    serves = (
        "the engine does not say which version it serves"
        if outcome.served is None
        else f"the engine serves version {outcome.served}"
    )
    held = " Generation is held." if outcome.held else ""
    if outcome.state == "committed":
        return f"version {version} is committed, but {outcome.problem}; {serves}.{held}"
    if outcome.state == "not committed":
        return (
            f"version {version} was not published: {outcome.problem}; the previous weights stay in "
            f"place, {serves}.{held}"
        )
    return (
        f"whether all of the engine has version {version} is unknown: {outcome.problem}; {serves}. "
        "Generation is held, because it may have a mixture of two versions: restart the engine"
    )
