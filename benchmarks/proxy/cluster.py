"""One measurement's processes: the real proxy with its store, and an engine that answers at once.

At most two of them are busy at a time, so that two cores are enough. One call after another is
timed with the engine in a process of its own: sender and receiver of a prompt then overlap in the
same way with and without the proxy. Under load it runs in the client's process instead, where it
takes no third core.
"""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing
import socket
import tempfile
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path

import psutil
import uvicorn

from gyre_megatron.config.rollout import RolloutConfig
from gyre_megatron.engines.router import Router
from gyre_megatron.proxy.app import create_proxy_app
from gyre_megatron.text.renderer import Renderer
from gyre_megatron.trajectory.store import TrajectoryStore
from tests.support.checkpoints import make_checkpoint
from tests.support.engine_processes import free_port
from tests.support.scripted_engine import ScriptedEngine, chain_policy

CONTEXT_LENGTH = 2_000_000
OUTPUT_TOKENS = 32
STARTUP_TIMEOUT_S = 60


@dataclass(frozen=True)
class Cluster:
    """Addresses and files of one measurement."""

    proxy_url: str
    engine_url: str
    folder: Path
    proxy_pid: int

    def renderer(self) -> Renderer:
        """The proxy's renderer, for work done outside of it."""
        return Renderer.from_checkpoint(self.folder / "checkpoint", RolloutConfig().proxy)

    def proxy_rss_mib(self) -> float:
        """Resident memory of the proxy."""
        return psutil.Process(self.proxy_pid).memory_info().rss / 2**20

    def proxy_cpu_seconds(self) -> float:
        """CPU time of the proxy so far: unlike latency it does not count waiting for a core."""
        times = psutil.Process(self.proxy_pid).cpu_times()
        return times.user + times.system

    def stored_bytes_per_token(self) -> float:
        """Size of the store over the tokens in its nodes."""
        store = TrajectoryStore(self.folder / "store.db")
        ids = [execution.execution_id for execution in store.executions()]
        num_tokens = sum(len(node.token_ids) for i in ids for node in store.nodes(i))
        store.checkpoint()
        store.close()
        return (self.folder / "store.db").stat().st_size / num_tokens


@contextlib.asynccontextmanager
async def running_cluster(*, engine_in_process: bool) -> AsyncIterator[Cluster]:
    """A fresh proxy process, store and engine until the block ends."""
    with tempfile.TemporaryDirectory(prefix="gyre-bench-") as name:
        folder = Path(name)
        make_checkpoint(folder / "checkpoint", context_length=CONTEXT_LENGTH)
        async with contextlib.AsyncExitStack() as stack:
            if engine_in_process:
                engine_url = await stack.enter_async_context(_engine())
            else:
                engine_port = free_port()
                await stack.enter_async_context(_process(_serve_engine, engine_port))
                engine_url = f"http://127.0.0.1:{engine_port}"
            port = free_port()
            proxy = await stack.enter_async_context(
                _process(_serve_proxy, port, engine_url, folder)
            )
            yield Cluster(f"http://127.0.0.1:{port}", engine_url, folder, proxy)


@contextlib.asynccontextmanager
async def _engine(port: int = 0) -> AsyncIterator[str]:
    engine = _ForgetfulEngine(chain_policy(), version=1, tokens_per_chunk=OUTPUT_TOKENS)
    await engine.start(port)
    try:
        yield engine.url
    finally:
        await engine.stop()


@contextlib.asynccontextmanager
async def _process(serve: Callable[..., None], port: int, *arguments: object) -> AsyncIterator[int]:
    """`serve(port, ...)` in a process of its own until the block ends; yields its id."""
    context = multiprocessing.get_context("spawn")
    process = context.Process(target=serve, args=(port, *arguments), daemon=True)
    process.start()
    try:
        await _wait_for(port)
        assert process.pid is not None  # it was started
        yield process.pid
    finally:
        process.terminate()
        process.join(10)


def _serve_engine(port: int) -> None:
    async def main() -> None:
        async with _engine(port):
            await asyncio.Event().wait()

    asyncio.run(main())


class _ForgetfulEngine(ScriptedEngine):
    """Keeps no notes of what it was asked: they would grow by the whole history each call."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.prompts = _Nothing()
        self.outputs = _Nothing()


class _Nothing(list):
    def append(self, item: object) -> None:
        """Drop it."""


def _serve_proxy(port: int, engine_url: str, folder: Path) -> None:
    """The real proxy with its store, as the runtime composes it, defaults as shipped."""

    async def main() -> None:
        config = RolloutConfig()
        store = TrajectoryStore(folder / "store.db")
        router = Router(config.router)
        router.add_engine(0, engine_url, 256)
        renderer = Renderer.from_checkpoint(folder / "checkpoint", config.proxy)
        app = create_proxy_app(store, router, renderer, config)

        @app.post("/bench/start/{group}")
        async def start(group: str) -> dict[str, str]:
            execution_id = store.add_group(group, {"task": "bench"}, 1, 0)[0]
            return {"execution": execution_id, "token": store.start_execution(execution_id)}

        server = uvicorn.Config(
            app, port=port, log_level="warning", lifespan="off", timeout_keep_alive=600
        )
        await uvicorn.Server(server).serve()

    asyncio.run(main())


async def _wait_for(port: int) -> None:
    deadline = time.monotonic() + STARTUP_TIMEOUT_S
    while time.monotonic() < deadline:
        with socket.socket() as sock:
            if sock.connect_ex(("127.0.0.1", port)) == 0:
                return
        await asyncio.sleep(0.05)
    raise TimeoutError(f"nothing listens on port {port} after {STARTUP_TIMEOUT_S} s")
