"""One rank's life inside a cell: read an order, act, report.

Every rank of a cell runs this loop with the same orders, which the cell's leader fetches from the
control plane and broadcasts. Invariant: a cell never decides; trainer and engine weights carry the
version of the last order that set them.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch.distributed as dist

from gyre_megatron.engines.server import SglangServer
from gyre_megatron.errors import CellError, GyreError
from gyre_megatron.runtime.control_client import ControlClient
from gyre_megatron.runtime.parity import ParityCheck
from gyre_megatron.runtime.protocol import (
    INSTALL_SECONDS,
    LOGPROB_GAP,
    TRANSFER_SECONDS,
    Envelope,
    Report,
    envelope_decoder,
)
from gyre_megatron.runtime.run_directory import RunDirectory
from gyre_megatron.scheduler.orders import (
    CellOrder,
    Checkpoint,
    FinishStep,
    Leave,
    MicroStep,
    Publish,
    Return,
    Stop,
    Sync,
    Wait,
)
from gyre_megatron.trajectory.packing import PackedBin
from gyre_megatron.weights.cell_sync import CellWeightSync
from gyre_megatron.weights.chain import CellChain
from gyre_megatron.weights.delta_chain import Versions
from gyre_megatron.weights.process_groups import CrossCellGroups
from gyre_megatron.weights.pull import CoreReader, CoreWeights

if TYPE_CHECKING:
    from gyre_megatron.training import Trainer

Metrics = dict[str, float]


@dataclass(frozen=True)
class CellParts:
    """What one rank of a cell works with.

    Attributes:
        trainer: this rank's Megatron trainer.
        weight_sync: installs the cell's training weights into its engine.
        groups: process groups to the same position of other cells.
        chain: brings the core's weights to the same position of other cells.
        core_weights: what joiners read, on the core's ranks; None on others.
        core_reader: reads the core's weights on its own; None in the core, and where they cannot
            be reached so.
        parity: compares trainer and engine.
        directory: where the run's checkpoints are.
        server: the cell's SGLang server; None on ranks that do not lead their cell.
        client: connection to the control plane; None on ranks that do not lead their cell.
    """

    trainer: Trainer
    weight_sync: CellWeightSync
    groups: CrossCellGroups
    chain: CellChain
    core_weights: CoreWeights | None
    core_reader: CoreReader | None
    parity: ParityCheck
    directory: RunDirectory
    server: SglangServer | None
    client: ControlClient | None


def take_core_weights(
    trainer: Trainer, chain: CellChain, cells: Sequence[int], versions: Versions | None = None
) -> None:
    """Bring the trainers of `cells` to the core's weights, down the chain of cells; called by the
    core and all of them. Nothing changes in the core."""
    chain.take_core_weights(trainer.parameter_buffers(), cells, versions)
    if chain.cell != 0:
        # Not in the core: it only sent, and its optimizer's fp32 weights are finer than the bf16
        # ones they would be read back from.
        trainer.weights_changed()


class CellAgent:
    """Carries out the control plane's orders on one rank.

    Args:
        parts: trainer, engine and connections.
        version: weight version that trainer and engine start from.
    """

    def __init__(self, parts: CellParts, version: int) -> None:
        self._parts = parts
        self.version = version
        self.engine_version: int | None = version

    @property
    def cell(self) -> int:
        return self._parts.groups.cell

    def run(self) -> str:
        """Carry out orders until told to stop; returns the reason, empty after a run that went
        well."""
        while True:
            envelope = self._next_order()
            if isinstance(envelope.order, Stop):
                return envelope.order.reason
            if not isinstance(envelope.order, Wait):
                self._answer(envelope)

    def _next_order(self) -> Envelope:
        server, client = self._parts.server, self._parts.client
        if server is not None:
            server.check_alive()
        message = [client.next_order() if client is not None else b""]
        if dist.get_world_size() > 1:
            dist.broadcast_object_list(message, src=0)
        return envelope_decoder.decode(message[0])

    def _answer(self, envelope: Envelope) -> None:
        started = time.monotonic()
        metrics: Metrics = {}
        error = ""
        try:
            metrics = self.carry_out(envelope.order)
        except GyreError as failure:
            error = f"{type(failure).__name__}: {failure}"
        if self._parts.client is not None:
            seconds = time.monotonic() - started
            self._parts.client.report(Report(envelope.order_id, metrics, seconds, error))
        if error:
            name = type(envelope.order).__name__
            raise CellError(f"cell {self.cell} could not carry out {name}: {error}")

    def carry_out(self, order: CellOrder) -> Metrics:
        """Do what `order` says; returns numbers for the report.

        Raises:
            GyreError: it could not be done.
        """
        match order:
            case MicroStep(bins):
                return self._parts.trainer.micro_step([PackedBin.from_bytes(data) for data in bins])
            case Leave():
                return self._leave()
            case Sync():
                return self._sync(order)
            case FinishStep():
                return self._finish_step(order)
            case Publish():
                return self._publish(order)
            case Return():
                return self._return(order)
            case Checkpoint():
                return self._checkpoint(order)
        raise CellError(f"cell {self.cell} does not know the order {type(order).__name__}")

    # roles ------------------------------

    def _leave(self) -> Metrics:
        if self._parts.server is not None:
            self._parts.server.offload()
        self.engine_version = None  # what released memory held is gone
        dist.barrier()  # nobody allocates before the engine's memory is free
        self._parts.trainer.begin_batch(self.version)
        return {}

    def _return(self, order: Return) -> Metrics:
        replaced = [self._parts.server is not None and self._parts.server.onload()]
        dist.broadcast_object_list(replaced, src=0)  # nobody writes before the memory is back
        if replaced[0]:
            self._parts.weight_sync.close()
        return self.install(order.version)

    def install(self, version: int) -> Metrics:
        """Put the trainer's weights into the engine and measure how well the two agree.

        Raises:
            CellError: the trainer holds another version.
            TransferError: the engine still serves the version it served before.
        """
        if self.version != version:
            raise CellError(
                f"the trainer holds version {self.version}, version {version} was to be installed"
            )
        started = time.monotonic()
        self._parts.weight_sync.publish(version)
        seconds = time.monotonic() - started
        self.engine_version = version
        return {INSTALL_SECONDS: seconds, **self.measure_parity()}

    def measure_parity(self) -> Metrics:
        """The largest difference between trainer and engine, in nats."""
        parts = self._parts
        return {LOGPROB_GAP: parts.parity.measure(parts.trainer, parts.server)}

    # steps and weights ------------------------------

    def _sync(self, order: Sync) -> Metrics:
        reader = self._parts.core_reader
        if reader is None:
            self._take_core_weights(order.version, order.cells)
        else:
            trainer = self._parts.trainer
            reader.pull(trainer.parameter_buffers(), order.version)
            trainer.weights_changed()
            self.version = order.version
        if self.cell != 0:
            # Not in the core: it has trained micro-steps of this batch already, and their gradients
            # would vanish without a trace.
            self._parts.trainer.begin_batch(self.version)
        return {}

    def _finish_step(self, order: FinishStep) -> Metrics:
        parts = self._parts
        metrics: Metrics = {}
        if not order.skip:
            parts.trainer.finish_gradients()
            for buffer in parts.trainer.gradient_buffers():
                parts.groups.reduce_to_core(buffer, order.prefix)
        if self.cell == 0:
            assert parts.core_weights is not None
            if not order.skip:
                parts.core_weights.begin_writing()
                metrics = parts.trainer.optimizer_step()
            self.version = order.step
            parts.core_weights.settle(order.step)
        parts.trainer.begin_batch(self.version)
        return metrics

    def _publish(self, order: Publish) -> Metrics:
        started = time.monotonic()
        self._take_core_weights(order.version, range(1, self._parts.groups.topology.num_cells))
        metrics = {TRANSFER_SECONDS: time.monotonic() - started}
        if self.cell in order.install_in:
            metrics.update(self.install(order.version))
        return metrics

    def _take_core_weights(self, version: int, cells: Sequence[int]) -> None:
        parts = self._parts
        versions = Versions(held=self.version, wanted=version)
        take_core_weights(parts.trainer, parts.chain, cells, versions)
        self.version = version

    def _checkpoint(self, order: Checkpoint) -> Metrics:
        directory = self._parts.directory.staging_of(order.step)
        self._parts.trainer.save_checkpoint(directory)
        return {}
