"""SQLite schema of the trajectory store and the row codecs."""

from __future__ import annotations

import json
import sqlite3
from pathlib import Path
from typing import Any

import numpy as np

from gyre_megatron.errors import StoreError
from gyre_megatron.trajectory.records import Call, ExecutionRecord, GroupRecord, Node, Outcome

SCHEMA_VERSION = 1

_TABLES = """
CREATE TABLE IF NOT EXISTS groups(
  group_id TEXT PRIMARY KEY, query TEXT NOT NULL, num_executions INTEGER NOT NULL,
  weight_version INTEGER NOT NULL, trained_step INTEGER);
CREATE TABLE IF NOT EXISTS executions(
  execution INTEGER PRIMARY KEY, execution_id TEXT UNIQUE NOT NULL,
  group_id TEXT NOT NULL REFERENCES groups, position INTEGER NOT NULL, state TEXT NOT NULL,
  attempt INTEGER NOT NULL, token_digest BLOB, outcome TEXT, reward REAL, detail TEXT,
  started_at REAL, finished_at REAL);
CREATE INDEX IF NOT EXISTS executions_by_group ON executions(group_id);
CREATE INDEX IF NOT EXISTS executions_by_state ON executions(state);
CREATE TABLE IF NOT EXISTS nodes(
  node_id INTEGER PRIMARY KEY, execution INTEGER NOT NULL, attempt INTEGER NOT NULL,
  parent INTEGER NOT NULL, key BLOB NOT NULL, num_context INTEGER NOT NULL,
  token_ids BLOB NOT NULL, logprobs BLOB, versions BLOB, temperature REAL, routed_experts BLOB,
  call_id TEXT);
CREATE INDEX IF NOT EXISTS nodes_by_execution ON nodes(execution, attempt);
CREATE TABLE IF NOT EXISTS calls(
  call INTEGER PRIMARY KEY, call_id TEXT UNIQUE NOT NULL, execution INTEGER NOT NULL,
  attempt INTEGER NOT NULL, node_id INTEGER NOT NULL, dialect TEXT NOT NULL, role TEXT NOT NULL,
  state TEXT NOT NULL, finish_reason TEXT NOT NULL, num_prompt_tokens INTEGER NOT NULL,
  num_reused_tokens INTEGER NOT NULL, num_output_tokens INTEGER NOT NULL,
  started_at REAL NOT NULL, finished_at REAL NOT NULL, meta TEXT NOT NULL);
CREATE INDEX IF NOT EXISTS calls_by_execution ON calls(execution, attempt);
"""

GROUP_COLUMNS = "group_id, query, num_executions, weight_version, trained_step"
EXECUTION_COLUMNS = (
    "execution_id, group_id, position, state, attempt, outcome, reward, detail, started_at, "
    "finished_at"
)
NODE_COLUMNS = (
    "node_id, parent, key, num_context, token_ids, logprobs, versions, temperature, "
    "routed_experts, call_id"
)
CALL_COLUMNS = (
    "call_id, node_id, dialect, role, state, finish_reason, num_prompt_tokens, num_reused_tokens, "
    "num_output_tokens, started_at, finished_at, meta"
)


def connect(path: str | Path, read_only: bool = False) -> sqlite3.Connection:
    """Open the store with WAL and the schema in place.

    Raises:
        StoreError: the file cannot be opened, is no store, or was written by another schema
        version.
    """
    try:
        if read_only and not Path(path).is_file():
            raise StoreError(f"no trajectory store at {path}; pass the store.db of a run directory")
        uri = f"{Path(path).resolve().as_uri()}{'?mode=ro' if read_only else ''}"
        connection = sqlite3.connect(
            uri, uri=True, isolation_level=None, check_same_thread=False, timeout=30.0
        )
        if not read_only:
            _prepare(connection)
        _check_version(connection, path)
    except sqlite3.Error as error:
        raise StoreError(f"the trajectory store {path} cannot be opened: {error}") from error
    return connection


def _prepare(connection: sqlite3.Connection) -> None:
    connection.execute("PRAGMA journal_mode=WAL")
    connection.execute("PRAGMA synchronous=NORMAL")
    if connection.execute("PRAGMA user_version").fetchone()[0] == 0:
        connection.executescript(_TABLES)
        connection.execute(f"PRAGMA user_version={SCHEMA_VERSION}")


def _check_version(connection: sqlite3.Connection, path: str | Path) -> None:
    found = connection.execute("PRAGMA user_version").fetchone()[0]
    if found != SCHEMA_VERSION:
        raise StoreError(
            f"{path} has schema version {found}, expected {SCHEMA_VERSION}; use the Gyre that "
            "wrote it"
        )


def group_from_row(row: tuple[Any, ...]) -> GroupRecord:
    """Columns: GROUP_COLUMNS."""
    return GroupRecord(row[0], json.loads(row[1]), *row[2:])


def execution_from_row(row: tuple[Any, ...]) -> ExecutionRecord:
    """Columns: EXECUTION_COLUMNS."""
    outcome = Outcome(row[5], row[6], json.loads(row[7] or "{}")) if row[5] else None
    return ExecutionRecord(row[0], row[1], row[2], row[3], row[4], outcome, row[8], row[9])


def node_row(execution: int, attempt: int, node: Node) -> tuple[Any, ...]:
    """Values for (node_id, execution, attempt, parent, key, num_context, token_ids, ...,
    call_id)."""
    head = (
        node.node_id,
        execution,
        attempt,
        node.parent,
        node.key,
        node.num_context,
        node.token_ids.tobytes(),
    )
    routes = _pack_routes(node.routed_experts)
    if not node.sampled:
        return (*head, None, None, None, routes, None)
    versions = np.asarray(node.versions, np.int64).tobytes()
    return (*head, node.logprobs.tobytes(), versions, node.temperature, routes, node.call_id)


def node_from_row(row: tuple[Any, ...]) -> Node:
    """Columns: NODE_COLUMNS. `start` is left 0: the reader knows the parent."""
    runs = np.frombuffer(row[6] or b"", np.int64).reshape(-1, 2)
    return Node(
        node_id=row[0],
        parent=row[1],
        key=row[2],
        num_context=row[3],
        token_ids=np.frombuffer(row[4], np.int32),
        logprobs=np.frombuffer(row[5] or b"", np.float32),
        versions=tuple((int(version), int(count)) for version, count in runs),
        temperature=1.0 if row[7] is None else row[7],
        routed_experts=_unpack_routes(row[8]),
        call_id=row[9] or "",
        persisted=True,
    )


def call_row(execution: int, call: Call) -> tuple[Any, ...]:
    """Values for the calls table, without its key."""
    counts = (call.num_prompt_tokens, call.num_reused_tokens, call.num_output_tokens)
    what = (call.node_id, call.dialect, call.role, call.state, call.finish_reason)
    when = (call.started_at, call.finished_at)
    return (call.call_id, execution, call.attempt, *what, *counts, *when, json.dumps(call.meta))


def call_from_row(execution_id: str, attempt: int, row: tuple[Any, ...]) -> Call:
    """Columns: CALL_COLUMNS."""
    names = CALL_COLUMNS.replace(" ", "").split(",")
    fields = dict(zip(names, row, strict=True))
    return Call(
        execution_id=execution_id, attempt=attempt, **{**fields, "meta": json.loads(fields["meta"])}
    )


def _pack_routes(routes: np.ndarray | None) -> bytes | None:
    if routes is None:
        return None
    return (
        np.asarray(routes.shape, np.int32).tobytes()
        + np.ascontiguousarray(routes, np.int16).tobytes()
    )


def _unpack_routes(blob: bytes | None) -> np.ndarray | None:
    if blob is None:
        return None
    shape = np.frombuffer(blob[:12], np.int32)
    return np.frombuffer(blob[12:], np.int16).reshape(tuple(shape))
