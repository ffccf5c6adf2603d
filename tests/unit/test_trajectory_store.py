"""The trajectory store and its command line."""

from __future__ import annotations

import json
import shutil
import sqlite3
import subprocess
import threading
from pathlib import Path

import numpy as np
import pytest

from gyre_megatron.errors import StoreError
from gyre_megatron.trajectory.__main__ import main
from gyre_megatron.trajectory.export import branch_rows, write_jsonl, write_parquet
from gyre_megatron.trajectory.forest import Forest
from gyre_megatron.trajectory.records import Outcome
from gyre_megatron.trajectory.store import TrajectoryStore
from tests.support.trees import TreeBuilder, as_plain, open_store


def test_the_life_of_executions(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    ids = store.add_group("g1", {"task": "a"}, 2, weight_version=4)
    # A group that exists stays as it was; the ids are those that it has, not those asked for now.
    assert store.add_group("g1", {"task": "other"}, 5, 5) == ids
    with pytest.raises(StoreError, match="num_executions=0 must be >= 1"):
        store.add_group("g2", {}, 0, 5)
    assert store.group("g1").query == {"task": "a"} and store.group("g1").weight_version == 4
    assert store.counters() == (2, 0, 0)
    token = store.start_execution(ids[0])
    assert store.authenticate(token) == (ids[0], 1)
    with pytest.raises(StoreError, match="it is not queued"):
        store.start_execution(ids[0])
    with pytest.raises(StoreError, match="it is not running"):
        store.finish_execution(ids[1], Outcome("scored", 1.0))
    store.finish_execution(ids[0], Outcome("scored", 0.5, {"code": 0}))
    assert store.authenticate(token) is None
    assert store.finished_groups() == []
    store.start_execution(ids[1])
    store.finish_execution(ids[1], Outcome("excluded"))
    assert store.finished_groups() == ["g1"] and store.counters() == (2, 2, 2)
    assert store.execution(ids[0]).outcome == Outcome("scored", 0.5, {"code": 0})
    store.close()


def test_training_progress_rolls_back_to_a_checkpoint(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    for name in ("a", "b", "c"):
        for execution_id in store.add_group(name, {}, 1, 0):
            store.start_execution(execution_id)
            store.finish_execution(execution_id, Outcome("scored", 1.0))
    assert store.finished_groups() == ["a", "b", "c"]
    store.mark_trained(["a"], 1)
    store.mark_trained(["b", "c"], 2)
    assert store.finished_groups() == []
    assert store.rollback_to_step(1) == 2
    assert store.finished_groups() == ["b", "c"]
    store.close()


def test_running_executions_are_queued_again_once_and_keep_their_past_apart(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    execution_id = store.add_group("g", {}, 1, 0)[0]
    builder = TreeBuilder(store, execution_id)
    builder.call(builder.context(None, 5), 3)
    store.close()
    store = open_store(tmp_path)
    assert store.authenticate(builder.token) == (
        execution_id,
        1,
    )  # a harness that lived on may go on
    assert store.requeue_running() == 1 and store.requeue_running() == 0
    assert store.authenticate(builder.token) is None
    again = TreeBuilder(store, execution_id)
    assert again.attempt == 2 and store.nodes(execution_id) == []
    assert store.counters() == (1, 1, 0), "a second attempt is no second execution"
    again.call(again.context(None, 7), 2)
    assert [len(node.token_ids) for node in store.nodes(execution_id)] == [7, 4]
    assert [len(node.token_ids) for node in store.nodes(execution_id, attempt=1)] == [5, 5]
    store.close()


def test_nodes_come_back_as_they_were(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    builder = TreeBuilder(store, store.add_group("g", {}, 1, 0)[0])
    root = builder.context(None, 5)
    first = builder.call(root, 3)
    second = builder.call(builder.context(first, 4), 6)
    routed = builder.call(builder.context(first, 1), 1)
    routed.routed_experts = np.arange(24, dtype=np.int16).reshape(3, 4, 2)
    branch = builder.context(root, 2)
    routed_call = builder.call(branch, 2, role="sub_agent")
    stored = {node.node_id: as_plain(node) for node in store.nodes(builder.execution_id)}
    for node in (root, first, second, branch, routed_call):
        assert stored[node.node_id] == as_plain(node)
    forest = Forest(
        store.new_node_id, store.nodes(builder.execution_id), store.calls(builder.execution_id)
    )
    assert forest.path_ids(second).tolist() == builder.forest.path_ids(second).tolist()
    assert forest.match([(root.key, ()), (first.key, ())]).node.node_id == first.node_id
    store.close()


def test_a_deep_tree_needs_no_recursion(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    builder = TreeBuilder(store, store.add_group("g", {}, 1, 0)[0])
    node = builder.context(None, 1)
    for _ in range(5000):
        node = builder.context(node, 1)
    leaf = builder.call(node, 1)
    assert leaf.end == 5001 + 3
    assert len(builder.forest.path_ids(leaf)) == leaf.end
    assert store.nodes(builder.execution_id)[-1].end == leaf.end
    store.close()


def test_concurrent_writers_share_commits_and_lose_nothing(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    ids = store.add_group("g", {}, 16, 0)

    def work(execution_id: str) -> None:
        builder = TreeBuilder(store, execution_id)
        for _ in range(20):
            builder.call(builder.context(None, 3), 2)

    threads = [threading.Thread(target=work, args=(i,)) for i in ids]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [len(store.calls(i)) for i in ids] == [20] * 16
    assert len({node.node_id for i in ids for node in store.nodes(i)}) == 16 * 40
    store.close()


def test_a_full_disk_is_told_and_nothing_acknowledged_is_lost(tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=600k", "tmpfs", str(disk)], check=False
    ).returncode
    if mounted != 0:
        pytest.skip("needs the right to mount a small tmpfs")
    try:
        store = TrajectoryStore(disk / "store.db")
        builder = TreeBuilder(store, store.add_group("g", {}, 1, 0)[0])
        with pytest.raises(StoreError, match="free disk space"):
            for _ in range(1000):
                builder.call(builder.context(None, 2000), 10)
        acknowledged = len(store.calls(builder.execution_id))
        assert 0 < acknowledged < 1000
        shutil.copy(disk / "store.db", tmp_path / "store.db")
        shutil.copy(disk / "store.db-wal", tmp_path / "store.db-wal")
        store._reader.close()
        copy = TrajectoryStore(tmp_path / "store.db")
        assert len(copy.calls(builder.execution_id)) == acknowledged
        copy.close()
    finally:
        subprocess.run(["umount", "-l", str(disk)], check=True)


def test_a_closed_store_is_whole_without_its_log(tmp_path: Path) -> None:
    """A copy of store.db alone used to lack what stood in 4 MB of write-ahead log."""
    store = open_store(tmp_path)
    builder = TreeBuilder(store, store.add_group("g", {}, 1, 0)[0])
    for _ in range(50):
        builder.call(builder.context(None, 1000), 10)
    assert (tmp_path / "store.db-wal").stat().st_size > 0
    store.close()
    store.close()  # twice is allowed
    assert not (tmp_path / "store.db-wal").exists()
    (tmp_path / "elsewhere").mkdir()
    shutil.copy(tmp_path / "store.db", tmp_path / "elsewhere" / "store.db")
    with open_store(tmp_path / "elsewhere") as copy:
        assert len(copy.calls(builder.execution_id)) == 50


def test_a_reader_elsewhere_cannot_hold_up_the_end(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store = open_store(tmp_path)
    store.add_group("g", {}, 4, 0)
    other = sqlite3.connect(tmp_path / "store.db", isolation_level=None)
    other.execute("BEGIN")
    other.execute("SELECT * FROM groups").fetchone()
    store.add_group("h", {}, 4, 0)
    store.close()
    assert "whoever copies the one must copy both" in caplog.text
    other.close()


def test_a_copy_made_while_a_run_writes_is_whole(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    builder = TreeBuilder(store, store.add_group("g", {}, 1, 0)[0])
    for _ in range(20):
        builder.call(builder.context(None, 1000), 10)
    store.copy_to(tmp_path / "copy.db")
    builder.call(builder.context(None, 1000), 10)
    assert sorted(p.name for p in tmp_path.glob("copy*")) == ["copy.db"]
    with TrajectoryStore(tmp_path / "copy.db", read_only=True) as copy:
        assert len(copy.calls(builder.execution_id)) == 20
    with pytest.raises(StoreError, match="exists; name a file that does not"):
        store.copy_to(tmp_path / "copy.db")
    with pytest.raises(StoreError, match="could not be copied"):
        store.copy_to(tmp_path / "no" / "folder.db")
    store.close()


def test_a_closed_store_refuses_writes(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    store.close()
    with pytest.raises(StoreError, match="is closed"):
        store.add_group("g", {}, 1, 0)


def test_another_schema_and_no_store_are_refused(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="no trajectory store"):
        TrajectoryStore(tmp_path / "none.sqlite", read_only=True)
    open_store(tmp_path).close()
    with sqlite3.connect(tmp_path / "store.db") as connection:
        connection.execute("PRAGMA user_version=99")
    with pytest.raises(StoreError, match="schema version 99, expected 1"):
        open_store(tmp_path)


def test_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    store = open_store(tmp_path)
    builder = TreeBuilder(store, store.add_group("g", {}, 1, 0)[0])
    first = builder.call(builder.context(None, 5), 3)
    builder.call(builder.context(first, 4), 6, role="main_summary")
    builder.call(builder.context(first, 2), 1, role="auxiliary")
    builder.finish(0.25)
    store.close()
    path = str(tmp_path / "store.db")
    for command, shown in (
        (["list", path], "0.250"),
        (["show", path, "g.00"], "main_summary 6 sampled"),
        (["stats", path], "1 scored"),
        (["export", path, str(tmp_path / "out.jsonl")], "1 branches"),
    ):
        assert main(command) == 0
        assert shown in capsys.readouterr().out
    row = json.loads((tmp_path / "out.jsonl").read_text())
    assert row["role"] == "main_summary" and row["reward"] == 0.25
    assert row["sampled"] == [0] * 7 + [1] * 3 + [0] * 6 + [1] * 6
    assert row["logprobs"][7:10] == [-0.5] * 3 and row["weight_versions"][6:8] == [-1, 3]
    assert main(["export", path, str(tmp_path / "out.csv")]) == 1
    assert main(["export", path, str(tmp_path / "no" / "folder.jsonl")]) == 1
    assert "could not be written" in capsys.readouterr().err
    assert main(["show", path, "nobody"]) == 1
    assert "no execution 'nobody'" in capsys.readouterr().err
    assert main(["list", path, "--group", "nobody"]) == 1
    assert "no group 'nobody'" in capsys.readouterr().err
    assert main(["copy", path, str(tmp_path / "copy.db")]) == 0
    assert main(["show", str(tmp_path / "copy.db"), "g.00"]) == 0


@pytest.mark.parametrize("columns", ["20", "80"])
def test_tables_never_cut_what_they_show(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch, columns: str
) -> None:
    """`list` used to print g0000... where the terminal had 80 columns."""
    monkeypatch.setenv("COLUMNS", columns)
    store = open_store(tmp_path)
    long_name = "a_group_with_a_name_of_its_own_" + "x" * 60
    builder = TreeBuilder(store, store.add_group(long_name, {}, 1, 0)[0])
    builder.call(builder.context(None, 123_456), 789)
    builder.finish(0.25)
    store.close()
    path = str(tmp_path / "store.db")
    for command, whole in (
        (["list", path], (f"{long_name}.00", "finished", "scored", "0.250", "124,247")),
        (["show", path, f"{long_name}.00"], (f"{long_name}.00 scored, reward 0.25", "789 sampled")),
        (["stats", path], ("1 finished", "calls as main", "bytes a token")),
    ):
        assert main(command) == 0
        shown = capsys.readouterr().out
        assert all(text in shown for text in whole), shown
        assert "…" not in shown


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
def test_an_export_that_fails_leaves_nothing(tmp_path: Path, suffix: str) -> None:
    if suffix == ".parquet":
        pytest.importorskip("pyarrow", reason="Parquet needs pyarrow, which is not installed")

    def rows():
        yield {"execution_id": "a"}
        raise StoreError("the disk went away")

    out = tmp_path / f"out{suffix}"
    out.write_text("what was there before")
    with pytest.raises(StoreError, match="went away"):
        (write_jsonl if suffix == ".jsonl" else write_parquet)(rows(), out)
    assert [file.name for file in tmp_path.iterdir()] == [out.name]
    assert out.read_text() == "what was there before"


def test_json_stays_json_where_a_number_is_not_finite(tmp_path: Path) -> None:
    with open_store(tmp_path) as store:
        builder = TreeBuilder(store, store.add_group("g", {}, 1, 0)[0])
        builder.call(builder.context(None, 1), 2, logprob=float("nan"))
        assert write_jsonl(branch_rows(store, store.executions()), tmp_path / "out.jsonl") == 1
    refuse = lambda text: pytest.fail(f"{text} is no JSON")  # noqa: E731
    row = json.loads((tmp_path / "out.jsonl").read_text(), parse_constant=refuse)
    assert row["logprobs"] == [0, 0, 0, None, None]


def test_parquet_holds_the_same_rows(tmp_path: Path) -> None:
    parquet = pytest.importorskip(
        "pyarrow.parquet", reason="Parquet needs pyarrow, which is not installed"
    )
    store = open_store(tmp_path)
    builder = TreeBuilder(store, store.add_group("g", {}, 1, 0)[0])
    for _ in range(70):
        builder.call(builder.context(None, 5), 3)
    store.close()
    assert main(["export", str(tmp_path / "store.db"), str(tmp_path / "out.parquet")]) == 0
    assert main(["export", str(tmp_path / "store.db"), str(tmp_path / "out.jsonl")]) == 0
    rows = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert parquet.read_table(tmp_path / "out.parquet").to_pylist() == rows
