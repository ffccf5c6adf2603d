"""A publish without its engine: four training ranks write the next versions of two engine ranks,
over every transport, also when only some of the ranks see the engine's memory."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from gyre_megatron.config.weights import WeightsConfig
from gyre_megatron.errors import PlanError, TransferError
from gyre_megatron.weights.layout import ListedLayout
from gyre_megatron.weights.direct import add_sums
from gyre_megatron.weights.messages import SHADOW_FILE, Status
from gyre_megatron.weights.shadow import Shadow, checksums, tensor_specs
from gyre_megatron.weights.shadow_plan import ShadowPlan
from gyre_megatron.weights.transports.choose import open_transport
from tests.dist.fault_jobs import Processes, _grid, _values

N = 4
ENGINE_RANKS = 2


def _answers(layout: ListedLayout) -> list[Status]:
    """What the loader in an engine of that layout says."""
    answers = []
    for rank in range(layout.num_ranks):
        tensors = {t.key: torch.empty(t.shape, device="meta") for t in layout.tensors(rank)}
        boxes = list(layout.local_boxes(rank))
        # As SGLang has it where an expert's width does not divide well: no part of it, only zeros.
        tensors["padding"] = torch.empty(3, 5, device="meta")
        answers.append(Status(rank, 1, True, tensors=tensor_specs(tensors), local_boxes=boxes))
    return answers


def publish(kind: str, seen_by: list[int], rank: int, n: int, port: int, folder: str, pipe) -> None:
    """Two versions through one plan; answers with this rank's route and staging, and, of the shadows
    that it holds, whether they are exact and have the senders' checksums."""
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    memory = Path(folder) / ("engine" if rank in seen_by else "elsewhere")
    config = WeightsConfig(
        transport=kind, staging_mib=1, timeout_s=20, file_dir=folder, shared_memory_dir=memory
    )
    transport = open_transport(config, store, rank, n)
    source, target = _grid((n, 1), n), _grid((1, ENGINE_RANKS), ENGINE_RANKS)
    answers = _answers(target)
    plan = ShadowPlan(source, rank, answers, f"{folder}/engine", seen_by)
    have = _values(source, rank, 0)
    resharder = plan.resharder(have, transport, sums=True)
    right = []
    for version in (1, 2):
        times = resharder.run(_values(source, rank, version))
        store.set(f"sums{version}.{rank}", repr(times.sums))
        total: dict[str, int] = {}
        for peer in range(n):
            add_sums(total, eval(store.get(f"sums{version}.{peer}").decode()))
        sums = plan.sums_of_ranks(total)
        for shadow in plan.shadows:
            held = int(next(iter(shadow.tensors)).split("/")[0])
            found = {key.split("/")[1]: t for key, t in shadow.tensors.items()}
            want = _values(target, held, version)
            right.append(all(torch.equal(found[key], t) for key, t in want.items()))
            right.append(checksums(found) == sums[held] and len(sums[held]) == len(want) + 1)
        store.set(f"checked{version}.{rank}", "1")
        store.wait([f"checked{version}.{peer}" for peer in range(n)])  # before the next one is written
    pipe.send((type(transport).__name__, right, transport.peak_staging_bytes, times))
    pipe.recv()
    os._exit(0)


def _make_shadows(folder: Path) -> None:
    (folder / "engine").mkdir()
    (folder / "elsewhere").mkdir()
    for rank, answer in enumerate(_answers(_grid((1, ENGINE_RANKS), ENGINE_RANKS))):
        Shadow.create(folder / "engine" / SHADOW_FILE.format(rank=rank), answer.tensors)


@pytest.mark.parametrize(
    ("kind", "seen_by", "made", "streams"),
    [
        ("auto", [0, 1, 2, 3], "IpcTransport", False),
        ("collective", [0, 1, 2, 3], "CollectiveTransport", True),
        ("file", [0, 3], "FileTransport", True),
        ("auto", [1, 2], "CollectiveTransport", True),  # rank 0 is on another host, as it were
    ],
)
def test_shadows_are_exact_and_their_sums_complete(tmp_path, kind, seen_by, made, streams):
    _make_shadows(tmp_path)
    processes = Processes(publish, N, kind, seen_by, folder=str(tmp_path))
    try:
        answers = [processes.answer(rank, 90) for rank in range(N)]
    finally:
        processes.stop()
    assert [name for name, *_ in answers] == [made] * N
    holders = seen_by[:ENGINE_RANKS]
    for rank, (_, right, staging, times) in enumerate(answers):
        assert right == ([True] * 4 if rank in holders else [])
        if not streams:
            # straight into place: one read and one write, and no staging memory
            assert staging == 0 and times.pack == times.install == 0
            assert times.bytes_read == times.bytes_written == times.bytes_sent + times.bytes_local
    if kind == "auto" and streams:
        # those that see the memory write into it, the others send to its holders
        assert answers[0][3].pack > 0 and answers[3][3].pack > 0
        assert answers[1][3].pack == answers[2][3].pack == 0


def test_an_element_that_nobody_sends_is_refused_by_name_before_anything_is_written(tmp_path):
    _make_shadows(tmp_path)
    target = _grid((1, ENGINE_RANKS), ENGINE_RANKS)
    lacking = _grid((N, 1), N)
    lacking = ListedLayout([[t for t in tensors if t.key != "w3"] for tensors in lacking._tensors])
    with pytest.raises(PlanError, match=r"w3 -> 0/w3 on destination rank 0: no rank .* holds it"):
        ShadowPlan(lacking, 0, _answers(target), str(tmp_path / "engine"), [0, 1])
    partly = ListedLayout(_grid((N, 1), N)._tensors[:-1])  # the last rows of every tensor
    with pytest.raises(PlanError, match=r"w0 -> .*is held by nobody"):
        ShadowPlan(partly, 0, _answers(target), str(tmp_path / "engine"), [0, 1])


def test_an_engine_on_a_host_without_ranks_is_refused():
    answers = _answers(_grid((1, 2), 2))
    with pytest.raises(TransferError, match="no rank of the cell sees /nowhere"):
        ShadowPlan(_grid((N, 1), N), 0, answers, "/nowhere", [])
