"""The control plane's parts: micro-step queue, cell board, protocol, run directory."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import get_args

import pytest

from gyre_megatron.config.cluster import ClusterConfig
from gyre_megatron.errors import CellError, CheckpointError, RunDirectoryError
from gyre_megatron.runtime.cell_board import CellBoard
from gyre_megatron.runtime.micro_steps import MicroStepQueue
from gyre_megatron.runtime.protocol import (
    Envelope,
    Register,
    Report,
    Started,
    StartFailed,
    encode,
    encode_start,
    envelope_decoder,
    start_decoder,
)
from gyre_megatron.runtime.run_directory import RunDirectory
from gyre_megatron.runtime.run_state import RunState
from gyre_megatron.scheduler import CellRole
from gyre_megatron.scheduler.orders import (
    CellOrder,
    Checkpoint,
    FinishStep,
    Leave,
    MicroStep,
    Publish,
    Return,
    Stop,
    Sync,
    Wait,
)

R, T = CellRole.ROLLOUT, CellRole.TRAIN


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


def board_of(
    num_cells: int,
    queue: MicroStepQueue | None = None,
    order_timeout_s: float = 5.0,
    poll_s: float = 0.05,
    seen: list | None = None,
) -> tuple[CellBoard, RunState]:
    run = RunState.at_start(num_cells, trained_steps=0)
    config = ClusterConfig(order_poll_s=poll_s, collective_timeout_s=order_timeout_s / 2)
    seen = [] if seen is None else seen
    return CellBoard(run, queue or MicroStepQueue(), config, lambda *step: seen.append(step)), run


async def fetch(board: CellBoard, cell: int) -> Envelope:
    return envelope_decoder.decode(await board.next_order(cell))


def test_every_cell_gets_its_order_and_all_reports_are_awaited():
    async def scenario():
        board, _ = board_of(2)
        given = FinishStep(step=3, prefix=2, skip=False)
        orders = asyncio.create_task(board.order([0, 1], given))
        ids = set()
        for cell in (1, 0):
            envelope = await fetch(board, cell)
            assert envelope.order == given
            assert not orders.done()
            ids.add(envelope.order_id)
            board.report(cell, Report(envelope.order_id, {"x": float(cell)}, 0.1))
        assert len(ids) == 2, "each cell's order has an id of its own"
        reports = await orders
        assert {cell: r.metrics["x"] for cell, r in reports.items()} == {0: 0.0, 1: 1.0}
        assert isinstance((await fetch(board, 0)).order, Wait)

    asyncio.run(scenario())


def test_a_report_that_comes_twice_counts_once():
    async def scenario():
        queue, seen = MicroStepQueue(), []
        board, run = board_of(1, queue, seen=seen)
        ordering = asyncio.create_task(board.order([0], Return((0,), version=0)))
        envelope = await fetch(board, 0)
        for seconds in (1.0, 2.0):
            board.report(0, Report(envelope.order_id, {}, seconds))
        assert (await ordering)[0].seconds == 1.0
        run.roles[0] = T
        queue.put([[b"bin"]])
        claimed = await fetch(board, 0)
        for _ in range(2):
            board.report(0, Report(claimed.order_id, {"loss": 2.0}, 0.1))
        assert [(cell, report.metrics) for cell, report in seen] == [(0, {"loss": 2.0})]

    asyncio.run(scenario())


def test_only_cells_in_training_with_the_steps_weights_claim_micro_steps():
    async def scenario():
        queue, seen = MicroStepQueue(), []
        board, run = board_of(2, queue, seen=seen)
        queue.put([[b"bin"]])
        assert isinstance((await fetch(board, 1)).order, Wait)
        run.roles[1] = T
        run.trained_steps = 1
        assert isinstance((await fetch(board, 1)).order, Wait), "its weights are those of step 0"
        run.cell_versions[1] = 1
        envelope = await fetch(board, 1)
        assert envelope.order == MicroStep((b"bin",))
        board.report(1, Report(envelope.order_id, {"loss": 2.0}, 0.1))
        assert [(cell, report.metrics) for cell, report in seen] == [(1, {"loss": 2.0})]
        assert queue.num_open == 0

    asyncio.run(scenario())


def test_a_waiting_cell_is_woken_by_new_work():
    async def scenario():
        board, _ = board_of(1, poll_s=30.0)
        waiting = asyncio.create_task(fetch(board, 0))
        await asyncio.sleep(0.01)
        ordering = asyncio.create_task(board.order([0], Return((0,), version=1)))
        envelope = await asyncio.wait_for(waiting, 1)
        assert isinstance(envelope.order, Return)
        board.report(0, Report(envelope.order_id, {}, 0.0))
        await ordering

    asyncio.run(scenario())


def test_a_failed_or_silent_cell_fails_the_order_with_its_name():
    async def scenario():
        board, _ = board_of(2)
        ordering = asyncio.create_task(board.order([0, 1], Publish(1, ())))
        envelope = await fetch(board, 1)
        board.report(1, Report(envelope.order_id, {}, 0.0, error="TransferError: checksum"))
        with pytest.raises(CellError, match="cell 1: TransferError: checksum"):
            await ordering
        silent, _ = board_of(2, order_timeout_s=0.05)
        ordering = asyncio.create_task(silent.order([0, 1], Publish(1, ())))
        envelope = await fetch(silent, 0)
        silent.report(0, Report(envelope.order_id, {}, 0.0))
        with pytest.raises(CellError, match=r"cells \[1\] did not carry out Publish"):
            await ordering

    asyncio.run(scenario())


def test_reports_and_cells_that_do_not_exist_are_refused():
    async def scenario():
        board, _ = board_of(1)
        with pytest.raises(CellError, match="there is no cell 4"):
            board.register(4, Register("http://x", 0, 0.0))
        with pytest.raises(CellError, match="never given"):
            board.report(0, Report(99, {}, 0.0))

    asyncio.run(scenario())


ORDERS = [
    Leave((1,)),
    Return((1,), 2),
    Sync((1, 2), 3),
    MicroStep((b"x", b"")),
    FinishStep(2, 1, True),
    Publish(2, (0, 3)),
    Checkpoint(4),
    Stop("why"),
    Wait(),
]


@pytest.mark.parametrize("order", ORDERS, ids=lambda order: type(order).__name__)
def test_orders_survive_the_wire(order):
    envelope = Envelope(7, order)
    assert envelope_decoder.decode(encode(envelope)) == envelope


def test_every_order_of_a_cell_is_tried_on_the_wire():
    assert {type(order) for order in ORDERS} == set(get_args(CellOrder))


@pytest.mark.parametrize(
    "message",
    [Started("http://x", "t", 3, "/models/with\nnewline"), StartFailed("two\nlines")],
    ids=lambda message: type(message).__name__,
)
def test_the_start_of_a_run_survives_the_wire(message):
    assert start_decoder.decode(encode_start(message)) == message


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
        (directory.make_staging(step) / "weights").write_text(str(step))
        directory.commit_checkpoint(step, {"finished": step * 8}, keep=2)
    directory.make_staging(8)  # a kill while this one was being written
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


def test_a_directory_that_cannot_be_written_is_one_clear_error(tmp_path: Path):
    (tmp_path / "file").write_text("")
    with pytest.raises(RunDirectoryError, match=r"run cannot be written .*set run.root"):
        RunDirectory(tmp_path / "file" / "run").open(resume=False)


def test_the_control_planes_address_is_for_its_user_only(tmp_path: Path):
    directory = RunDirectory(tmp_path)
    directory.endpoint_file.write_text("{}")
    directory.write_json(directory.endpoint_file, {"token": "secret"}, private=True)
    assert directory.endpoint_file.stat().st_mode & 0o077 == 0
    assert json.loads(directory.endpoint_file.read_text()) == {"token": "secret"}
