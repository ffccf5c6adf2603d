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
from gyre_megatron.trajectory.packing import DEFAULT_LINEAR_COST
from gyre_megatron.trajectory.processor import ProcessedGroup, process_group
from gyre_megatron.trajectory.store import TrajectoryStore

log = logging.getLogger(__name__)


class BatchBuilder:
    """Turns finished groups into micro-steps."""

    def __init__(
        self, store: TrajectoryStore, config: GyreConfig, micro_steps: MicroStepQueue, cell_dp: int
    ) -> None:
        self._store = store
        self._config = config
        self._micro_steps = micro_steps
        self._bins_per_micro_step = cell_dp
        self.batch = BatchRecord()

    def ready_groups(self) -> list[str]:
        """Finished groups that no step has trained or admitted, earliest finish first."""
        return [
            group for group in self._store.finished_groups() if group not in self.batch.group_ids
        ]

    async def admit(self, group_id: str, weight_version: int) -> None:
        """Process, pack and queue one finished group.

        Args:
            weight_version: version that is being trained, for the staleness of the group.
        """
        processed, bins = await asyncio.to_thread(self._process, group_id, weight_version)
        self.batch.group_ids.append(group_id)
        self.batch.rewards += processed.rewards.values()
        self.batch.statuses.update(processed.statuses)
        self.batch.excluded.update(execution.problem.reason for execution in processed.excluded)
        self.batch.staleness.append(weight_version - self._store.weight_version(group_id))
        self.batch.tokens.update(asdict(processed.conservation))
        self.batch.num_bins += len(bins)
        size = self._bins_per_micro_step
        self._micro_steps.put([bins[i : i + size] for i in range(0, len(bins), size)])

    def _process(self, group_id: str, weight_version: int) -> tuple[ProcessedGroup, list[bytes]]:
        training = self._config.training
        bounds = TrainingBounds.of(training, weight_version)
        processed = process_group(self._store, group_id, self._config.rollout.processor, bounds)
        for excluded in processed.excluded:
            log.warning("group %s: %s", group_id, excluded)
        groups_per_step = self._config.scheduler.groups_per_step
        bins = pack_group(processed, training, groups_per_step, DEFAULT_LINEAR_COST)
        return processed, [packed.to_bytes() for packed in bins]

    def next_step(self) -> BatchRecord:
        """End the step in progress: returns its batch and starts an empty one."""
        finished, self.batch = self.batch, BatchRecord()
        self._micro_steps.start_step()
        return finished
