"""What the proxy adds to a call: `python benchmarks/bench_proxy.py --json results.json`.

A scripted engine answers at once, so what is measured is the way there and back. `overhead` is the
time of a call through the proxy minus the time of the same ids sent straight to the engine's
/generate, both measured alternately in this run. The proxy, the engine and the client are processes
of their own.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import platform
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import orjson
import psutil
import uvicorn
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from gyre_megatron.config.rollout import RolloutConfig
from gyre_megatron.engines.router import Router
from gyre_megatron.proxy.app import create_proxy_app
from gyre_megatron.text.renderer import Renderer
from gyre_megatron.trajectory.store import TrajectoryStore
from tests.support.checkpoints import make_checkpoint
from tests.support.engine_processes import free_port
from tests.support.scripted_engine import ScriptedEngine, chain_policy

CONTEXT = 2_000_000
OUTPUT_TOKENS = 32
TEXT = "def area(width, height):\n    return width * height  # the rectangle's\n"
TARGETS_MS = {100_000: 8.0, 700_000: 40.0}


@dataclass(frozen=True)
class Cluster:
    """Addresses of the processes of one measurement."""

    proxy: str
    engine: str
    folder: Path
    proxy_pid: int


def serve_engine(port: int) -> None:
    """An engine that answers OUTPUT_TOKENS tokens in one piece."""

    async def main() -> None:
        engine = ScriptedEngine(chain_policy(), version=1, tokens_per_chunk=OUTPUT_TOKENS)
        engine.prompts = Forgetful()
        engine.outputs = Forgetful()
        await engine.start(port)
        await asyncio.Event().wait()

    asyncio.run(main())


class Forgetful(list):
    """The engine's notes are not wanted here."""

    def append(self, item: object) -> None:
        """Drop it."""


def serve_proxy(port: int, engine: str, folder: Path) -> None:
    """The real proxy with its store, as the runtime composes it."""

    async def main() -> None:
        config = RolloutConfig()
        store = TrajectoryStore(folder / "store.db")
        router = Router(config.router)
        router.add_engine(0, engine, 256)
        renderer = Renderer.from_checkpoint(folder / "checkpoint", config.proxy)
        app = create_proxy_app(store, router, renderer, config)

        @app.post("/bench/start/{group}")
        async def start(group: str) -> dict[str, str]:
            execution_id = store.add_group(group, {"task": "bench"}, 1, 0)[0]
            return {"execution": execution_id, "token": store.start_execution(execution_id)}

        await uvicorn.Server(
            uvicorn.Config(app, port=port, log_level="warning", lifespan="off")
        ).serve()

    asyncio.run(main())


class Talk:
    """A conversation that grows by one exchange per call."""

    def __init__(self, session: aiohttp.ClientSession, cluster: Cluster, token: str) -> None:
        self._session, self._cluster, self._token = session, cluster, token
        self.messages: list[dict[str, Any]] = []
        self.num_tokens = 0

    def fill(self, num_tokens: int, tokens_per_message: int, tokens_per_text: float) -> None:
        """A history of tool results, as an agent's is, made by the harness."""
        repeats = max(1, int(tokens_per_message / tokens_per_text))
        for index in range(num_tokens // tokens_per_message):
            role = "assistant" if index % 2 else "user"
            self.messages.append({"role": role, "content": f"step {index}\n" + TEXT * repeats})
        if self.messages[-1]["role"] == "assistant":
            self.messages.append({"role": "user", "content": "go on"})

    async def call(self) -> float:
        """One call through the proxy; returns its seconds, body encoding excluded."""
        body = orjson.dumps({"model": "m", "max_tokens": OUTPUT_TOKENS, "messages": self.messages})
        headers = {"x-api-key": self._token, "content-type": "application/json"}
        started = time.perf_counter()
        async with self._session.post(
            f"{self._cluster.proxy}/v1/messages", data=body, headers=headers
        ) as response:
            answer = orjson.loads(await response.read())
            elapsed = time.perf_counter() - started
            assert response.status == 200, answer
        self.num_tokens = answer["usage"]["input_tokens"]
        self.messages += [{"role": "assistant", "content": answer["content"]}]
        self.messages += [{"role": "user", "content": "result: " + TEXT * 4}]
        return elapsed

    async def direct(self, num_tokens: int) -> float:
        """As many ids sent straight to the engine, read to the end; body encoding excluded here
        too."""
        ids = np.full(num_tokens, 300, np.int32)
        sampling = {"temperature": 1.0, "max_new_tokens": OUTPUT_TOKENS}
        body = {
            "rid": "bench",
            "stream": True,
            "return_logprob": True,
            "sampling_params": sampling,
            "input_ids": ids,
        }
        data = orjson.dumps(body, option=orjson.OPT_SERIALIZE_NUMPY)
        started = time.perf_counter()
        async with self._session.post(f"{self._cluster.engine}/generate", data=data) as response:
            await response.read()
        return time.perf_counter() - started


async def measure_history(cluster: Cluster, history_tokens: int, rounds: int) -> dict[str, float]:
    """Overhead of a call late in one long execution."""
    renderer = Renderer.from_checkpoint(cluster.folder / "checkpoint", RolloutConfig().proxy)
    per_text = len(renderer.tokens.encode(TEXT))
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=300)) as session:
        talk = Talk(session, cluster, await _token(session, cluster, f"h{history_tokens}"))
        talk.fill(history_tokens, 700, per_text)
        await talk.call()
        through, direct = [], []
        for _ in range(rounds):
            through.append(await talk.call())
            direct.append(await talk.direct(talk.num_tokens))
        retokenise = _retokenise(renderer, talk.messages)
    base = statistics.median(direct)
    overhead = sorted((seconds - base) * 1e3 for seconds in through)
    return {
        "history_tokens": talk.num_tokens,
        "overhead_ms_p50": statistics.median(overhead),
        "overhead_ms_p99": overhead[min(len(overhead) - 1, int(0.99 * len(overhead)))],
        "overhead_ms_min": overhead[0],
        "direct_ms_p50": base * 1e3,
        "retokenise_ms": retokenise * 1e3,
        "times_cheaper_than_retokenising": retokenise
        * 1e3
        / max(statistics.median(overhead), 1e-9),
    }


def _retokenise(renderer: Renderer, messages: list[dict[str, Any]]) -> float:
    """What a proxy without token-in pays: render and encode the whole history (best of three)."""
    flat = [
        {**m, "content": m["content"] if isinstance(m["content"], str) else ""} for m in messages
    ]
    times = []
    for _ in range(3):
        started = time.perf_counter()
        renderer.tokens.encode(renderer.template.render(flat, generation_prompt=True))
        times.append(time.perf_counter() - started)
    return min(times)


async def measure_load(cluster: Cluster, concurrency: int, seconds: float) -> dict[str, float]:
    """Many executions calling at once, with histories that grow."""
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        talks = [
            Talk(session, cluster, await _token(session, cluster, f"c{i}"))
            for i in range(concurrency)
        ]
        for talk in talks:
            talk.fill(8_000, 400, 20)
        deadline, times = time.perf_counter() + seconds, []

        async def run(talk: Talk) -> None:
            while time.perf_counter() < deadline:
                times.append(await talk.call())

        started = time.perf_counter()
        await asyncio.gather(*map(run, talks))
        elapsed = time.perf_counter() - started
    return {
        "concurrency": concurrency,
        "calls_per_second": len(times) / elapsed,
        "num_calls": len(times),
    }


async def _token(session: aiohttp.ClientSession, cluster: Cluster, group: str) -> str:
    async with session.post(f"{cluster.proxy}/bench/start/{group}") as response:
        return (await response.json())["token"]


def stored_bytes_per_token(folder: Path) -> float:
    """Size of the store over the tokens in its nodes."""
    store = TrajectoryStore(folder / "store.db")
    tokens = sum(len(n.token_ids) for e in store.executions() for n in store.nodes(e.execution_id))
    store.checkpoint()
    store.close()
    return (folder / "store.db").stat().st_size / tokens


def _wait(url: str) -> None:
    port = int(url.rsplit(":", 1)[1])
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        with socket.socket() as sock:
            if sock.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.05)
    raise TimeoutError(f"nothing listens on {url}")


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """All measurements on one cluster."""
    context = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory(prefix="gyre-bench-") as name:
        folder = Path(name)
        make_checkpoint(folder / "checkpoint", context_length=CONTEXT)
        engine_port, proxy_port = free_port(), free_port()
        engine_url = f"http://127.0.0.1:{engine_port}"
        engine = context.Process(target=serve_engine, args=(engine_port,), daemon=True)
        proxy = context.Process(
            target=serve_proxy, args=(proxy_port, engine_url, folder), daemon=True
        )
        engine.start()
        proxy.start()
        try:
            cluster = Cluster(f"http://127.0.0.1:{proxy_port}", engine_url, folder, proxy.pid or 0)
            _wait(cluster.engine)
            _wait(cluster.proxy)
            histories = [
                asyncio.run(measure_history(cluster, h, arguments.rounds))
                for h in arguments.history
            ]
            load = asyncio.run(measure_load(cluster, arguments.concurrency, arguments.seconds))
            rss = psutil.Process(cluster.proxy_pid).memory_info().rss / 2**20
        finally:
            for process in (proxy, engine):
                process.terminate()
                process.join(10)
        return {
            "histories": histories,
            **load,
            "rss_mib": rss,
            "bytes_per_token_stored": stored_bytes_per_token(folder),
        }


def summary(result: dict[str, Any], arguments: argparse.Namespace) -> dict[str, Any]:
    """The flat keys that are compared between runs, the longest history first among them."""
    longest = result["histories"][-1]
    commit = subprocess.run(
        ["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False
    ).stdout.strip()
    return {
        "overhead_ms_p50": longest["overhead_ms_p50"],
        "overhead_ms_p99": longest["overhead_ms_p99"],
        "history_tokens": longest["history_tokens"],
        **{
            key: result[key]
            for key in ("concurrency", "calls_per_second", "rss_mib", "bytes_per_token_stored")
        },
        "histories": result["histories"],
        "config": {name: value for name, value in vars(arguments).items() if name != "json"},
        "commit": commit,
        "machine": f"{platform.processor() or platform.machine()}, {psutil.cpu_count()} cores",
        "python": platform.python_version(),
    }


def show(result: dict[str, Any]) -> None:
    """The table a person reads."""
    table = Table("history", "overhead p50", "p99", "direct", "re-tokenise", "cheaper", "target")
    for row in result["histories"]:
        target = next(
            (
                f"<= {ms:g} ms"
                for tokens, ms in TARGETS_MS.items()
                if row["history_tokens"] >= tokens
            ),
            "",
        )
        target = "<= 40 ms" if row["history_tokens"] >= 650_000 else target
        keys = ("overhead_ms_p50", "overhead_ms_p99", "direct_ms_p50", "retokenise_ms")
        cheaper = f"{row['times_cheaper_than_retokenising']:.0f}x"
        table.add_row(
            f"{row['history_tokens']:,}", *(f"{row[key]:.1f} ms" for key in keys), cheaper, target
        )
    console = Console()
    console.print(table)
    console.print(
        f"{result['concurrency']} executions at once: {result['calls_per_second']:.0f} calls/s; "
        "proxy "
        f"{result['rss_mib']:.0f} MiB; {result['bytes_per_token_stored']:.2f} bytes stored per "
        "token"
    )


def main() -> None:
    """Parse, measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="where to write the result")
    parser.add_argument("--history", type=int, nargs="+", default=[10_000, 100_000, 700_000])
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--concurrency", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=10.0)
    arguments = parser.parse_args()
    result = summary(run(arguments), arguments)
    show(result)
    if arguments.json:
        arguments.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
