"""Everything that happened, in one SQLite file (WAL): groups, executions, calls and the tokens of
their trees.

Owned by the control plane. Invariant: a write has been committed when its method returns (or its
future resolves); a call is one transaction, so a kill leaves either the whole call or nothing of
it.
"""

from __future__ import annotations

import itertools
import json
import sqlite3
import time
from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import Path
from types import TracebackType
from typing import Any

from gyre_megatron.errors import StoreError
from gyre_megatron.trajectory import schema
from gyre_megatron.trajectory.harness_keys import Attempt, HarnessKeys, key_digest, new_key
from gyre_megatron.trajectory.ledger import Counters, Ledger
from gyre_megatron.trajectory.reader import StoreReader
from gyre_megatron.trajectory.records import Call, CallState, Node, Outcome
from gyre_megatron.trajectory.writer import GroupCommitWriter, OnCommit, Write


class TrajectoryStore(StoreReader):
    """Groups, executions, calls and nodes of one run; use it in a `with` block or close it.

    Args:
        path: The SQLite file; made if missing.
        read_only: Open for reading only (CLI, export), also while a run writes; no writer thread
            is started.

    Raises:
        StoreError: the file cannot be opened or belongs to another schema version.
    """

    def __init__(self, path: str | Path, read_only: bool = False) -> None:
        super().__init__(path, read_only)
        self._writer = None if read_only else GroupCommitWriter(schema.connect(path), str(path))
        self._next_node = itertools.count(1 + (self._one("SELECT max(node_id) FROM nodes")[0] or 0))
        self._keys = HarnessKeys(
            self._all(
                "SELECT token_digest, execution_id, attempt FROM executions"
                " WHERE state='running' AND token_digest IS NOT NULL"
            )
        )
        self._own_ledger = Ledger.load(self._reader)

    def __enter__(self) -> TrajectoryStore:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Commit everything that is queued, move the write-ahead log into the file, close it."""
        if self._writer is not None:
            self._writer.close()
        self._reader.close()

    def checkpoint(self) -> None:
        """Move everything from the write-ahead log into the file itself."""
        self._all("PRAGMA wal_checkpoint(TRUNCATE)")

    # progress: answered from memory ------------------------------

    def counters(self) -> Counters:
        """Executions ever (dispatched, started, finished)."""
        return self._ledger.counters

    @property
    def num_groups(self) -> int:
        """Groups ever dispatched."""
        return self._ledger.num_groups

    @property
    def num_queued(self) -> int:
        """Executions that wait to be started."""
        return self._ledger.num_queued

    def queued(self, limit: int | None = None) -> list[str]:
        """Ids of the first `limit` (None: all) executions that wait, in dispatch order."""
        return self._ledger.queued(limit)

    @property
    def num_finished_groups(self) -> int:
        """How many groups `finished_groups` would list."""
        return self._ledger.num_ready

    def finished_groups(self) -> list[str]:
        """Groups that have finished and that no step has trained: of the oldest weights first, and
        of those the earliest finish."""
        return self._ledger.ready_groups()

    @property
    def unfinished_versions(self) -> tuple[int, ...]:
        """Weight versions under which the unfinished groups were dispatched, ascending."""
        return self._ledger.unfinished_versions

    def weight_version(self, group_id: str) -> int:
        """Version of the weights that served when the group was dispatched.

        Raises:
            StoreError: there is no such group.
        """
        return self._ledger.weight_version(group_id)

    # groups and executions ------------------------------

    def add_group(
        self, group_id: str, query: dict[str, Any], num_executions: int, weight_version: int
    ) -> list[str]:
        """Dispatch `num_executions` executions of `query`; returns their ids.

        A group that exists is left alone, and the ids of the executions that it has are returned.

        Raises:
            StoreError: `num_executions` is below 1: such a group would never finish.
        """
        if num_executions < 1:
            raise StoreError(f"group {group_id!r}: num_executions={num_executions} must be >= 1")
        group = (group_id, json.dumps(query), num_executions, weight_version)

        def write(connection: sqlite3.Connection) -> tuple[bool, list[tuple[str, int]]]:
            sql = f"INSERT OR IGNORE INTO groups({schema.GROUP_COLUMNS}) VALUES(?,?,?,?,NULL)"
            added = connection.execute(sql, group).rowcount > 0
            if added:
                connection.executemany(
                    "INSERT INTO executions(execution_id, group_id, position, state, attempt)"
                    " VALUES(?,?,?,'queued',0)",
                    [(f"{group_id}.{i:02d}", group_id, i) for i in range(num_executions)],
                )
            rows = connection.execute(
                "SELECT execution_id, execution FROM executions"
                " WHERE group_id=? ORDER BY execution",
                (group_id,),
            )
            return added, rows.fetchall()

        def committed(result: tuple[bool, list[tuple[str, int]]]) -> None:
            added, executions = result
            if added:
                self._own_ledger.group_added(group_id, weight_version, executions)

        _, executions = self._write(write, committed).result()
        return [execution_id for execution_id, _ in executions]

    def start_execution(self, execution_id: str) -> str:
        """Mark a queued execution as running, as a new attempt; returns the bearer token of its
        harness.

        Raises:
            StoreError: it is not queued.
        """
        key = new_key()
        digest = key_digest(key)

        def write(connection: sqlite3.Connection) -> int:
            rows = connection.execute(
                "UPDATE executions SET state='running', attempt=attempt+1, token_digest=?,"
                " started_at=? WHERE execution_id=? AND state='queued' RETURNING attempt",
                (digest, time.time(), execution_id),
            ).fetchall()
            if not rows:
                raise StoreError(f"execution {execution_id!r} cannot start: it is not queued")
            return rows[0][0]

        def committed(attempt: int) -> None:
            self._keys.issue(digest, execution_id, attempt)
            self._own_ledger.execution_started(execution_id, attempt)

        self._write(write, committed).result()
        return key

    def finish_execution(self, execution_id: str, outcome: Outcome) -> None:
        """Record how a running execution ended; its token is refused from then on.

        Raises:
            StoreError: it is not running.
        """
        detail = json.dumps(outcome.detail)

        def write(connection: sqlite3.Connection) -> tuple[str, float]:
            rows = connection.execute(
                "UPDATE executions SET state='finished', outcome=?, reward=?, detail=?,"
                " finished_at=?, token_digest=NULL"
                " WHERE execution_id=? AND state='running' RETURNING group_id, finished_at",
                (outcome.status, outcome.reward, detail, time.time(), execution_id),
            ).fetchall()
            if not rows:
                raise StoreError(f"execution {execution_id!r} cannot finish: it is not running")
            return rows[0]

        def committed(finished: tuple[str, float]) -> None:
            self._keys.revoke(execution_id)
            self._own_ledger.execution_finished(execution_id, *finished)

        self._write(write, committed).result()

    def requeue_running(self) -> int:
        """After a crash: queue running executions again; what they had done stays as an old
        attempt."""
        sql = "UPDATE executions SET state='queued', token_digest=NULL WHERE state='running'"

        def committed(_: int) -> None:
            self._keys.revoke_all()
            self._own_ledger.running_requeued()

        return self._write(lambda connection: connection.execute(sql).rowcount, committed).result()

    def authenticate(self, token: str) -> Attempt | None:
        """The (execution id, attempt) a bearer token stands for; None if it stands for nothing."""
        return self._keys.find(token)

    # training ------------------------------

    def mark_trained(self, group_ids: Sequence[str], step: int) -> None:
        """Record that the groups were trained in `step`.

        Raises:
            StoreError: one of them does not exist; none is marked then.
        """

        def write(connection: sqlite3.Connection) -> None:
            for group_id in group_ids:
                sql = "UPDATE groups SET trained_step=? WHERE group_id=?"
                if not connection.execute(sql, (step, group_id)).rowcount:
                    raise StoreError(f"no group {group_id!r} in {self.path}")

        def committed(_: None) -> None:
            self._own_ledger.groups_trained(group_ids, step)

        self._write(write, committed).result()

    def rollback_to_step(self, step: int) -> int:
        """Make groups trained after `step` (the checkpoint) untrained again; returns how many."""
        sql = "UPDATE groups SET trained_step=NULL WHERE trained_step > ?"
        return self._write(
            lambda connection: connection.execute(sql, (step,)).rowcount,
            lambda _: self._own_ledger.rolled_back(step),
        ).result()

    # calls and nodes ------------------------------

    def new_node_id(self) -> int:
        """A node id no other node has; it counts only once the node is stored."""
        return next(self._next_node)

    def add_call(self, call: Call, nodes: Sequence[Node]) -> Future[None]:
        """Store a call with the nodes it added, in one transaction; committed when the future
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

    def set_call_state(self, call_ids: Sequence[str], state: CallState) -> Future[None]:
        """Change the state of calls (undelivered, superseded)."""
        values = [(state, call_id) for call_id in call_ids]

        def write(connection: sqlite3.Connection) -> None:
            connection.executemany("UPDATE calls SET state=? WHERE call_id=?", values)

        return self._write(write)

    # inner ------------------------------

    @property
    def _ledger(self) -> Ledger:
        """The ledger; read anew where another process writes the file."""
        if self._writer is None:
            with self._read_lock:
                self._own_ledger = Ledger.load(self._reader)
        return self._own_ledger

    def _write(self, write: Write, on_commit: OnCommit | None = None) -> Future[Any]:
        if self._writer is None:
            raise StoreError(f"{self.path} was opened for reading only")
        return self._writer.submit(write, on_commit)
