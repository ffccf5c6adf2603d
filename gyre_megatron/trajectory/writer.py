"""The store's only writer: a thread that commits many waiting writes in one transaction.

A write is durable when its future resolves. Writes that were queued while a commit ran share the
next one.
"""

from __future__ import annotations

import queue
import sqlite3
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from gyre_megatron.errors import StoreError

Write = Callable[[sqlite3.Connection], Any]
_MAX_BATCH = 256


class GroupCommitWriter:
    """Runs writes on `connection` in order, several per transaction."""

    def __init__(self, connection: sqlite3.Connection, path: str) -> None:
        self._connection = connection
        self._path = path
        self._queue: queue.SimpleQueue[tuple[Write, Future[Any]] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._loop, name="trajectory-writer", daemon=True)
        self._closed = False
        self._thread.start()

    def submit(self, write: Write) -> Future[Any]:
        """Queue `write(connection)`; the future gives its result once it is committed.

        Raises:
            StoreError: the store is closed. Failures of the write itself come through the future.
        """
        if self._closed:
            raise StoreError(
                f"the trajectory store {self._path} is closed; no call can be recorded any more"
            )
        future: Future[Any] = Future()
        future.set_running_or_notify_cancel()  # a waiter that gives up must not stop the write
        self._queue.put((write, future))
        return future

    def close(self) -> None:
        """Commit what is queued and stop the thread."""
        if not self._closed:
            self._closed = True
            self._queue.put(None)
            self._thread.join()

    def _loop(self) -> None:
        running = True
        while running:
            batch = [self._queue.get()]
            while len(batch) < _MAX_BATCH and not self._queue.empty():
                batch.append(self._queue.get())
            running = None not in batch
            self._commit([item for item in batch if item is not None])

    def _commit(self, batch: list[tuple[Write, Future[Any]]]) -> None:
        results: list[tuple[Future[Any], Any, BaseException | None]] = []
        try:
            self._connection.execute("BEGIN IMMEDIATE")
            for write, future in batch:
                results.append((future, *self._one(write)))
            self._connection.execute("COMMIT")
        except sqlite3.Error as error:
            if self._connection.in_transaction:
                self._connection.execute("ROLLBACK")
            failure = StoreError(
                f"the trajectory store {self._path} could not be written: {error}; free disk space "
                "or move the store, "
                "then resume the run (nothing that was acknowledged is lost)"
            )
            results = [(future, None, failure) for _, future in batch]
        for future, value, problem in results:
            if problem is None:
                future.set_result(value)
            else:
                future.set_exception(problem)

    def _one(self, write: Write) -> tuple[Any, BaseException | None]:
        self._connection.execute("SAVEPOINT one")
        try:
            value = write(self._connection)
        except sqlite3.OperationalError:
            raise
        except Exception as error:
            self._connection.execute("ROLLBACK TO one")
            self._connection.execute("RELEASE one")
            return None, error
        self._connection.execute("RELEASE one")
        return value, None
