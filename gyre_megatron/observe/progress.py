"""The progress a person watches: a live line on a terminal, one line a step elsewhere."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

ROLE_STYLES = {"rollout": "cyan", "leaving": "yellow", "train": "green", "returning": "yellow"}


class Progress:
    """Shows step, reward, waterlevel and the role of each cell."""

    def __init__(self, num_steps: int) -> None:
        self._num_steps = num_steps
        self._console = Console()
        self._record: dict[str, Any] = {}
        self._live: Live | None = None
        if self._console.is_terminal:
            self._live = Live(console=self._console, refresh_per_second=4)
            self._live.start()

    def state(self, roles: Sequence[str], waterlevel: int) -> None:
        """Roles or waterlevel changed."""
        if self._live is not None:
            self._live.update(self._table(roles, waterlevel))

    def step(self, record: dict[str, Any], roles: Sequence[str], waterlevel: int) -> None:
        """A step is done."""
        self._record = record
        if self._live is not None:
            self._live.update(self._table(roles, waterlevel))
            return
        micro_steps = "+".join(map(str, record["micro_steps_by_cell"].values())) or "0"
        print(
            f"step {record['step']:>4}/{self._num_steps}  reward {_reward(record)}  "
            f"{record['seconds']:5.1f} s  "
            f"micro-steps {micro_steps}  waterlevel {waterlevel}  cells {' '.join(roles)}  "
            f"rerouted {record['rerouted_calls']}  logprob gap {record['logprob_gap']:.1e}",
            flush=True,
        )

    def close(self) -> None:
        """Leave the terminal as it was."""
        if self._live is not None:
            self._live.stop()

    def _table(self, roles: Sequence[str], waterlevel: int) -> Table:
        table = Table(box=None, padding=(0, 2))
        for name in ("step", "reward", "waterlevel", "rerouted", "cells"):
            table.add_column(name)
        cells = Text(" ").join(Text(role, style=ROLE_STYLES[role]) for role in roles)
        record = self._record
        table.add_row(
            f"{record.get('step', 0)}/{self._num_steps}",
            _reward(record),
            str(waterlevel),
            str(record.get("rerouted_calls", 0)),
            cells,
        )
        return table


def _reward(record: dict[str, Any]) -> str:
    reward = record.get("reward")
    return "  -  " if reward is None else f"{reward:.3f}"
