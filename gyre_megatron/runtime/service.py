"""The control plane's process: builds the parts, serves HTTP, runs the control loop, ends cleanly.

Started by rank 0 (`control_process`); prints progress and errors to the job's output.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import logging
import os
import secrets
import signal
import socket
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import uvicorn
from fastapi import FastAPI

from gyre_megatron.config.loader import GyreConfig, load_config
from gyre_megatron.engines.router import Router
from gyre_megatron.errors import ConfigError, GyreError, RunDirectoryError
from gyre_megatron.harness.runner import end_orphaned_harnesses
from gyre_megatron.harness.tasks import TaskSet
from gyre_megatron.observe import report
from gyre_megatron.observe.journal import Journal
from gyre_megatron.processes import die_with_parent
from gyre_megatron.proxy.app import create_proxy_app
from gyre_megatron.runtime.cell_routes import add_cell_routes
from gyre_megatron.runtime.control_plane import ControlPlane
from gyre_megatron.runtime.run_directory import RunDirectory
from gyre_megatron.text.renderer import Renderer
from gyre_megatron.trajectory.store import TrajectoryStore

CELLS_END_S = 15.0


async def serve(config: GyreConfig, checkpoint: Path, ranks_per_cell: int, resume: bool) -> None:
    """Run the control plane until the run ends or fails.

    Raises:
        GyreError: the run failed; every cell has been told to stop.
    """
    directory = RunDirectory(Path(config.run.root) / config.run.name)
    directory.open(resume)
    listener = _listen(config.cluster.host, config.cluster.port)
    latest = directory.latest_checkpoint() if resume else None
    trained_steps = latest.step if latest else 0
    directory.write_json(directory.path / "config.json", config.model_dump(mode="json"))
    store = TrajectoryStore(directory.store_file)
    journal = Journal(directory, config.run.num_steps, trained_steps, config.run.tensorboard)
    router = Router(config.rollout.router)
    try:
        if resume:
            end_orphaned_harnesses(store)
            store.rollback_to_step(trained_steps)
            store.requeue_running()
        renderer = Renderer.from_checkpoint(checkpoint, config.rollout.proxy)
        if config.rollout.harness.tasks is None:
            raise ConfigError(
                "rollout.harness.tasks is not set: name a directory of tasks (each a task.yaml)"
            )
        tasks = TaskSet.load(config.rollout.harness.tasks)
        url = f"http://{config.cluster.host}:{listener.getsockname()[1]}"
        app = create_proxy_app(store, router, renderer, config.rollout)
        control = ControlPlane(
            config,
            directory,
            store,
            router,
            tasks,
            journal,
            ranks_per_cell,
            trained_steps,
            base_url=url,
        )
        token = secrets.token_urlsafe(24)
        add_cell_routes(app, control, token)
        async with _http_server(app, listener):
            directory.write_json(
                directory.endpoint_file, {"url": url, "token": token, "pid": os.getpid()}
            )
            print(
                f"run {directory.path}: status at {url}/status; waiting for "
                f"{config.cluster.num_cells} cells to start "
                "their SGLang servers and Megatron trainers",
                flush=True,
            )
            await _run_to_the_end(control)
        directory.write_json(directory.path / "summary.json", journal.summary(control.status()))
    finally:
        directory.endpoint_file.unlink(missing_ok=True)
        await router.close()
        journal.close()
        store.close()
    await asyncio.to_thread(report.draw, directory.path)


async def _run_to_the_end(control: ControlPlane) -> None:
    reason = ""
    try:
        await control.run()
    except BaseException as error:
        reason = str(error) or type(error).__name__
        raise
    finally:
        await control.executions.stop()
        await control.cells.stop(reason)
        await control.cells.all_told(CELLS_END_S)


class _Server(uvicorn.Server):
    """uvicorn that leaves signals to this process."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


@contextlib.asynccontextmanager
async def _http_server(app: FastAPI, listener: socket.socket) -> AsyncIterator[None]:
    """Serve `app` on an open socket, inside the running loop, while the block runs."""
    settings = uvicorn.Config(
        app, log_level="warning", access_log=False, lifespan="off", timeout_keep_alive=600
    )
    server = _Server(settings)
    task = asyncio.create_task(server.serve(sockets=[listener]))
    while not server.started and not task.done():
        await asyncio.sleep(0.01)
    try:
        yield
    finally:
        server.should_exit = server.force_exit = True
        await task


def _listen(host: str, port: int) -> socket.socket:
    listener = socket.socket()
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except OSError as error:
        raise RunDirectoryError(
            f"the control plane cannot listen on {host}:{port} ({error.strerror}); set "
            "cluster.port to a free port, or "
            "to 0 for any"
        ) from None
    listener.listen(1024)
    return listener


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--config", required=True)
    parser.add_argument("--set", action="append", default=[], dest="overrides")
    parser.add_argument("--checkpoint", type=Path, required=True)
    parser.add_argument("--ranks-per-cell", type=int, required=True)
    parser.add_argument("--resume", action="store_true")
    arguments = parser.parse_args(argv)
    die_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # rank 0 decides; it sends SIGTERM
    logging.basicConfig(
        level=logging.WARNING, format="%(asctime)s %(name)s %(levelname)s %(message)s"
    )
    try:
        config = load_config(arguments.config, arguments.overrides).config
        asyncio.run(serve(config, arguments.checkpoint, arguments.ranks_per_cell, arguments.resume))
    except GyreError as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
