"""What the proxy adds to a call: `python benchmarks/bench_proxy.py --json results.json`.

An engine that answers at once stands in for a model, so what is measured is the way there and back.
`overhead` is the time of a call through the proxy minus the time of the same ids sent straight to
the engine's /generate, both measured in turns. A round starts afresh: proxy process, store, engine;
figures are medians and ranges over rounds.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import aiohttp
import numpy as np

from benchmarks import common
from benchmarks.proxy.cluster import Cluster, running_cluster
from benchmarks.proxy.talk import TEXT, Talk

TOKENS_PER_MESSAGE = 700  # a typical tool result
LOAD_HISTORY_TOKENS = 8_000
RETOKENISE_EVERY = 10  # calls: it takes longer than all else in a round


async def measure_history(
    cluster: Cluster, history_tokens: int, num_calls: int
) -> dict[str, float]:
    """Overhead of a call late in one long execution, in milliseconds."""
    renderer = cluster.renderer()
    tokens_per_text = len(renderer.tokens.encode(TEXT))
    timeout = aiohttp.ClientTimeout(total=300)
    async with aiohttp.ClientSession(timeout=timeout) as session:
        talk = await Talk.begin(session, cluster, f"h{history_tokens}")
        talk.fill(history_tokens, TOKENS_PER_MESSAGE, tokens_per_text)
        await talk.call()  # the whole history is new to the proxy once
        through: list[float] = []
        direct: list[float] = []
        encodings: list[float] = []
        cpu_before = cluster.proxy_cpu_seconds()
        for index in range(num_calls):
            through.append(await talk.call())
            direct.append(await talk.direct())
            if index % RETOKENISE_EVERY == 0:
                encodings.append(talk.retokenise(renderer))
        cpu_seconds = cluster.proxy_cpu_seconds() - cpu_before
    # Paired with the direct call right after it: both have met the same load of the machine.
    overhead = [1e3 * (a - b) for a, b in zip(through, direct, strict=True)]
    encoding = 1e3 * statistics.median(encodings)
    return {
        "history_tokens": talk.num_tokens,
        "overhead_ms_p50": statistics.median(overhead),
        "overhead_ms_p99": float(np.percentile(overhead, 99)),
        "cpu_ms_per_call": 1e3 * cpu_seconds / num_calls,
        "direct_ms_p50": 1e3 * statistics.median(direct),
        "retokenise_ms": encoding,
        "times_cheaper_than_retokenising": encoding / statistics.median(overhead),
    }


async def measure_load(cluster: Cluster, concurrency: int, seconds: float) -> dict[str, float]:
    """Many executions calling at once, with histories that grow."""
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        talks = [await Talk.begin(session, cluster, f"c{i}") for i in range(concurrency)]
        for talk in talks:
            talk.fill(LOAD_HISTORY_TOKENS, 400, 20)
        started = time.perf_counter()
        deadline = started + seconds
        num_calls = 0

        async def run(talk: Talk) -> None:
            nonlocal num_calls
            while time.perf_counter() < deadline:
                await talk.call()
                num_calls += 1

        await asyncio.gather(*map(run, talks))
        elapsed = time.perf_counter() - started
    return {"calls_per_second": num_calls / elapsed}


async def one_round(options: argparse.Namespace) -> dict[str, Any]:
    """All measurements on fresh clusters."""
    histories = {}
    async with running_cluster(engine_in_process=False) as cluster:
        for tokens in options.history:
            histories[str(tokens)] = await measure_history(cluster, tokens, options.calls)
    async with running_cluster(engine_in_process=True) as cluster:
        load = await measure_load(cluster, options.concurrency, options.seconds)
        rss_mib = cluster.proxy_rss_mib()
        stored = cluster.stored_bytes_per_token()
    return {"histories": histories, **load, "rss_mib": rss_mib, "bytes_per_token_stored": stored}


def summarise(rounds: list[dict[str, Any]]) -> dict[str, Any]:
    """Each figure as its spread over rounds; the longest history's also at the top."""
    figures = _spreads(rounds)
    longest = max(figures["histories"].values(), key=lambda row: row["history_tokens"]["median"])
    return longest | figures


def _spreads(rounds: list[Any]) -> Any:
    if isinstance(rounds[0], dict):
        return {key: _spreads([one[key] for one in rounds]) for key in rounds[0]}
    return common.spread(rounds)


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="where to write the result")
    parser.add_argument("--history", type=int, nargs="+", default=[10_000, 100_000, 700_000])
    parser.add_argument("--rounds", type=int, default=5, help="fresh clusters")
    parser.add_argument("--calls", type=int, default=40, help="calls per history and round")
    parser.add_argument("--concurrency", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=10.0, help="of load per round")
    return parser.parse_args()


def main() -> None:
    """Parse, measure, print, write."""
    options = parse()
    record = common.environment()
    rounds = [asyncio.run(one_round(options)) for _ in range(options.rounds)]
    figures = summarise(rounds)
    common.show(figures)
    if options.json:
        common.write_results(options.json, record, vars(options), figures)


if __name__ == "__main__":
    main()
