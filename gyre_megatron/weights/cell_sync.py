"""Publishing: the weights of one training cell become the weights that the cell's engine serves.

Collective over the ranks of a cell. Each rank writes its own boxes straight into the engine's
shadow in shared memory while the engine keeps generating; the engine is held only while it verifies
and copies. Until the commit nothing of the old version is touched; a failure on any rank leaves it
serving, and the next publish starts afresh.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from gyre_megatron.config.model import Architecture
from gyre_megatron.config.weights import WeightsConfig
from gyre_megatron.errors import ConfigError, GyreError, TransferError
from gyre_megatron.ops.boxes import checksum_boxes, copy_boxes, wrap64
from gyre_megatron.weights.boxes import LocalTensor, Piece
from gyre_megatron.weights.engine import EngineInstaller, ServingEngine
from gyre_megatron.weights.layout import ListedLayout
from gyre_megatron.weights.megatron import MegatronLayout, bind, layout_of, named_tensors
from gyre_megatron.weights.parallel import ParallelRank
from gyre_megatron.weights.planner import World, plan_digest, plan_rank
from gyre_megatron.weights.rendezvous import Rendezvous
from gyre_megatron.weights.shadow import SHADOW_FILE, STATUS_FILE, Shadow, TensorSpec
from gyre_megatron.weights.tables import direct_rows, table_of


@dataclass(frozen=True)
class PublishReport:
    """What one publish cost on this rank, in seconds and bytes."""

    version: int
    seconds: float
    plan_seconds: float
    """0 when the plan of an earlier publish could be used again."""
    pack_seconds: float
    """Writing this rank's boxes into the shadow, checksums included."""
    install_seconds: float
    """The leader's view of pausing, verifying and committing; other ranks wait for it."""
    bytes_written: int


class CellWeightSync:
    """One rank's part in publishing its cell's weights.

    Args:
        model_chunks: this rank's Megatron modules.
        place: this rank's place in the cell.
        engine: the cell's server; only rank 0 talks to it, other ranks may pass None.
        store: reached by all ranks of the cell; default: that of the default process group.
    """

    def __init__(
        self,
        model_chunks: Sequence[torch.nn.Module],
        architecture: Architecture,
        place: ParallelRank,
        engine: ServingEngine | None,
        config: WeightsConfig | None = None,
        store: dist.Store | None = None,
        name: str = "gyre/weights/cell",
    ) -> None:
        self._config = config or WeightsConfig()
        self._architecture, self._rank = architecture, place.index
        self._layout = layout_of(architecture, place, model_chunks)
        self._sources = bind(self._layout, place.index, model_chunks)
        store = dist.distributed_c10d._get_default_store() if store is None else store
        self._meet = Rendezvous(
            dist.PrefixStore(name, store),
            place.index,
            self._layout.num_ranks,
            self._config.timeout_s,
        )
        self._engine = None
        if place.index == 0:
            if engine is None:
                raise ConfigError("rank 0 of a cell publishes into its engine; pass one")
            self._engine = EngineInstaller(engine, self._config)
        self._push: _Push | None = None
        self._chunks, self._epoch = model_chunks, 0

    def publish(self, version: int) -> PublishReport:
        """Make the engine serve the current parameters as `version`.

        Raises:
            TransferError: on every rank alike; the engine still serves the version it served
            before.
        """
        start = time.perf_counter()
        self._meet.start()
        try:
            planned = self._prepare()
            sums = self._step("writing the weights", self._write)
            written = time.perf_counter()
            self._step("installing the weights", lambda: self._install(version, sums))
        except TransferError:
            self.close()
            raise
        end = time.perf_counter()
        assert self._push is not None
        return PublishReport(
            version,
            end - start,
            planned,
            written - start - planned,
            end - written,
            self._push.nbytes,
        )

    def close(self) -> None:
        """Drop the shadow; the next publish attaches afresh. A rank that woke up late writes where
        nobody reads."""
        self._push = None
        if self._engine is not None:
            self._engine.discard()

    def _step(self, what: str, action) -> list[bytes]:
        """Run `action` on this rank and go on only if it succeeded on all; returns everyone's
        result."""
        failure, result = None, b""
        try:
            result = action()
        except (GyreError, OSError, RuntimeError) as error:
            failure = error
        self._meet.agree(failure, what)
        answers = self._meet.exchange(result)
        silent = [rank for rank, answer in enumerate(answers) if answer is None]
        if silent:
            raise TransferError(
                f"{what} was given up: ranks {silent} fell silent; the previous weights stay in "
                "place"
            )
        return [answer for answer in answers if answer is not None]

    def _prepare(self) -> float:
        if self._push is not None:
            return 0.0
        start = time.perf_counter()
        where = self._step("attaching to the engine", self._attach)[0]
        self._epoch += 1
        keys = self._step("mapping the engine's memory", lambda: self._map(Path(where.decode())))
        if len(set(keys)) > 1:
            raise TransferError(
                "the ranks of the cell plan for different layouts (keys "
                f"{[key.decode()[:8] for key in keys]}); give "
                "all of them the same parallel sizes, stage layers and architecture"
            )
        if self._engine is not None:
            self._engine.unlink()
        return time.perf_counter() - start

    def _attach(self) -> bytes:
        if self._engine is None:
            return b""
        self._engine.attach(self._architecture)
        return str(self._engine.directory).encode()

    def _map(self, directory: Path) -> bytes:
        answers = read_engine(directory)
        target = engine_layout(answers)
        self._push = _Push(
            self._layout, self._rank, list(self._sources), target, answers, directory
        )
        dtypes = [spec["dtype"] for answer in answers for spec in answer["tensors"]]
        return plan_digest(self._layout, target, self._epoch, dtypes).encode()

    def _write(self) -> bytes:
        assert self._push is not None
        current = dict(
            named_tensors(self._chunks)
        )  # storage may have moved since the plan was made
        sources = [current[key] for key in self._sources]
        self._push.write(sources)
        return json.dumps(self._push.sums(sources)).encode() if self._config.verify else b""

    def _install(self, version: int, sums: list[bytes]) -> bytes:
        if self._engine is not None:
            self._engine.install(
                version, add_sums([json.loads(s) for s in sums]) if self._config.verify else None
            )
        return b""


def read_engine(directory: Path) -> list[dict[str, Any]]:
    """Every engine rank's description of its parameters, in rank order."""
    answers = [
        json.loads(path.read_text()) for path in directory.glob(STATUS_FILE.format(rank="*"))
    ]
    return sorted(answers, key=lambda answer: answer["rank"])


def engine_layout(answers: Sequence[dict[str, Any]]) -> ListedLayout:
    """The engine's real geometry as a layout."""
    ranks = []
    for answer in answers:
        pieces: dict[str, list[Piece]] = {}
        for name, start, shape, key, offset, strides in answer["pieces"]:
            piece = Piece(name, tuple(start), tuple(shape), key, offset, tuple(strides))
            pieces.setdefault(key, []).append(piece)
        ranks.append(
            [
                LocalTensor(spec["key"], tuple(spec["shape"]), tuple(pieces.get(spec["key"], ())))
                for spec in answer["tensors"]
            ]
        )
    return ListedLayout(ranks)


class _Push:
    """This rank's boxes on their way into every engine rank's shadow."""

    def __init__(
        self,
        layout: MegatronLayout,
        rank: int,
        sources: Sequence[str],
        target: ListedLayout,
        answers: Sequence[dict[str, Any]],
        directory: Path,
    ) -> None:
        n = layout.num_ranks
        world = World(tuple(range(n)), tuple(range(n, n + target.num_ranks)))
        plan = plan_rank(layout, target, rank, world)
        keys = {key: i for i, key in enumerate(sources)}
        self._parts = []
        self.nbytes = 0
        for engine_rank, answer in enumerate(answers):
            specs = [TensorSpec(**spec) for spec in answer["tensors"]]
            shadow = Shadow(directory / SHADOW_FILE.format(rank=engine_rank), specs)
            index = {spec.key: i for i, spec in enumerate(specs)}
            table = table_of(direct_rows(plan.sends.get(n + engine_rank, ()), keys, index))
            self._parts.append((specs, list(shadow.tensors.values()), table))
            sizes = {spec.key: spec.torch_dtype.itemsize for spec in specs}
            self.nbytes += sum(
                p.numel * sizes[p.target.tensor] for p in plan.sends.get(n + engine_rank, ())
            )

    def write(self, sources: Sequence[torch.Tensor]) -> None:
        for _, targets, table in self._parts:
            copy_boxes(sources, targets, table)
        if torch.cuda.is_available():
            torch.cuda.synchronize()

    def sums(self, sources: Sequence[torch.Tensor]) -> list[dict[str, int]]:
        """Per engine rank: what this rank's boxes add to each tensor's checksum."""
        sums = []
        for specs, targets, table in self._parts:
            values = checksum_boxes(sources, targets, table)
            sums.append(
                {spec.key: value for spec, value in zip(specs, values, strict=True) if value}
            )
        return sums


def add_sums(parts: Sequence[list[dict[str, int]]]) -> list[dict[str, int]]:
    """Add the ranks' checksum parts, modulo 2**64, per engine rank and tensor."""
    total: list[dict[str, int]] = [{} for _ in parts[0]]
    for part in parts:
        for engine_rank, sums in enumerate(part):
            for key, value in sums.items():
                added = total[engine_rank].get(key, 0) + value
                total[engine_rank][key] = wrap64(added)
    return total
