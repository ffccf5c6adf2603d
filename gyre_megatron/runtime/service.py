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
import sys
from dataclasses import dataclass
from pathlib import Path

from fastapi import FastAPI

from gyre_megatron.config.loader import GyreConfig, load_config
from gyre_megatron.config.model import Architecture
from gyre_megatron.engines.router import Router
from gyre_megatron.errors import GyreError
from gyre_megatron.harness.extensions import load_extensions as load_harness_extensions
from gyre_megatron.harness.runner import HarnessContext, end_orphaned_harnesses
from gyre_megatron.harness.tasks import TaskSet
from gyre_megatron.observe import plots
from gyre_megatron.observe.journal import Journal
from gyre_megatron.processes import die_with_parent
from gyre_megatron.proxy.app import create_proxy_app
from gyre_megatron.proxy.http_server import listen, serving
from gyre_megatron.runtime.actions import RunParts
from gyre_megatron.runtime.batch import BatchBuilder
from gyre_megatron.runtime.cell_board import CellBoard
from gyre_megatron.runtime.cell_routes import add_cell_routes
from gyre_megatron.runtime.checks import check_inputs, limits_of
from gyre_megatron.runtime.control_plane import ControlPlane
from gyre_megatron.runtime.executions import ExecutionPool
from gyre_megatron.runtime.measurements import Measurements
from gyre_megatron.runtime.micro_steps import MicroStepQueue
from gyre_megatron.runtime.protocol import Report
from gyre_megatron.runtime.run_directory import RunDirectory
from gyre_megatron.runtime.run_state import RunState
from gyre_megatron.text.renderer import Renderer
from gyre_megatron.trajectory.cost import linear_cost
from gyre_megatron.trajectory.store import TrajectoryStore

CELLS_END_S = 15.0


@dataclass(frozen=True)
class ServiceSpec:
    """What the control plane's process is started with.

    Attributes:
        checkpoint: the model's Hugging Face directory, for the tokenizer.
        ranks_per_cell: ranks in a cell.
        resume: go on with the run in the run directory.
    """

    config: GyreConfig
    checkpoint: Path
    ranks_per_cell: int
    resume: bool


async def serve(spec: ServiceSpec) -> None:
    """Run the control plane until the run ends or fails.

    Raises:
        GyreError: the run failed; every cell has been told to stop.
    """
    config = spec.config
    # Whatever a user can get wrong comes before the first file: a run that never began must not
    # look like one that can be resumed.
    check_inputs(config)
    tasks = load_harness_extensions(config.rollout.harness).tasks
    renderer = Renderer.from_checkpoint(spec.checkpoint, config.rollout.proxy)
    async with contextlib.AsyncExitStack() as closing:
        listener = listen(config.cluster.host, config.cluster.port, "cluster.port")
        closing.callback(listener.close)
        url = f"http://{config.cluster.host}:{listener.getsockname()[1]}"
        directory = RunDirectory(config.run.root / config.run.name)
        directory.open(spec.resume)
        control, app = _compose(spec, tasks, renderer, directory, url, closing)
        control.check()
        directory.write_json(directory.config_file, config.model_dump(mode="json"))
        token = secrets.token_urlsafe(24)
        add_cell_routes(app, control, token)
        async with serving(app, listener):
            endpoint = {"url": url, "token": token, "pid": os.getpid()}
            directory.write_json(directory.endpoint_file, endpoint, private=True)
            closing.callback(directory.endpoint_file.unlink, missing_ok=True)
            print(
                f"run {directory.path}: status at {url}/status; waiting for "
                f"{config.cluster.num_cells} cells to start their SGLang servers and Megatron "
                "trainers",
                flush=True,
            )
            await _run_to_the_end(control)
        directory.write_json(directory.summary_file, control.parts.journal.summary())
    await asyncio.to_thread(plots.draw, directory)


def _compose(
    spec: ServiceSpec,
    tasks: TaskSet,
    renderer: Renderer,
    directory: RunDirectory,
    url: str,
    closing: contextlib.AsyncExitStack,
) -> tuple[ControlPlane, FastAPI]:
    """Build every part of the run and connect them.

    Args:
        url: where harnesses and cells reach the control plane.
        closing: what must be closed at the end is added here.
    """
    config = spec.config
    architecture = Architecture.from_checkpoint(spec.checkpoint, config.model.family)
    latest = directory.latest_checkpoint() if spec.resume else None
    trained_steps = latest.step if latest else 0
    store = TrajectoryStore(directory.store_file)
    closing.callback(store.close)
    directory.summary_file.unlink(missing_ok=True)  # that of the run which is resumed
    if spec.resume:
        # Orphans first: a harness of the old process must not call on behalf of an execution that
        # is queued again.
        end_orphaned_harnesses(store)
        store.rollback_to_step(trained_steps)
        store.requeue_running()
    journal = Journal(directory, config.run.num_steps, trained_steps, config.run.tensorboard)
    closing.callback(journal.close)
    router = Router(config.rollout.router, on_count=journal.timeline.count)
    closing.push_async_callback(router.close)
    changed = asyncio.Event()
    run = RunState.at_start(config.cluster.num_cells, trained_steps)
    micro_steps = MicroStepQueue()
    replicas = spec.ranks_per_cell // config.training.min_ranks
    measurements = Measurements()
    batch = BatchBuilder(store, config, micro_steps, replicas, linear_cost(architecture))

    def micro_step_trained(cell: int, report: Report) -> None:
        batch.micro_step_trained(cell, report.metrics, report.seconds)
        measurements.micro_step(report.seconds)
        changed.set()

    cells = CellBoard(run, micro_steps, config.cluster, micro_step_trained)
    context = HarnessContext(store, tasks, config.rollout, url)
    executions = ExecutionPool(context, journal.timeline.count, changed.set, measurements)
    router.on_leg_ended = measurements.call_ended
    parts = RunParts(
        config, run, directory, store, tasks, router, cells, batch, journal, measurements
    )
    control = ControlPlane(parts, executions, micro_steps, changed)
    return control, create_proxy_app(store, router, renderer, config.rollout)


async def _run_to_the_end(control: ControlPlane) -> None:
    reason = ""
    try:
        await control.run()
    except BaseException as error:
        reason = str(error) or type(error).__name__
        raise
    finally:
        await control.stop(reason)
        await control.parts.cells.all_told(CELLS_END_S)


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
        limits = limits_of(config, arguments.checkpoint)
        for warning in limits.warnings:
            print(f"warning: {warning}", file=sys.stderr, flush=True)
        config = limits.apply(config)
        spec = ServiceSpec(config, arguments.checkpoint, arguments.ranks_per_cell, arguments.resume)
        asyncio.run(serve(spec))
    except GyreError as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
