"""What can be asked of a trajectory file: groups, executions, calls and nodes, as records.

The reading half of `TrajectoryStore`. Each answer is one query on a connection that several threads
share; nothing is kept. What is asked at every event of a run is in `ledger` instead.
"""

from __future__ import annotations

import os
import sqlite3
import threading
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from gyre_megatron.errors import StoreError
from gyre_megatron.trajectory import schema
from gyre_megatron.trajectory.records import (
    Call,
    ExecutionRecord,
    ExecutionState,
    GroupRecord,
    Node,
)

_ALL_STATES: tuple[ExecutionState, ...] = ("queued", "running", "finished")


class StoreReader:
    """Queries on one trajectory file."""

    def __init__(self, path: str | Path, read_only: bool) -> None:
        self.path = Path(path)
        self._reader = schema.connect(path, read_only)
        self._read_lock = threading.Lock()
        self._rowids: dict[str, int] = {}

    def group(self, group_id: str) -> GroupRecord:
        """One group.

        Raises:
            StoreError: there is no such group.
        """
        sql = f"SELECT {schema.GROUP_COLUMNS} FROM groups WHERE group_id=?"
        rows = self._all(sql, (group_id,))
        if not rows:
            raise StoreError(f"no group {group_id!r} in {self.path}")
        return schema.group_from_row(rows[0])

    def groups(self) -> list[GroupRecord]:
        """All groups in the order they were dispatched."""
        rows = self._all(f"SELECT {schema.GROUP_COLUMNS} FROM groups ORDER BY rowid")
        return [schema.group_from_row(row) for row in rows]

    def executions(
        self, states: Iterable[ExecutionState] | None = None, group_id: str | None = None
    ) -> list[ExecutionRecord]:
        """Executions in dispatch order, optionally only those in `states` or of one group."""
        wanted = list(_ALL_STATES if states is None else states)
        sql = (
            f"SELECT {schema.EXECUTION_COLUMNS} FROM executions"
            f" WHERE state IN ({','.join('?' * len(wanted))})"
        )
        values: list[str] = list(wanted)
        if group_id is not None:
            sql += " AND group_id=?"
            values.append(group_id)
        rows = self._all(sql + " ORDER BY execution", values)
        return [schema.execution_from_row(row) for row in rows]

    def execution(self, execution_id: str) -> ExecutionRecord:
        """One execution.

        Raises:
            StoreError: there is no such execution.
        """
        sql = f"SELECT {schema.EXECUTION_COLUMNS} FROM executions WHERE execution_id=?"
        rows = self._all(sql, (execution_id,))
        if not rows:
            raise StoreError(f"no execution {execution_id!r} in {self.path}")
        return schema.execution_from_row(rows[0])

    def nodes(self, execution_id: str, attempt: int | None = None) -> list[Node]:
        """Nodes of one attempt (the latest by default), parents before children, with `start`
        filled in."""
        attempt = self._attempt(execution_id, attempt)
        rows = self._all(
            f"SELECT {schema.NODE_COLUMNS} FROM nodes"
            " WHERE execution=? AND attempt=? ORDER BY node_id",
            (self._rowid(execution_id), attempt),
        )
        nodes = [schema.node_from_row(row) for row in rows]
        ends: dict[int, int] = {}
        for node in nodes:
            node.start = ends.get(node.parent, 0)
            ends[node.node_id] = node.end
        return nodes

    def calls(self, execution_id: str, attempt: int | None = None) -> list[Call]:
        """Calls of one attempt (the latest by default) in the order they were completed."""
        attempt = self._attempt(execution_id, attempt)
        rows = self._all(
            f"SELECT {schema.CALL_COLUMNS} FROM calls"
            " WHERE execution=? AND attempt=? ORDER BY call",
            (self._rowid(execution_id), attempt),
        )
        return [schema.call_from_row(execution_id, attempt, row) for row in rows]

    def sizes(self, execution_id: str) -> tuple[int, int, int, int]:
        """(calls, nodes, tokens, sampled tokens) of the latest attempt."""
        where = (self._rowid(execution_id), self._attempt(execution_id, None))
        num_calls = self._one("SELECT count(*) FROM calls WHERE execution=? AND attempt=?", where)
        sql = (
            "SELECT count(*), coalesce(sum(length(token_ids)), 0) / 4,"
            " coalesce(sum(length(logprobs)), 0) / 4"
            " FROM nodes WHERE execution=? AND attempt=?"
        )
        return (*num_calls, *self._one(sql, where))

    def calls_by_role(self) -> dict[str, int]:
        """Number of calls by role, over everything, most first."""
        return dict(self._all("SELECT role, count(*) FROM calls GROUP BY role ORDER BY 2 DESC"))

    def num_bytes(self) -> int:
        """Size of the file with its write-ahead log."""
        files = (self.path, self.path.with_name(f"{self.path.name}-wal"))
        return sum(file.stat().st_size for file in files if file.exists())

    def copy_to(self, path: str | Path) -> None:
        """Copy the store, as of now, into one file that needs no log beside it.

        Unlike a copy of the file itself this is whole also while a run writes, or after one was
        killed: what stands in the write-ahead log is in it.

        Raises:
            StoreError: `path` exists, or cannot be written; nothing is left behind then.
        """
        path = Path(path)
        if path.exists():
            raise StoreError(f"{path} exists; name a file that does not")
        partial = path.with_name(f"{path.name}.partial-{os.getpid()}")
        try:
            _back_up(self.path, partial)
            partial.rename(path)
        except (sqlite3.Error, OSError) as error:
            raise StoreError(f"{self.path} could not be copied to {path}: {error}") from error
        finally:
            partial.unlink(missing_ok=True)

    # inner ------------------------------

    def _attempt(self, execution_id: str, attempt: int | None) -> int:
        return self.execution(execution_id).attempt if attempt is None else attempt

    def _rowid(self, execution_id: str) -> int:
        if execution_id not in self._rowids:
            sql = "SELECT execution FROM executions WHERE execution_id=?"
            rows = self._all(sql, (execution_id,))
            if not rows:
                raise StoreError(f"no execution {execution_id!r} in {self.path}")
            self._rowids[execution_id] = rows[0][0]
        return self._rowids[execution_id]

    def _all(self, sql: str, values: Sequence[Any] = ()) -> list[tuple[Any, ...]]:
        with self._read_lock:
            return self._reader.execute(sql, values).fetchall()

    def _one(self, sql: str, values: Sequence[Any] = ()) -> tuple[Any, ...]:
        return self._all(sql, values)[0]


def _back_up(source: Path, target: Path) -> None:
    reading = schema.connect(source, read_only=True)
    try:
        writing = sqlite3.connect(target)
        try:
            reading.backup(writing)
            # The copy inherits the log mode; without it the file can be read where nothing else
            # can be made beside it.
            writing.execute("PRAGMA journal_mode=DELETE")
        finally:
            writing.close()
    finally:
        reading.close()
