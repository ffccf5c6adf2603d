"""Publishes into a real engine that is busy, that hangs at each step of the protocol, or dies: what
every rank is told is what the engine serves, and the next publish works."""

from __future__ import annotations

import os
import signal
import threading
import time

import psutil
import pytest

from tests.e2e import install_jobs
from tests.e2e.test_weights_install import SEQUENCES, TOLERANCE, Cell

pytestmark = pytest.mark.e2e
TIMEOUT_S = 6.0
STEPS = ["/pause_generation", "/begin_weight_update", "verify", "commit", "seal"]
RELEASE = "/continue_generation"
UNKNOWN = {"seal"}
"""Steps at which the engine has the new weights, but did not get to record it."""


@pytest.fixture(scope="module")
def cell(tmp_path_factory):
    """Two ranks and an engine with streams as the transport, so that parcels go to the holder."""
    folder = tmp_path_factory.mktemp("failures")
    made = Cell("dense", 1, dict(tp=2), folder, 2, timeout_s=TIMEOUT_S, transport="collective")
    yield made
    made.close()


def _schedulers(cell: Cell) -> list[int]:
    tree = psutil.Process(cell.server._process.pid).children(recursive=True)
    return [p.pid for p in tree if "scheduler" in " ".join([p.name(), *p.cmdline()])]


def _generate(cell: Cell, tokens: int, answers: list[dict]) -> threading.Thread:
    body = dict(
        input_ids=SEQUENCES[0],
        sampling_params=dict(max_new_tokens=tokens, temperature=1, ignore_eos=True),
    )
    call = threading.Thread(target=lambda: answers.append(cell.server.generate(body)))
    call.start()
    return call


def test_the_first_publish_into_a_busy_engine_waits_for_no_call(cell: Cell):
    """It once waited for every running call, and a call sent meanwhile waited with it."""
    long_answers: list[dict] = []
    long_call = _generate(cell, 1900, long_answers)
    time.sleep(1.0)
    publish = threading.Thread(target=lambda: told.extend(cell.publish(1)))
    told: list[str] = []
    publish.start()
    time.sleep(0.05)
    start = time.monotonic()
    short_answers: list[dict] = []
    _generate(cell, 3, short_answers).join(60)
    short_seconds = time.monotonic() - start
    publish.join(60)
    assert told == ["", ""]
    assert long_call.is_alive(), "the long call ended before the publish: this test shows nothing"
    assert short_seconds < TIMEOUT_S
    long_call.join(120)
    assert len(long_answers[0]["output_ids"]) == 1900
    assert len(long_answers[0]["meta_info"]["weight_versions"]) == 2
    assert cell.difference() < TOLERANCE


@pytest.mark.parametrize("step", [*STEPS, RELEASE])
def test_an_engine_that_hangs_for_a_while(cell: Cell, step: str):
    before, version = cell.served()
    pids = _schedulers(cell)
    assert pids
    cell.ranks.run(install_jobs.step)
    try:
        told = cell.ranks.run(
            install_jobs.publish_with_engine_stopped, int(version) + 1, step, pids
        )
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGCONT)
    assert told[0]["state"] == told[1]["state"] and told[0]["message"] == told[1]["message"]
    assert all(one["seconds"] < 6 * TIMEOUT_S for one in told)
    if step == RELEASE:
        assert told[0]["state"] == "committed"
    elif step in UNKNOWN:
        assert told[0]["state"] == "unknown" and told[0]["held"]
        assert "is unknown" in told[0]["message"]
    else:
        assert told[0]["state"] == "not committed"
        assert "previous weights stay in place" in told[0]["message"]
        cell.server.post("/continue_generation", {})  # it may have been deaf to ours
        assert cell.served() == (before, version)
    # What was still queued in the engine is stale: it lives, and the next publish is as any other.
    cell.server.check_alive()
    assert cell.publish(int(version) + 2) == ["", ""]
    assert cell.served()[1] == str(int(version) + 2)
    assert cell.difference() < TOLERANCE


def test_an_engine_that_cannot_resume_is_replaced_and_served_again(cell: Cell):
    cell.server.offload()
    for pid in _schedulers(cell):
        os.kill(pid, signal.SIGKILL)
    url = cell.server.url
    assert cell.server.onload()
    assert cell.server.url == url
    assert cell.difference() > TOLERANCE  # it has its checkpoint's weights
    cell.ranks.run(install_jobs.forget)
    assert cell.publish(80) == ["", ""]
    assert cell.served()[1] == "80" and cell.difference() < TOLERANCE
    cell.server.offload()
    assert not cell.server.onload()


def test_an_engine_that_dies_is_an_error_on_all_ranks(cell: Cell):
    for process in psutil.Process(cell.server._process.pid).children(recursive=True):
        process.kill()
    told = cell.publish(90)
    assert told[0] == told[1] and "version 90" in told[0]
