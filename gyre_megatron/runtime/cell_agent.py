"""One rank's life inside a cell: read an order, act, report.

Every rank of a cell runs this loop with the same orders, which the cell's leader fetches from the
control plane and broadcasts. Invariant: a cell never decides; trainer and engine weights carry the
version of the last order that set them.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from gyre_megatron.config.weights import WeightsConfig
from gyre_megatron.engines.server import SglangServer
from gyre_megatron.errors import CellError, GyreError
from gyre_megatron.runtime import protocol
from gyre_megatron.runtime.control_client import ControlClient
from gyre_megatron.runtime.parity import ParityCheck
from gyre_megatron.training import Trainer
from gyre_megatron.trajectory.packing import PackedBin
from gyre_megatron.weights.cell_sync import CellWeightSync
from gyre_megatron.weights.chain import chain_broadcast
from gyre_megatron.weights.process_groups import CrossCellGroups

Metrics = dict[str, float]


def take_core_weights(
    trainer: Trainer, groups: CrossCellGroups, prefix: int, config: WeightsConfig
) -> None:
    """Bring the trainers of cells 0..prefix-1 to the core's weights, down the chain of cells."""
    chain_broadcast(
        trainer.parameter_buffers(), groups, prefix, config.chunk_mib << 20, config.timeout_s
    )
    trainer.weights_changed()


class CellAgent:
    """Carries out the control plane's orders on one rank.

    Args:
        trainer: this rank's Megatron trainer.
        weight_sync: installs the cell's training weights into its engine.
        groups: process groups to the same position of other cells.
        server: the cell's SGLang server; None on ranks that do not lead their cell.
        client: connection to the control plane; None on ranks that do not lead their cell.
        parity: compares trainer and engine.
        weights: chunk size and time limit of the chain of cells.
        version: weight version that trainer and engine start from.
    """

    def __init__(
        self,
        trainer: Trainer,
        weight_sync: CellWeightSync,
        groups: CrossCellGroups,
        server: SglangServer | None,
        client: ControlClient | None,
        parity: ParityCheck,
        weights: WeightsConfig,
        version: int,
    ) -> None:
        self.trainer = trainer
        self.weight_sync = weight_sync
        self.groups = groups
        self.server = server
        self.client = client
        self.parity = parity
        self.weights = weights
        self.version = version
        self.engine_version: int | None = version
        self._handlers: dict[type, Callable[[Any], Metrics]] = {
            protocol.Join: self._join,
            protocol.Sync: self._sync,
            protocol.MicroStep: self._micro_step,
            protocol.FinishStep: self._finish_step,
            protocol.Publish: self._publish,
            protocol.Serve: self._serve,
            protocol.Checkpoint: self._checkpoint,
        }

    @property
    def is_core(self) -> bool:
        return self.groups.cell == 0

    def run(self) -> str:
        """Carry out orders until told to stop; returns the reason, empty after a run that went
        well."""
        while True:
            order = self._next_order()
            if isinstance(order, protocol.Stop):
                return order.reason
            if not isinstance(order, protocol.Wait):
                self._carry_out(order)

    def _next_order(self) -> protocol.CellOrder:
        if self.server is not None:
            self.server.check_alive()
        message = [self.client.next_order() if self.client is not None else b""]
        if dist.get_world_size() > 1:
            dist.broadcast_object_list(message, src=0)
        return protocol.order_decoder.decode(message[0])

    def _carry_out(self, order: Any) -> None:
        started = time.monotonic()
        try:
            metrics, error = self._handlers[type(order)](order), ""
        except GyreError as failure:
            metrics, error = {}, f"{type(failure).__name__}: {failure}"
        if self.client is not None:
            self.client.report(
                protocol.Report(order.order_id, metrics, time.monotonic() - started, error)
            )
        if error:
            raise CellError(
                f"cell {self.groups.cell} could not carry out {type(order).__name__}: {error}"
            )

    def _join(self, order: protocol.Join) -> Metrics:
        if self.server is not None:
            self.server.offload()
        self.engine_version = None  # what released memory held is gone
        dist.barrier()  # nobody allocates before the engine's memory is free
        self.trainer.begin_batch(self.version)
        return {}

    def _sync(self, order: protocol.Sync) -> Metrics:
        self._take_core_weights(order.version, order.prefix)
        self.trainer.begin_batch(self.version)
        return {}

    def _micro_step(self, order: protocol.MicroStep) -> Metrics:
        return self.trainer.micro_step([PackedBin.from_bytes(data) for data in order.bins])

    def _finish_step(self, order: protocol.FinishStep) -> Metrics:
        metrics: Metrics = {}
        if not order.skip:
            self.trainer.finish_gradients()
            for buffer in self.trainer.gradient_buffers():
                self.groups.reduce_to_core(buffer, order.prefix)
        if self.is_core:
            if not order.skip:
                metrics = self.trainer.optimizer_step()
            self.version = order.step
        self.trainer.begin_batch(self.version)
        return metrics

    def _publish(self, order: protocol.Publish) -> Metrics:
        self._take_core_weights(order.version, self.groups.topology.num_cells)
        return self.install(order.version) if order.install else {}

    def _serve(self, order: protocol.Serve) -> Metrics:
        if self.server is not None:
            self.server.onload()
        dist.barrier()
        return self.install(order.version)

    def install(self, version: int) -> Metrics:
        """Put the trainer's weights into the engine and measure how well the two agree."""
        if self.version != version:
            raise CellError(
                f"the trainer holds version {self.version}, version {version} was to be installed"
            )
        self.weight_sync.publish(version)
        self.engine_version = version
        return {"logprob_gap": self.parity.measure(self.trainer, self.server)}

    def _take_core_weights(self, version: int, prefix: int) -> None:
        take_core_weights(self.trainer, self.groups, prefix, self.weights)
        self.version = version

    def _checkpoint(self, order: protocol.Checkpoint) -> Metrics:
        self.trainer.save_checkpoint(order.directory)
        return {}
