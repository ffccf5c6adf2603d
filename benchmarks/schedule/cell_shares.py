"""Each cell held to the same share of the machine's cores by a control group, so that a cell is a
fixed resource, as on a cluster: a cell that serves cannot take what an idle one leaves.

Works with cgroup v1 and v2; needs the right to make groups (root in a container usually has it).
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path

ROOT = Path("/sys/fs/cgroup")
PERIOD_US = 100_000
EMPTY_WITHIN_S = 10.0


class CellShares:
    """Control groups of a run's cells.

    Args:
        num_cells: groups to make.
        cores: of each cell, once `limit` was called.
    """

    def __init__(self, num_cells: int, cores: float) -> None:
        self._two = (ROOT / "cgroup.controllers").exists()
        self._parent = ROOT if self._two else ROOT / "cpu"
        self._cores = cores
        self.folders = [
            self._parent / f"gyre-{os.getpid()}-cell{cell}" for cell in range(num_cells)
        ]

    @contextlib.contextmanager
    def made(self) -> Iterator[CellShares]:
        """The groups exist inside this block.

        Raises:
            SystemExit: this process may not make them.
        """
        try:
            if self._two:
                (self._parent / "cgroup.subtree_control").write_text("+cpu")
            for folder in self.folders:
                folder.mkdir()
        except OSError as error:
            self._remove()
            raise SystemExit(
                f"error: no control group could be made ({error}); cells are held to their share "
                "by the cpu controller below /sys/fs/cgroup: run as root where that is writable"
            ) from None
        try:
            yield self
        finally:
            self._remove()

    def limit(self) -> None:
        """From now on each cell has its share and no more."""
        quota = int(self._cores * PERIOD_US)
        for folder in self.folders:
            if self._two:
                (folder / "cpu.max").write_text(f"{quota} {PERIOD_US}")
            else:
                (folder / "cpu.cfs_period_us").write_text(str(PERIOD_US))
                (folder / "cpu.cfs_quota_us").write_text(str(quota))

    def free(self, pid: int) -> None:
        """Take a process, and what it starts from now on, out of its group."""
        (self._parent / "cgroup.procs").write_text(str(pid))

    def _remove(self) -> None:
        for folder in self.folders:
            _remove_once_empty(folder)


def _remove_once_empty(folder: Path) -> None:
    """Processes that have just ended leave a group a moment later."""
    deadline = time.monotonic() + EMPTY_WITHIN_S
    while folder.exists():
        try:
            folder.rmdir()
        except OSError:
            if time.monotonic() > deadline:
                print(f"warning: {folder} still holds processes and stays", file=sys.stderr)
                return
            time.sleep(0.1)


def enter(folder: Path) -> None:
    """Put this process into a group; its children are born there."""
    (folder / "cgroup.procs").write_text(str(os.getpid()))
