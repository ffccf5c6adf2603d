"""The ledger beside the store: equal to SQL after any history, and never ahead of a commit."""

from __future__ import annotations

import sqlite3
import threading
import time
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, invariant, multiple, rule

from gyre_megatron.errors import StoreError
from gyre_megatron.trajectory.records import Outcome
from gyre_megatron.trajectory.store import TrajectoryStore
from tests.support.trees import open_store

COUNTERS = (
    "SELECT count(*), coalesce(sum(attempt > 0), 0), coalesce(sum(state = 'finished'), 0)"
    " FROM executions"
)
QUEUED = "SELECT execution_id FROM executions WHERE state = 'queued' ORDER BY execution"
FINISHED_GROUPS = (
    "SELECT group_id FROM groups JOIN executions USING(group_id) WHERE trained_step IS NULL"
    " GROUP BY group_id HAVING sum(state != 'finished') = 0"
    " ORDER BY weight_version, max(finished_at), min(execution)"
)
UNFINISHED_VERSIONS = (
    "SELECT weight_version FROM groups JOIN executions USING(group_id)"
    " GROUP BY group_id HAVING sum(state != 'finished') > 0 ORDER BY weight_version"
)


def assert_equal_to_sql(store: TrajectoryStore) -> None:
    with sqlite3.connect(store.path) as connection:
        ask = lambda sql: connection.execute(sql).fetchall()  # noqa: E731
        assert store.counters() == ask(COUNTERS)[0]
        assert store.queued() == [row[0] for row in ask(QUEUED)]
        assert store.num_queued == len(store.queued())
        assert store.queued(2) == store.queued()[:2]
        assert store.finished_groups() == [row[0] for row in ask(FINISHED_GROUPS)]
        assert list(store.unfinished_versions) == [row[0] for row in ask(UNFINISHED_VERSIONS)]
        assert store.num_groups == ask("SELECT count(*) FROM groups")[0][0]
        versions = dict(ask("SELECT group_id, weight_version FROM groups"))
        assert {group: store.weight_version(group) for group in versions} == versions
    connection.close()


class Histories(RuleBasedStateMachine):
    """Any order of dispatches, starts, ends, steps, roll-backs and restarts."""

    executions = Bundle("executions")
    groups = Bundle("groups")

    def __init__(self) -> None:
        super().__init__()
        self.folder = TemporaryDirectory()
        self.store = open_store(Path(self.folder.name))
        self.count = 0

    @rule(target=groups, version=st.integers(0, 5))
    def name(self, version: int) -> str:
        self.count += 1
        self.store.add_group(f"g{self.count}", {}, 1 + version % 3, version)
        return f"g{self.count}"

    @rule(target=executions, group=groups, size=st.integers(1, 4))
    def dispatch_again(self, group: str, size: int):
        """A group that exists stays as it was, whatever size it is asked for now."""
        return multiple(*self.store.add_group(group, {}, size, 9))

    @rule(execution=executions)
    def start(self, execution: str) -> None:
        self._allowed("queued", execution, lambda: self.store.start_execution(execution))

    @rule(execution=executions, status=st.sampled_from(["scored", "excluded", "placeholder"]))
    def finish(self, execution: str, status: str) -> None:
        outcome = Outcome(status, 0.5 if status == "scored" else None)
        self._allowed("running", execution, lambda: self.store.finish_execution(execution, outcome))

    @rule(execution=executions)
    def run_whole(self, execution: str) -> None:
        if self.store.execution(execution).state == "queued":
            self.store.start_execution(execution)
            self.store.finish_execution(execution, Outcome("scored", 1.0))

    @rule(execution=executions)
    def start_twice(self, execution: str) -> None:
        """The second attempt of an execution is no second execution that started."""
        if self.store.execution(execution).state == "queued":
            self.store.start_execution(execution)
            self.store.requeue_running()
            self.store.start_execution(execution)

    def _allowed(self, state: str, execution: str, act) -> None:
        if self.store.execution(execution).state == state:
            act()
        else:
            with pytest.raises(StoreError):
                act()

    @rule(group=groups, step=st.integers(1, 4))
    def train(self, group: str, step: int) -> None:
        self.store.mark_trained([group], step)

    @rule(group=groups)
    def train_what_does_not_exist(self, group: str) -> None:
        with pytest.raises(StoreError, match="no group 'nobody'"):
            self.store.mark_trained([group, "nobody"], 1)

    @rule(step=st.integers(0, 4))
    def roll_back(self, step: int) -> None:
        self.store.rollback_to_step(step)

    @rule()
    def requeue(self) -> None:
        self.store.requeue_running()

    @rule()
    def reopen(self) -> None:
        self.store.close()
        self.store = open_store(Path(self.folder.name))

    @invariant()
    def agrees_with_sql(self) -> None:
        assert_equal_to_sql(self.store)

    def teardown(self) -> None:
        self.store.close()
        self.folder.cleanup()


TestHistories = Histories.TestCase
TestHistories.settings = settings(
    max_examples=15,
    stateful_step_count=30,
    deadline=None,
    derandomize=True,
    suppress_health_check=list(HealthCheck),
)


def test_groups_of_older_weights_are_trained_first(tmp_path: Path) -> None:
    with open_store(tmp_path) as store:
        ids = [store.add_group(name, {}, 1, version)[0] for name, version in (("a", 0), ("b", 1))]
        assert store.unfinished_versions == (0, 1)
        for execution_id in reversed(ids):
            store.start_execution(execution_id)
            store.finish_execution(execution_id, Outcome("scored", 1.0))
        assert store.finished_groups() == ["a", "b"] and store.unfinished_versions == ()


def test_groups_that_finish_in_another_order_than_their_dispatch(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    ids = [store.add_group(name, {}, 1, 0)[0] for name in ("a", "b", "c")]
    for execution_id in (ids[2], ids[0], ids[1]):
        store.start_execution(execution_id)
        store.finish_execution(execution_id, Outcome("scored", 1.0))
    assert store.finished_groups() == ["c", "a", "b"]
    store.mark_trained(["a"], 1)
    store.mark_trained(["c"], 2)
    store.rollback_to_step(0)
    assert store.finished_groups() == ["c", "a", "b"]
    assert_equal_to_sql(store)
    store.close()


def test_nothing_counts_before_its_commit(tmp_path: Path) -> None:
    """A write that ran inside a transaction that is still open is not seen."""
    store = open_store(tmp_path)
    (execution_id,) = store.add_group("g", {}, 1, 0)
    gates = [threading.Event(), threading.Event()]
    reached = [threading.Event(), threading.Event()]

    def wait_at(number: int):
        def wait_in_transaction(_: sqlite3.Connection) -> None:
            reached[number].set()
            assert gates[number].wait(60)

        return wait_in_transaction

    first = store._write(wait_at(0))
    assert reached[0].wait(60)
    # Both queue up behind `first`, so that they share the next transaction.
    start = threading.Thread(target=store.start_execution, args=(execution_id,))
    start.start()
    while store._writer._queue.qsize() == 0:
        time.sleep(0.001)
    second = store._write(wait_at(1))
    gates[0].set()
    first.result(60)
    assert reached[1].wait(60)
    assert store.counters() == (1, 0, 0) and store.queued() == [execution_id]
    assert start.is_alive()
    gates[1].set()
    second.result(60)
    start.join(60)
    assert store.counters() == (1, 1, 0) and store.queued() == []
    store.close()


def test_a_commit_that_fails_moves_nothing(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    (execution_id,) = store.add_group("g", {}, 1, 0)
    token = store.start_execution(execution_id)
    store.checkpoint()
    full = lambda connection: connection.execute("PRAGMA max_page_count=1").fetchall()  # noqa: E731
    store._write(full).result()
    for act in (
        lambda: store.finish_execution(execution_id, Outcome("scored", 1.0, {"log": "x" * 99_999})),
        lambda: store.add_group("h", {"text": "x" * 99_999}, 4, 0),
    ):
        with pytest.raises(StoreError, match="free disk space"):
            act()
    assert store.counters() == (1, 1, 0) and store.num_groups == 1
    assert store.authenticate(token) == (execution_id, 1)
    assert_equal_to_sql(store)
    store.close()


def test_whoever_waited_for_a_write_sees_it(tmp_path: Path) -> None:
    """From many threads at once, as the control plane starts and ends executions."""
    store = open_store(tmp_path)
    ids = [i for group in range(8) for i in store.add_group(f"g{group}", {}, 8, group)]
    wrong: list[str] = []

    def run(execution_id: str) -> None:
        token = store.start_execution(execution_id)
        if execution_id in store.queued() or store.authenticate(token) != (execution_id, 1):
            wrong.append(execution_id)
        store.finish_execution(execution_id, Outcome("scored", 1.0))
        if store.authenticate(token) is not None:
            wrong.append(execution_id)

    threads = [threading.Thread(target=run, args=(i,)) for i in ids]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong and store.counters() == (64, 64, 64)
    assert_equal_to_sql(store)
    store.close()


def test_a_reader_in_another_process_sees_what_is_written_meanwhile(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    reader = TrajectoryStore(store.path, read_only=True)
    assert reader.counters() == (0, 0, 0)
    (execution_id,) = store.add_group("g", {}, 1, 3)
    assert reader.counters() == (1, 0, 0) and reader.queued() == [execution_id]
    assert reader.weight_version("g") == 3
    with pytest.raises(StoreError, match="no group 'h'"):
        reader.weight_version("h")
    reader.close()
    store.close()


def test_answers_do_not_ask_the_file(tmp_path: Path) -> None:
    """The control plane asks at every event; at 100,000 executions a query took 28 ms."""
    store = open_store(tmp_path)
    store.add_group("g", {}, 4, 0)
    statements: list[str] = []
    store._reader.set_trace_callback(statements.append)
    for _ in range(100):
        store.counters(), store.queued(2), store.finished_groups(), store.num_groups
        store.weight_version("g")
    assert statements == []
    store.close()
