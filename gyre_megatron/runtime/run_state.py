"""The facts of a run that the control plane alone knows: what each cell does, which weights it
holds, how far the run has come.

Everything else that the scheduler asks for is owned by the store (executions), the batch and the
micro-step queue. Written by the control plane's actions, read by everybody. Invariant: a cell
claims micro-steps only while it trains and holds the weights of the step in progress.
"""

from __future__ import annotations

from dataclasses import dataclass

from gyre_megatron.scheduler import CellRole


@dataclass
class RunState:
    """Roles, weight versions and steps.

    Attributes:
        roles: of each cell, core first.
        cell_versions: weight version of each cell's trainer.
        trained_steps: optimizer steps done.
        published_steps: steps whose weights every engine that serves has.
        checkpointed_steps: steps in the latest complete checkpoint; 0 if there is none.
    """

    roles: list[CellRole]
    cell_versions: list[int]
    trained_steps: int
    published_steps: int
    checkpointed_steps: int

    @classmethod
    def at_start(cls, num_cells: int, trained_steps: int) -> RunState:
        """Every cell serves the weights that the run goes on from.

        Args:
            trained_steps: steps in the checkpoint; 0 for a new run.
        """
        return cls(
            roles=[CellRole.ROLLOUT] * num_cells,
            cell_versions=[trained_steps] * num_cells,
            trained_steps=trained_steps,
            published_steps=trained_steps,
            checkpointed_steps=trained_steps,
        )

    def may_claim(self, cell: int) -> bool:
        """Whether `cell` may run micro-steps of the step in progress."""
        up_to_date = self.cell_versions[cell] == self.trained_steps
        return self.roles[cell] is CellRole.TRAIN and up_to_date

    def cells_in(self, role: CellRole) -> tuple[int, ...]:
        """Cells that have `role`."""
        return tuple(cell for cell, found in enumerate(self.roles) if found is role)
