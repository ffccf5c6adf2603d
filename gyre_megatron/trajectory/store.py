"""Everything that happened, in one SQLite file (WAL): groups, executions, calls and the tokens of
their trees.

Owned by the control plane. Invariant: a write has been committed when its method returns (or its
future resolves); a call is one transaction, so a kill leaves either the whole call or nothing of
it.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import secrets
import sqlite3
import threading
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import Future
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
    Outcome,
)
from gyre_megatron.trajectory.writer import GroupCommitWriter, Write

_GROUP_COLUMNS = "group_id, query, num_executions, weight_version, trained_step"


class TrajectoryStore:
    """Groups, executions, calls and nodes of one run.

    Args:
        path: The SQLite file; made if missing.
        read_only: Open for reading only (CLI, export); no writer thread is started.

    Raises:
        StoreError: the file cannot be opened or belongs to another schema version.
    """

    def __init__(self, path: str | Path, read_only: bool = False) -> None:
        self.path = Path(path)
        self._reader = schema.connect(path, read_only)
        self._read_lock = threading.Lock()
        self._writer = None if read_only else GroupCommitWriter(schema.connect(path), str(path))
        self._next_node = itertools.count(1 + (self._one("SELECT max(node_id) FROM nodes")[0] or 0))
        self._tokens: dict[bytes, tuple[str, int]] = {
            digest: (execution_id, attempt)
            for digest, execution_id, attempt in self._all(
                "SELECT token_digest, execution_id, attempt FROM executions WHERE state='running'"
            )
            if digest
        }
        self._rowids: dict[str, int] = {}

    def close(self) -> None:
        """Commit everything that is queued and close the file."""
        if self._writer is not None:
            self._writer.close()
        self._reader.close()

    def checkpoint(self) -> None:
        """Move everything from the write-ahead log into the file itself."""
        self._all("PRAGMA wal_checkpoint(TRUNCATE)")

    # groups and executions
    # -----------------------------------------------------------------------------------------

    def add_group(
        self, group_id: str, query: dict[str, Any], num_executions: int, weight_version: int
    ) -> list[str]:
        """Dispatch `num_executions` executions of `query`; returns their ids. A group that exists
        is left alone."""
        ids = [f"{group_id}.{position:02d}" for position in range(num_executions)]

        def write(connection: sqlite3.Connection) -> None:
            added = connection.execute(
                f"INSERT OR IGNORE INTO groups({_GROUP_COLUMNS}) VALUES(?,?,?,?,NULL)",
                (group_id, json.dumps(query), num_executions, weight_version),
            ).rowcount
            if added:
                connection.executemany(
                    "INSERT INTO executions(execution_id, group_id, position, state, attempt) "
                    "VALUES(?,?,?,'queued',0)",
                    [
                        (execution_id, group_id, position)
                        for position, execution_id in enumerate(ids)
                    ],
                )

        self._write(write).result()
        return ids

    def group(self, group_id: str) -> GroupRecord:
        """One group.

        Raises:
            StoreError: there is no such group.
        """
        rows = self._all(f"SELECT {_GROUP_COLUMNS} FROM groups WHERE group_id=?", (group_id,))
        if not rows:
            raise StoreError(f"no group {group_id!r} in {self.path}")
        return schema.group_from_row(rows[0])

    def groups(self) -> list[GroupRecord]:
        """All groups in the order they were dispatched."""
        return [
            schema.group_from_row(row)
            for row in self._all(f"SELECT {_GROUP_COLUMNS} FROM groups ORDER BY rowid")
        ]

    def executions(
        self, states: Iterable[ExecutionState] | None = None, group_id: str | None = None
    ) -> list[ExecutionRecord]:
        """Executions in dispatch order, optionally only those in `states` or of one group."""
        wanted = list(states) if states is not None else ["queued", "running", "finished"]
        marks = ",".join("?" * len(wanted))
        sql = f"SELECT {schema.EXECUTION_COLUMNS} FROM executions WHERE state IN ({marks})"
        if group_id is not None:
            sql += " AND group_id=?"
        rows = self._all(
            sql + " ORDER BY execution", (*wanted, *([group_id] if group_id is not None else []))
        )
        return [schema.execution_from_row(row) for row in rows]

    def execution(self, execution_id: str) -> ExecutionRecord:
        """One execution.

        Raises:
            StoreError: there is no such execution.
        """
        rows = self._all(
            f"SELECT {schema.EXECUTION_COLUMNS} FROM executions WHERE execution_id=?",
            (execution_id,),
        )
        if not rows:
            raise StoreError(f"no execution {execution_id!r} in {self.path}")
        return schema.execution_from_row(rows[0])

    def start_execution(self, execution_id: str) -> str:
        """Mark a queued execution as running, as a new attempt; returns the bearer token of its
        harness.

        Raises:
            StoreError: it is not queued.
        """
        token = f"gyre-{secrets.token_urlsafe(24)}"
        digest = _digest(token)

        def write(connection: sqlite3.Connection) -> int:
            changed = connection.execute(
                "UPDATE executions SET state='running', attempt=attempt+1, token_digest=?, "
                "started_at=?"
                " WHERE execution_id=? AND state='queued'",
                (digest, time.time(), execution_id),
            ).rowcount
            if not changed:
                raise StoreError(f"execution {execution_id!r} cannot start: it is not queued")
            row = connection.execute(
                "SELECT attempt FROM executions WHERE execution_id=?", (execution_id,)
            )
            return row.fetchone()[0]

        attempt = self._write(write).result()
        self._tokens[digest] = (execution_id, attempt)
        return token

    def finish_execution(self, execution_id: str, outcome: Outcome) -> None:
        """Record how a running execution ended; its token is refused from then on.

        Raises:
            StoreError: it is not running.
        """

        def write(connection: sqlite3.Connection) -> None:
            changed = connection.execute(
                "UPDATE executions SET state='finished', outcome=?, reward=?, detail=?, "
                "finished_at=?,"
                " token_digest=NULL WHERE execution_id=? AND state='running'",
                (
                    outcome.status,
                    outcome.reward,
                    json.dumps(outcome.detail),
                    time.time(),
                    execution_id,
                ),
            ).rowcount
            if not changed:
                raise StoreError(f"execution {execution_id!r} cannot finish: it is not running")

        self._write(write).result()
        self._forget_tokens(execution_id)

    def requeue_running(self) -> int:
        """After a crash: queue running executions again; what they had done stays as an old
        attempt."""
        requeued = self._write(
            lambda connection: (
                connection.execute(
                    "UPDATE executions SET state='queued', token_digest=NULL WHERE state='running'"
                ).rowcount
            )
        ).result()
        self._tokens.clear()
        return requeued

    def authenticate(self, token: str) -> tuple[str, int] | None:
        """The (execution id, attempt) a bearer token stands for; None if it stands for nothing."""
        return self._tokens.get(_digest(token))

    def counters(self) -> tuple[int, int, int]:
        """Executions ever (dispatched, started, finished)."""
        sql = "SELECT count(*), coalesce(sum(attempt > 0), 0), coalesce(sum(state='finished'), 0) FROM executions"
        return tuple(self._one(sql))

    # training progress
    # -----------------------------------------------------------------------------------------------

    def finished_groups(self, untrained: bool = True) -> list[str]:
        """Groups whose executions have all finished, earliest finish first."""
        sql = (
            "SELECT group_id FROM groups JOIN executions USING(group_id)"
            + (" WHERE trained_step IS NULL" if untrained else "")
            + " GROUP BY group_id HAVING sum(state != 'finished') = 0 ORDER BY max(finished_at), min(execution)"
        )
        return [row[0] for row in self._all(sql)]

    def mark_trained(self, group_ids: Sequence[str], step: int) -> None:
        """Record that the groups were trained in `step`."""
        self._write(
            lambda connection: connection.executemany(
                "UPDATE groups SET trained_step=? WHERE group_id=?",
                [(step, group_id) for group_id in group_ids],
            )
        ).result()

    def rollback_to_step(self, step: int) -> int:
        """Make groups trained after `step` (the checkpoint) untrained again; returns how many."""
        return self._write(
            lambda connection: (
                connection.execute(
                    "UPDATE groups SET trained_step=NULL WHERE trained_step > ?", (step,)
                ).rowcount
            )
        ).result()

    # calls and nodes
    # --------------------------------------------------------------------------------------------------

    def new_node_id(self) -> int:
        """A node id no other node has; it counts only once the node is stored."""
        return next(self._next_node)

    def add_call(self, call: Call, nodes: Sequence[Node]) -> Future[None]:
        """Store a call with the nodes it added, in one transaction; durable when the future
        resolves."""
        execution = self._rowid(call.execution_id)
        values = schema.call_row(execution, call)
        rows = [schema.node_row(execution, call.attempt, node) for node in nodes]

        def write(connection: sqlite3.Connection) -> None:
            connection.executemany(
                "INSERT OR IGNORE INTO nodes VALUES(?,?,?,?,?,?,?,?,?,?,?,?)", rows
            )
            connection.execute(f"INSERT INTO calls VALUES(NULL{',?' * len(values)})", values)

        return self._write(write)

    def set_call_state(self, call_ids: Sequence[str], state: str) -> Future[None]:
        """Change the state of calls (undelivered, superseded)."""

        def write(connection: sqlite3.Connection) -> None:
            connection.executemany(
                "UPDATE calls SET state=? WHERE call_id=?", [(state, c) for c in call_ids]
            )

        return self._write(write)

    def nodes(self, execution_id: str, attempt: int | None = None) -> list[Node]:
        """Nodes of one attempt (the latest by default), parents before children, with `start`
        filled in."""
        attempt = self._attempt(execution_id, attempt)
        rows = self._all(
            f"SELECT {schema.NODE_COLUMNS} FROM nodes WHERE execution=? AND attempt=? ORDER BY "
            "node_id",
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
            f"SELECT {schema.CALL_COLUMNS} FROM calls WHERE execution=? AND attempt=? ORDER BY "
            "call",
            (self._rowid(execution_id), attempt),
        )
        return [schema.call_from_row(execution_id, attempt, row) for row in rows]

    def sizes(self, execution_id: str) -> tuple[int, int, int, int]:
        """(calls, nodes, tokens, sampled tokens) of the latest attempt."""
        where = (self._rowid(execution_id), self._attempt(execution_id, None))
        calls = self._all("SELECT count(*) FROM calls WHERE execution=? AND attempt=?", where)[0][0]
        sql = (
            "SELECT count(*), coalesce(sum(length(token_ids)), 0) / 4, "
            "coalesce(sum(length(logprobs)), 0) / 4"
            " FROM nodes WHERE execution=? AND attempt=?"
        )
        return (calls, *self._all(sql, where)[0])

    def roles(self) -> dict[str, int]:
        """Calls by role, over everything."""
        return dict(self._all("SELECT role, count(*) FROM calls GROUP BY role ORDER BY 2 DESC"))

    # inner ------------------------------

    def _attempt(self, execution_id: str, attempt: int | None) -> int:
        return self.execution(execution_id).attempt if attempt is None else attempt

    def _rowid(self, execution_id: str) -> int:
        if execution_id not in self._rowids:
            rows = self._all(
                "SELECT execution FROM executions WHERE execution_id=?", (execution_id,)
            )
            if not rows:
                raise StoreError(f"no execution {execution_id!r} in {self.path}")
            self._rowids[execution_id] = rows[0][0]
        return self._rowids[execution_id]

    def _forget_tokens(self, execution_id: str) -> None:
        for digest in [d for d, (owner, _) in self._tokens.items() if owner == execution_id]:
            del self._tokens[digest]

    def _write(self, write: Write) -> Future[Any]:
        if self._writer is None:
            raise StoreError(f"{self.path} was opened for reading only")
        return self._writer.submit(write)

    def _all(self, sql: str, values: Sequence[Any] = ()) -> list[tuple[Any, ...]]:
        with self._read_lock:
            return self._reader.execute(sql, values).fetchall()

    def _one(self, sql: str) -> tuple[Any, ...]:
        return self._all(sql)[0]


def _digest(token: str) -> bytes:
    return hashlib.sha256(token.encode("utf-8", "surrogatepass")).digest()
