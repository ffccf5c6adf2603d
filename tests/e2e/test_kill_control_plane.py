"""Signal 9 to the control plane at random moments of a load: nothing that was acknowledged is
lost."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import random
import signal
import sqlite3
import sys
import time
from multiprocessing.synchronize import Event
from pathlib import Path

import pytest
import uvicorn

from gyre_megatron.config.rollout import HarnessConfig, RolloutConfig
from gyre_megatron.engines.router import Router
from gyre_megatron.harness.runner import HarnessContext, end_orphaned_harnesses, run_execution
from gyre_megatron.harness.tasks import EvaluatorSpec, Task, TaskSet
from gyre_megatron.proxy.app import create_proxy_app
from gyre_megatron.text.renderer import Renderer
from gyre_megatron.trajectory.store import TrajectoryStore
from tests.support.checkpoints import make_checkpoint
from tests.support.engine_processes import EngineProcess, free_port

pytestmark = pytest.mark.e2e

NUM_KILLS = 50
NUM_EXECUTIONS = 24
HARNESS = Path(__file__).parents[1] / "support" / "acking_harness.py"


def control_plane(folder: Path, engine_url: str, port: int, ready: Event) -> None:
    """What the runtime does at start, and then the executions: until all have finished."""
    asyncio.run(_control_plane(folder, engine_url, port, ready))


async def _control_plane(folder: Path, engine_url: str, port: int, ready: Event) -> None:
    store = TrajectoryStore(folder / "store.db")
    end_orphaned_harnesses(store)
    store.requeue_running()
    store.add_group("g", {"task": "t"}, NUM_EXECUTIONS, 0)
    config = RolloutConfig(
        harness=HarnessConfig(environment={"ACKS": str(folder / "acks")}, max_concurrent=4)
    )
    router = Router(config.router)
    router.add_engine(0, engine_url, 16)
    renderer = Renderer.from_checkpoint(folder / "checkpoint", config.proxy)
    app = create_proxy_app(store, router, renderer, config)
    server = uvicorn.Server(uvicorn.Config(app, port=port, log_level="warning", lifespan="off"))
    serving = asyncio.create_task(server.serve())
    command = f"{sys.executable} -S -E {HARNESS}"
    task = Task(
        name="t",
        prompt="p",
        command=command,
        evaluator=EvaluatorSpec(kind="python", function="os:fspath"),
    )
    task = task.model_copy(update={"directory": folder, "evaluator": _scorer(folder)})
    context = HarnessContext(store, TaskSet([task]), config, f"http://127.0.0.1:{port}")
    waiting = [e.execution_id for e in store.executions(states=["queued"])]
    limit = asyncio.Semaphore(config.harness.max_concurrent)

    async def one(execution_id: str) -> None:
        async with limit:
            await run_execution(context, execution_id)

    ready.set()
    await asyncio.gather(*map(one, waiting))
    server.should_exit = True
    await serving
    store.close()


def _scorer(folder: Path) -> EvaluatorSpec:
    (folder / "score.py").write_text(
        "def score(work, task):\n    return float((work / 'done.txt').exists())\n"
    )
    return EvaluatorSpec(kind="python", function="score.py:score")


def test_nothing_acknowledged_is_lost(tmp_path: Path) -> None:
    make_checkpoint(tmp_path / "checkpoint")
    engine = EngineProcess(version=3, token_delay_s=0.002)
    engine.start()
    try:
        engine.wait_ready()
        port, rng = free_port(), random.Random(11)
        running_at_kill: dict[str, int] = {}
        kills = 0
        while kills < NUM_KILLS:
            process, ready = _start(tmp_path, engine.url, port)
            if rng.random() < 0.85:  # else it is killed while it starts
                ready.wait(60)
            time.sleep(rng.uniform(0.0, 0.5))
            assert process.is_alive() or process.exitcode == 0, "the control plane died by itself"
            if not process.is_alive():
                _requeue_some(tmp_path)
                continue
            os.kill(process.pid, signal.SIGKILL)
            process.join()
            kills += 1
            for execution_id in _check_store(tmp_path):
                running_at_kill[execution_id] = running_at_kill.get(execution_id, 0) + 1
        last, _ = _start(tmp_path, engine.url, port)
        last.join(200)
        assert last.exitcode == 0
        _check_end(tmp_path, running_at_kill)
    finally:
        engine.kill()


def _start(
    folder: Path, engine_url: str, port: int
) -> tuple[multiprocessing.process.BaseProcess, Event]:
    context = multiprocessing.get_context("fork")
    ready = context.Event()
    process = context.Process(target=control_plane, args=(folder, engine_url, port, ready))
    process.start()
    return process, ready


def _requeue_some(folder: Path) -> None:
    """All executions have finished before the last kill: more work, so that every kill hits a
    load."""
    store = TrajectoryStore(folder / "store.db")
    store.add_group(f"more{len(store.groups())}", {"task": "t"}, NUM_EXECUTIONS, 0)
    store.close()


def _check_store(folder: Path) -> list[str]:
    """Whole rows only, every acknowledged answer among them; returns the executions that were
    running."""
    store = TrajectoryStore(folder / "store.db", read_only=True)
    acks = folder / "acks"
    acknowledged = set(acks.read_text().split()) if acks.exists() else set()
    stored: set[str] = set()
    for execution in store.executions():
        for attempt in range(1, execution.attempt + 1):
            nodes = {node.node_id: node for node in store.nodes(execution.execution_id, attempt)}
            for call in store.calls(execution.execution_id, attempt):
                stored.add(f"msg_{call.call_id}")
                node = nodes[call.node_id]
                assert (
                    len(node.logprobs) == call.num_output_tokens == sum(n for _, n in node.versions)
                )
                assert node.start + node.num_context == call.num_prompt_tokens
            assert all(node.parent in nodes or node.parent == -1 for node in nodes.values())
    assert acknowledged <= stored
    running = [execution.execution_id for execution in store.executions(states=["running"])]
    store.close()
    with sqlite3.connect(folder / "store.db") as connection:
        assert connection.execute("PRAGMA integrity_check").fetchone() == ("ok",)
    return running


def _check_end(folder: Path, running_at_kill: dict[str, int]) -> None:
    assert _check_store(folder) == []
    store = TrajectoryStore(folder / "store.db", read_only=True)
    for execution in store.executions():
        assert execution.state == "finished" and execution.outcome.reward == 1.0, execution
        assert execution.attempt == 1 + running_at_kill.get(execution.execution_id, 0)
        assert len(store.calls(execution.execution_id)) == 6
    assert sum(running_at_kill.values()) > 20
    store.close()
