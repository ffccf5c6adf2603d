"""Trees as rows, for use elsewhere: one row a branch, as JSON lines or Parquet.

A row is the flattened branch (root to leaf) with per-token columns, so that any trainer can read
it.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import orjson

from gyre_megatron.errors import ConfigError, StoreError
from gyre_megatron.trajectory.branches import Branches
from gyre_megatron.trajectory.columns import token_columns
from gyre_megatron.trajectory.paths import path_to
from gyre_megatron.trajectory.records import ExecutionRecord
from gyre_megatron.trajectory.store import TrajectoryStore


def branch_rows(
    store: TrajectoryStore, executions: Sequence[ExecutionRecord]
) -> Iterator[dict[str, Any]]:
    """One row for each branch of each execution, without auxiliary calls.

    Columns: execution_id, group_id, attempt, role, status, reward, token_ids, sampled (0 or 1 a
    token), logprobs (0 where not sampled), weight_versions (-1 where not sampled), temperatures.
    """
    for execution in executions:
        nodes = store.nodes(execution.execution_id)
        branches = Branches(nodes, store.calls(execution.execution_id))
        for leaf, role in zip(branches.leaves, branches.roles, strict=True):
            yield {**_about(execution), "role": role, **_columns(branches, leaf)}


def _about(execution: ExecutionRecord) -> dict[str, Any]:
    outcome = execution.outcome
    return {
        "execution_id": execution.execution_id,
        "group_id": execution.group_id,
        "attempt": execution.attempt,
        "status": outcome.status if outcome else execution.state,
        "reward": outcome.reward if outcome else None,
    }


def _columns(branches: Branches, leaf: int) -> dict[str, list[Any]]:
    parts = [token_columns(branches.nodes[i]) for i in path_to(leaf, branches.parents)]
    columns = {
        "token_ids": [part.token_ids for part in parts],
        "sampled": [part.sampled.astype(np.int8) for part in parts],
        "logprobs": [part.logprobs for part in parts],
        "weight_versions": [part.weight_versions for part in parts],
        "temperatures": [part.temperatures for part in parts],
    }
    return {name: np.concatenate(values).tolist() for name, values in columns.items()}


def write_jsonl(rows: Iterable[dict[str, Any]], path: Path) -> int:
    """Write rows as JSON lines (null where a number is not finite); returns how many.

    Raises:
        StoreError: the file cannot be written; nothing is left behind then.
    """
    count = 0
    with _whole_or_nothing(path) as partial, partial.open("wb") as file:
        for row in rows:
            file.write(orjson.dumps(row, option=orjson.OPT_APPEND_NEWLINE))
            count += 1
    return count


def write_parquet(rows: Iterable[dict[str, Any]], path: Path, rows_per_group: int = 64) -> int:
    """Write rows as Parquet, a few in memory at a time; returns how many.

    Raises:
        ConfigError: pyarrow is not installed.
        StoreError: the file cannot be written; nothing is left behind then.
    """
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ImportError as error:
        raise ConfigError(
            "writing Parquet needs pyarrow: pip install pyarrow, or export to .jsonl"
        ) from error
    types = {
        **dict.fromkeys(("execution_id", "group_id", "status", "role"), pa.string()),
        "attempt": pa.int32(),
        "reward": pa.float64(),
        **dict.fromkeys(("token_ids", "weight_versions"), pa.list_(pa.int32())),
        "sampled": pa.list_(pa.int8()),
        **dict.fromkeys(("logprobs", "temperatures"), pa.list_(pa.float32())),
    }
    schema = pa.schema(list(types.items()))
    count = 0
    rows = iter(rows)
    with _whole_or_nothing(path) as partial, pq.ParquetWriter(partial, schema) as writer:
        while chunk := list(islice(rows, rows_per_group)):
            writer.write_table(pa.Table.from_pylist(chunk, schema))
            count += len(chunk)
    return count


@contextmanager
def _whole_or_nothing(path: Path) -> Iterator[Path]:
    """A file to write beside `path`; it takes the name when all went well."""
    partial = path.with_name(f"{path.name}.partial-{os.getpid()}")
    try:
        yield partial
        partial.replace(path)
    except OSError as error:
        raise StoreError(f"{path} could not be written: {error}") from error
    finally:
        partial.unlink(missing_ok=True)
