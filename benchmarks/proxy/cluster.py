"""One measurement's processes: the real proxy with its store, and an engine that answers at once.

The engine runs in the client's process: while the client waits for an answer it has nothing to do,
so there are two busy processes at most and a two-core machine is not oversubscribed.
"""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing
import socket
import tempfile
import time
from collections.abc import AsyncIterator
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
async def running_cluster() -> AsyncIterator[Cluster]:
    """A fresh proxy process, store and engine until the block ends."""
    engine = _ForgetfulEngine(chain_policy(), version=1, tokens_per_chunk=OUTPUT_TOKENS)
    await engine.start()
    with tempfile.TemporaryDirectory(prefix="gyre-bench-") as name:
        folder = Path(name)
        make_checkpoint(folder / "checkpoint", context_length=CONTEXT_LENGTH)
        port = free_port()
        arguments = (port, engine.url, folder)
        context = multiprocessing.get_context("spawn")
        proxy = context.Process(target=_serve_proxy, args=arguments, daemon=True)
        proxy.start()
        try:
            await _wait_for(port)
            yield Cluster(f"http://127.0.0.1:{port}", engine.url, folder, proxy.pid or 0)
        finally:
            proxy.terminate()
            proxy.join(10)
            await engine.stop()


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

        server = uvicorn.Config(app, port=port, log_level="warning", lifespan="off")
        await uvicorn.Server(server).serve()

    asyncio.run(main())


async def _wait_for(port: int) -> None:
    deadline = time.monotonic() + STARTUP_TIMEOUT_S
    while time.monotonic() < deadline:
        with socket.socket() as sock:
            if sock.connect_ex(("127.0.0.1", port)) == 0:
                return
        await asyncio.sleep(0.05)
    raise TimeoutError(f"the proxy does not listen on port {port} after {STARTUP_TIMEOUT_S} s")
