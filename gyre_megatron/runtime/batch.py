"""The batch of the step in progress: finished groups are admitted one by one, while others still
run.

Invariant: each edge's loss weight is fixed when its group is admitted (1 / trained tokens of its
execution / executions of the batch), so the step does not depend on how micro-steps were packed or
who took them.
"""

from __future__ import annotations

import asyncio
from dataclasses import asdict

from gyre_megatron.config.loader import GyreConfig
from gyre_megatron.observe.batch_record import BatchRecord
from gyre_megatron.runtime.micro_steps import MicroStepQueue
from gyre_megatron.trajectory.packing import pack
from gyre_megatron.trajectory.processor import ProcessedGroup, process_group
from gyre_megatron.trajectory.store import TrajectoryStore


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
        processed, bins = await asyncio.to_thread(self._process, group_id)
        outcomes = [record.outcome for record in self._store.executions(group_id=group_id)]
        self.batch.group_ids.append(group_id)
        self.batch.rewards += processed.rewards.values()
        self.batch.statuses.update(outcome.status for outcome in outcomes if outcome is not None)
        self.batch.staleness.append(weight_version - self._store.group(group_id).weight_version)
        self.batch.tokens.update(asdict(processed.conservation))
        self.batch.num_bins += len(bins)
        size = self._bins_per_micro_step
        self._micro_steps.put([bins[i : i + size] for i in range(0, len(bins), size)])

    def _process(self, group_id: str) -> tuple[ProcessedGroup, list[bytes]]:
        scheduler, training = self._config.scheduler, self._config.training
        processed = process_group(self._store, group_id, self._config.rollout.processor)
        trees = [tree for tree in processed.trees if tree.advantage != 0.0 and tree.trajectories]
        bins = pack(
            trees,
            training.token_budget,
            scheduler.groups_per_step * scheduler.executions_per_group,
            denominator=training.gspo.denominator,
            constant_length=training.gspo.constant_length,
            keep_executions_whole=training.gspo.ratio_level == "execution",
        )
        return processed, [packed.to_bytes() for packed in bins]

    def next_step(self) -> BatchRecord:
        """End the step in progress: returns its batch and starts an empty one."""
        finished, self.batch = self.batch, BatchRecord()
        self._micro_steps.start_step()
        return finished
