"""The control plane's parts: micro-step queue, cell board, run directory, journal and report."""

from __future__ import annotations

import asyncio
import json
from functools import partial
from pathlib import Path

import msgspec
import pytest

from gyre_megatron.errors import CellError, CheckpointError, RunDirectoryError
from gyre_megatron.observe import report
from gyre_megatron.observe.batch_record import BatchRecord
from gyre_megatron.observe.journal import Journal
from gyre_megatron.runtime import protocol
from gyre_megatron.runtime.cell_board import CellBoard
from gyre_megatron.runtime.micro_steps import MicroStepQueue
from gyre_megatron.runtime.run_directory import RunDirectory
from gyre_megatron.scheduler import Role

STATUS = {"rerouted_calls": 2, "lost_calls": 0, "harness_errors": 1}


def test_a_micro_step_is_claimed_once_and_in_order():
    queue = MicroStepQueue()
    queue.put([[b"a"], [b"b"], [b"c"]])
    first, second = queue.claim(0), queue.claim(1)
    assert (first[1], second[1]) == ([b"a"], [b"b"])
    assert queue.num_open == 3
    queue.done(second[0], 1)
    with pytest.raises(CellError, match="did not claim"):
        queue.done(first[0], 1)
    queue.done(first[0], 0)
    third = queue.claim(1)
    queue.done(third[0], 1)
    assert queue.claim(0) is None and queue.num_open == 0
    assert queue.done_by_cell == {0: 1, 1: 2}


def board_of(
    num_cells: int,
    queue: MicroStepQueue | None = None,
    timeout_s: float = 5.0,
    seen: list | None = None,
):
    on_micro_step = seen.append if seen is not None else lambda metrics: None
    return CellBoard(num_cells, queue or MicroStepQueue(), 0.05, timeout_s, on_micro_step)


async def fetch(board: CellBoard, cell: int):
    return protocol.order_decoder.decode(await board.next_order(cell))


def test_every_cell_gets_its_order_and_all_reports_are_awaited():
    async def scenario():
        board = board_of(2)
        orders = asyncio.create_task(
            board.order([0, 1], partial(protocol.FinishStep, step=3, prefix=2, skip=False))
        )
        for cell in (1, 0):
            order = await fetch(board, cell)
            assert isinstance(order, protocol.FinishStep) and order.step == 3
            assert not orders.done()
            await board.report(cell, protocol.Report(order.order_id, {"x": float(cell)}, 0.1))
        reports = await orders
        assert {cell: r.metrics["x"] for cell, r in reports.items()} == {0: 0.0, 1: 1.0}
        assert isinstance(await fetch(board, 0), protocol.Wait)

    asyncio.run(scenario())


def test_only_cells_in_training_claim_micro_steps():
    async def scenario():
        queue, seen = MicroStepQueue(), []
        board = board_of(2, queue, seen=seen)
        queue.put([[b"bin"]])
        assert isinstance(await fetch(board, 1), protocol.Wait)
        board.roles[1] = Role.TRAIN
        order = await fetch(board, 1)
        assert order.bins == [b"bin"]
        await board.report(1, protocol.Report(order.order_id, {"loss": 2.0}, 0.1))
        assert seen == [{"loss": 2.0}] and queue.num_open == 0

    asyncio.run(scenario())


def test_a_waiting_cell_is_woken_by_new_work():
    async def scenario():
        board = CellBoard(1, MicroStepQueue(), 30.0, 5.0, lambda metrics: None)
        waiting = asyncio.create_task(fetch(board, 0))
        await asyncio.sleep(0.01)
        ordering = asyncio.create_task(board.order([0], partial(protocol.Serve, version=1)))
        order = await asyncio.wait_for(waiting, 1)
        assert isinstance(order, protocol.Serve)
        await board.report(0, protocol.Report(order.order_id, {}, 0.0))
        await ordering

    asyncio.run(scenario())


def test_a_failed_or_silent_cell_fails_the_order_with_its_name():
    async def scenario():
        board = board_of(2)
        ordering = asyncio.create_task(board.order([0, 1], partial(protocol.Serve, version=1)))
        order = await fetch(board, 1)
        await board.report(
            1, protocol.Report(order.order_id, {}, 0.0, error="TransferError: checksum")
        )
        with pytest.raises(CellError, match="cell 1: TransferError: checksum"):
            await ordering
        silent = board_of(2, timeout_s=0.05)
        ordering = asyncio.create_task(silent.order([0, 1], partial(protocol.Serve, version=1)))
        order = await fetch(silent, 0)
        await silent.report(0, protocol.Report(order.order_id, {}, 0.0))
        with pytest.raises(CellError, match=r"cells \[1\] did not carry out Serve"):
            await ordering

    asyncio.run(scenario())


def test_reports_and_cells_that_do_not_exist_are_refused():
    async def scenario():
        board = board_of(1)
        with pytest.raises(CellError, match="there is no cell 4"):
            board.register(4, protocol.Register("http://x", 0, 0.0))
        with pytest.raises(CellError, match="never given"):
            await board.report(0, protocol.Report(99, {}, 0.0))

    asyncio.run(scenario())


@pytest.mark.parametrize(
    "order",
    [
        protocol.Join(1, 2),
        protocol.Sync(1, 2, 3),
        protocol.MicroStep(1, [b"x"]),
        protocol.FinishStep(1, 2, 1, True),
        protocol.Publish(1, 2, True),
        protocol.Serve(1, 2),
        protocol.Checkpoint(1, "d"),
        protocol.Stop(1, "why"),
        protocol.Wait(),
    ],
    ids=lambda order: type(order).__name__,
)
def test_orders_survive_the_wire(order):
    assert protocol.order_decoder.decode(msgspec.msgpack.encode(order)) == order


def test_one_run_at_a_time_and_no_mixing(tmp_path: Path):
    first = RunDirectory(tmp_path / "run")
    first.open(resume=False)
    with pytest.raises(RunDirectoryError, match="in use by another run"):
        RunDirectory(tmp_path / "run").open(resume=False)
    first.store_file.touch()
    first._lock_file.close()
    with pytest.raises(RunDirectoryError, match="continue it with --resume"):
        RunDirectory(tmp_path / "run").open(resume=False)
    RunDirectory(tmp_path / "run").open(resume=True)
    with pytest.raises(RunDirectoryError, match="nothing to resume"):
        RunDirectory(tmp_path / "other").open(resume=True)
    assert not (tmp_path / "other").exists()


def test_only_complete_checkpoints_count(tmp_path: Path):
    directory = RunDirectory(tmp_path)
    assert directory.latest_checkpoint() is None
    for step in (2, 4, 6):
        (directory.staging_for(step) / "weights").write_text(str(step))
        directory.commit_checkpoint(step, {"finished": step * 8}, keep=2)
    directory.staging_for(8)  # a kill while this one was being written
    latest = directory.latest_checkpoint()
    assert latest.step == 6 and (latest.directory / "weights").read_text() == "6"
    assert json.loads((latest.directory / "state.json").read_text()) == {"finished": 48, "step": 6}
    assert sorted(p.name for p in directory.checkpoints.glob("step_[0-9]*[0-9]")) == [
        "step_000004",
        "step_000006",
    ]
    (latest.directory / "state.json").unlink()
    with pytest.raises(CheckpointError, match="missing or incomplete"):
        directory.latest_checkpoint()


def journal_at(path: Path, resumed_step: int = 0) -> Journal:
    return Journal(RunDirectory(path), num_steps=9, resumed_step=resumed_step, tensorboard=True)


def write_steps(journal: Journal, steps: range) -> None:
    for step in steps:
        batch = BatchRecord(group_ids=[f"g{step}"], rewards=[step / 10, step / 10], num_bins=1)
        journal.step(step, batch, {"grad_norm": 1.0}, {0: 2, 1: 1}, STATUS)


def test_a_resumed_journal_drops_what_the_checkpoint_does_not_hold(tmp_path: Path):
    journal = journal_at(tmp_path)
    journal.roles([Role.ROLLOUT, Role.ROLLOUT], 8)
    for roles in ([Role.LEAVING, Role.ROLLOUT], [Role.TRAIN, Role.ROLLOUT]):
        journal.roles(roles, 4)
    write_steps(journal, range(1, 6))
    journal.close()
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 6, "rew')  # killed in the middle of a line

    resumed = journal_at(tmp_path, resumed_step=3)
    write_steps(resumed, range(4, 8))
    summary = resumed.summary(STATUS)
    resumed.close()
    records = report.read_lines(tmp_path / "metrics.jsonl")
    assert [record["step"] for record in records] == list(range(1, 8))
    assert summary["steps"] == 7 and summary["role_switches"] == 1
    assert summary["rerouted_calls"] == 4 and summary["harness_errors"] == 2, (
        "counts go on from the last record kept"
    )
    assert summary["reward_first5"] == pytest.approx(0.3) and summary[
        "reward_last5"
    ] == pytest.approx(0.5)
    assert list((tmp_path / "tensorboard").iterdir())


@pytest.mark.parametrize(
    ("first", "last", "expected"),
    [(0.1, 0.4, True), (0.3, 0.55, False), (0.05, 0.2, False), (0.2, 0.4, True)],
)
def test_learning_means_twice_the_reward_and_a_fifth_more(first, last, expected):
    assert report.learnt({"reward_first5": first, "reward_last5": last}) is expected


def finished_run(path: Path, last: float) -> Path:
    journal = journal_at(path)
    for roles in ([Role.ROLLOUT], [Role.LEAVING], [Role.TRAIN], [Role.RETURNING], [Role.ROLLOUT]):
        journal.roles(roles, 3)
        journal.waterlevel((5, 5, 2))
    write_steps(journal, range(1, 4))
    summary = journal.summary(STATUS) | {"reward_first5": 0.1, "reward_last5": last}
    journal.close()
    (path / "summary.json").write_text(json.dumps(summary))
    return path


@pytest.mark.parametrize(
    ("expect", "last", "status"),
    [("rise", 0.9, 0), ("rise", 0.1, 1), ("flat", 0.1, 0), ("flat", 0.9, 1)],
)
def test_the_report_says_whether_the_run_did_as_expected(
    tmp_path: Path, capsys, expect, last, status
):
    run = finished_run(tmp_path, last)
    assert report.main([str(run), "--label", "demo", "--expect", expect]) == status
    line = capsys.readouterr().out.splitlines()[-1]
    assert line.startswith("demo: steps=3 reward_first5=0.1000 reward_last5=")
    assert line.endswith("role_switches=2 rerouted_calls=2 lost_calls=0 harness_errors=1")
    for name in ("timeline.png", "reward.png"):
        assert (run / name).read_bytes().startswith(b"\x89PNG")


def test_a_report_of_no_run_is_refused(tmp_path: Path, capsys):
    assert report.main([str(tmp_path)]) == 2
    assert "has not ended well" in capsys.readouterr().err
