"""The batch of the step in progress: finished groups are admitted one by one, while others still
run.

Invariant: each edge's loss weight is fixed when its group is admitted (`trajectory.admission`), so
the step does not depend on how micro-steps were packed or who took them.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import asdict

from gyre_megatron.config.loader import GyreConfig
from gyre_megatron.observe.batch_record import BatchRecord
from gyre_megatron.runtime.micro_steps import MicroStepQueue
from gyre_megatron.trajectory.admission import pack_group
from gyre_megatron.trajectory.fit import TrainingBounds
from gyre_megatron.trajectory.processor import ProcessedGroup, process_group
from gyre_megatron.trajectory.store import TrajectoryStore

log = logging.getLogger(__name__)


class BatchBuilder:
    """Turns finished groups into micro-steps.

    Args:
        store: where groups and their calls are.
        config: processor, packing and objective.
        micro_steps: where micro-steps are put.
        bins_per_micro_step: data-parallel replicas of a cell; each takes one bin.
        linear_cost: of the model in training (`trajectory.cost`), to level bins.
    """

    def __init__(
        self,
        store: TrajectoryStore,
        config: GyreConfig,
        micro_steps: MicroStepQueue,
        bins_per_micro_step: int,
        linear_cost: int,
    ) -> None:
        self._store = store
        self._config = config
        self._micro_steps = micro_steps
        self._bins_per_micro_step = bins_per_micro_step
        self._linear_cost = linear_cost
        self.record = BatchRecord()

    @property
    def num_admitted(self) -> int:
        """Groups of the step in progress."""
        return len(self.record.group_ids)

    @property
    def ready_versions(self) -> tuple[int, ...]:
        """Weight versions under which the groups were dispatched that are finished and that no step
        has trained or admitted, ascending."""
        return tuple(map(self._store.weight_version, self._ready()))

    def _ready(self) -> list[str]:
        admitted = set(self.record.group_ids)
        return [group for group in self._store.finished_groups() if group not in admitted]

    async def admit_next(self, weight_version: int) -> int:
        """Process, pack and queue the ready group of the oldest weights; returns its micro-steps.

        Args:
            weight_version: version that is being trained, for the staleness of the group.
        """
        group_id = self._ready()[0]
        # In a thread: a group of long executions takes a second, and the loop streams calls.
        processed, bins = await asyncio.to_thread(self._process, group_id, weight_version)
        # No await from here on: the group counts as admitted together with its micro-steps, or the
        # step could look complete between the two.
        self._account(group_id, processed, weight_version)
        self.record.num_bins += len(bins)
        size = self._bins_per_micro_step
        micro_steps = [bins[i : i + size] for i in range(0, len(bins), size)]
        self._micro_steps.put(micro_steps)
        return len(micro_steps)

    def _account(self, group_id: str, processed: ProcessedGroup, weight_version: int) -> None:
        record = self.record
        record.group_ids.append(group_id)
        record.rewards += processed.rewards.values()
        record.statuses.update(processed.statuses)
        record.excluded.update(execution.problem.reason for execution in processed.excluded)
        record.staleness.append(weight_version - self._store.weight_version(group_id))
        record.tokens.update(asdict(processed.conservation))

    def _process(self, group_id: str, weight_version: int) -> tuple[ProcessedGroup, list[bytes]]:
        training = self._config.training
        bounds = TrainingBounds.of(training, weight_version)
        processed = process_group(self._store, group_id, self._config.rollout.processor, bounds)
        for excluded in processed.excluded:
            log.warning("group %s: %s", group_id, excluded)
        groups_per_step = self._config.scheduler.groups_per_step
        bins = pack_group(processed, training, groups_per_step, self._linear_cost)
        return processed, [packed.to_bytes() for packed in bins]

    def micro_step_trained(self, cell: int, metrics: dict[str, float], seconds: float) -> None:
        """A cell trained one of the micro-steps, in so many seconds."""
        self.record.micro_steps_by_cell[cell] += 1
        self.record.training_seconds_by_cell[cell] += seconds
        self.record.micro_step_metrics.update(metrics)

    def give_up(self) -> None:
        """Drop the step in progress, whose gradients are lost: its groups are ready again."""
        log.warning(
            "the batch of %d groups is given up: no engine is left and cells must serve",
            self.num_admitted,
        )
        self.record = BatchRecord()

    def next_step(self) -> BatchRecord:
        """End the step in progress: returns its batch and starts an empty one."""
        finished = self.record
        self.record = BatchRecord()
        return finished
