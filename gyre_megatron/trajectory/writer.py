"""The store's only writer: a thread that commits many waiting writes in one transaction.

Writes that were queued while a commit ran share the next one. A write has been committed when its
future resolves: it then outlives this process (WAL with synchronous=NORMAL: not a loss of power).
"""

from __future__ import annotations

import logging
import queue
import sqlite3
import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from gyre_megatron.errors import StoreError

log = logging.getLogger(__name__)

Write = Callable[[sqlite3.Connection], Any]
OnCommit = Callable[[Any], None]

_MAX_BATCH = 256
_LAST_CHECKPOINT_TIMEOUT_MS = 2_000
"""How long the end of a run waits for readers in other processes before it leaves the log."""


@dataclass
class _Pending:
    """A write on its way: how it ended goes into `value` or `problem`."""

    write: Write
    on_commit: OnCommit | None
    future: Future[Any] = field(default_factory=Future)
    value: Any = None
    problem: BaseException | None = None


class GroupCommitWriter:
    """Runs writes on `connection` in order, several per transaction."""

    def __init__(self, connection: sqlite3.Connection, path: str) -> None:
        self._connection = connection
        self._path = path
        self._queue: queue.SimpleQueue[_Pending | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._loop, name="trajectory-writer", daemon=True)
        # Without it a write could be queued behind the end mark, and its future never resolve.
        self._submit_lock = threading.Lock()
        self._closed = False
        self._thread.start()

    def submit(self, write: Write, on_commit: OnCommit | None = None) -> Future[Any]:
        """Queue `write(connection)`; the future gives its result once it is committed.

        Args:
            on_commit: called with the result after the commit and before the future resolves, on
                the writer's thread and in the order of the commits; for state kept beside the file.

        Raises:
            StoreError: the store is closed. Failures of the write itself come through the future.
        """
        pending = _Pending(write, on_commit)
        pending.future.set_running_or_notify_cancel()  # giving up waiting must not stop the write
        with self._submit_lock:
            if self._closed:
                raise StoreError(
                    f"the trajectory store {self._path} is closed; no call can be recorded any more"
                )
            self._queue.put(pending)
        return pending.future

    def close(self) -> None:
        """Commit what is queued, move all of it into the file itself, close the connection."""
        with self._submit_lock:
            if self._closed:
                return
            self._closed = True
            self._queue.put(None)
        self._thread.join()
        try:
            self._empty_log()
        finally:
            self._connection.close()

    def _empty_log(self) -> None:
        """After this the file alone is whole: a copy of it misses nothing."""
        self._connection.execute(f"PRAGMA busy_timeout={_LAST_CHECKPOINT_TIMEOUT_MS}")
        try:
            busy = self._connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()[0]
            reason = "another process is reading it" if busy else ""
        except sqlite3.Error as error:
            reason = str(error)
        if reason:
            log.warning(
                "%s: part of the store stays in %s-wal (%s); whoever copies the one must copy both",
                self._path,
                self._path,
                reason,
            )

    def _loop(self) -> None:
        running = True
        while running:
            batch = [self._queue.get()]
            while len(batch) < _MAX_BATCH and not self._queue.empty():
                batch.append(self._queue.get())
            running = None not in batch
            self._commit([pending for pending in batch if pending is not None])

    def _commit(self, batch: list[_Pending]) -> None:
        try:
            self._connection.execute("BEGIN IMMEDIATE")
            for pending in batch:
                self._run(pending)
            self._connection.execute("COMMIT")
        except sqlite3.Error as error:
            if self._connection.in_transaction:
                self._connection.execute("ROLLBACK")
            failure = StoreError(
                f"the trajectory store {self._path} could not be written: {error}; free disk space "
                "or move the store, then resume the run (nothing that was acknowledged is lost)"
            )
            for pending in batch:
                pending.problem = failure
        for pending in batch:
            _resolve(pending)

    def _run(self, pending: _Pending) -> None:
        """Run one write so that its failure takes back itself and nothing else."""
        self._connection.execute("SAVEPOINT one")
        try:
            pending.value = pending.write(self._connection)
        except sqlite3.OperationalError:
            raise  # the file itself is in trouble: the whole batch fails
        except Exception as error:
            self._connection.execute("ROLLBACK TO one")
            pending.problem = error
        self._connection.execute("RELEASE one")


def _resolve(pending: _Pending) -> None:
    if pending.problem is None and pending.on_commit is not None:
        try:
            pending.on_commit(pending.value)
        except Exception as error:  # its waiter must learn of it; the thread must live
            pending.problem = error
    if pending.problem is None:
        pending.future.set_result(pending.value)
    else:
        pending.future.set_exception(pending.problem)
