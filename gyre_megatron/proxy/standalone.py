"""`gyre proxy`: the proxy alone, between any harness and an SGLang server that runs already.

Records one execution, token by token, into a store that `gyre trajectory` reads. Called by `gyre`;
`serve` can be called by programs. Invariant: the execution ends with the proxy, and its key with
it; nothing is trained and nothing scored.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import secrets
import shlex
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from pydantic import ValidationError

from gyre_megatron.config.base import Section, one_line
from gyre_megatron.config.rollout import RolloutConfig
from gyre_megatron.config.sources import Values, parse_override
from gyre_megatron.engines.client import EngineHttp
from gyre_megatron.engines.generate import EngineRefused
from gyre_megatron.engines.router import Router
from gyre_megatron.errors import ConfigError, EngineError
from gyre_megatron.proxy.app import create_proxy_app
from gyre_megatron.proxy.extensions import load_extensions
from gyre_megatron.proxy.http_server import listen, serving
from gyre_megatron.text.renderer import Renderer
from gyre_megatron.trajectory.records import Outcome
from gyre_megatron.trajectory.store import TrajectoryStore

DEFAULT_PORT = 8400
_CALLS_PER_ENGINE = 64  # how many calls the router gives an engine before it prefers another


@dataclass(frozen=True)
class Recording:
    """A proxy that serves, and the execution that it records.

    Attributes:
        url: Root of the proxy.
        key: Bearer token of the execution.
        context_length: Tokens of prompt and answer together.
    """

    url: str
    key: str
    execution_id: str
    model: str
    context_length: int
    dialects: tuple[str, ...]

    def exports(self) -> list[str]:
        """Lines for a shell that make harnesses use this proxy."""
        openai = f"{self.url}/v1"
        provider = f'{{name="gyre",base_url="{openai}",env_key="GYRE_KEY",wire_api="responses"}}'
        codex = f"-m {self.model} -c model_provider=gyre -c model_providers.gyre={provider}"
        lines = {
            "anthropic": [
                "# Claude Code, and other clients of Anthropic Messages",
                f"export ANTHROPIC_BASE_URL={self.url} ANTHROPIC_AUTH_TOKEN={self.key}",
                f"export ANTHROPIC_MODEL={self.model}",
                f"export CLAUDE_CODE_MAX_CONTEXT_TOKENS={self.context_length}",
                f"export CLAUDE_CODE_AUTO_COMPACT_WINDOW={self.context_length}",
            ],
            "responses": [
                "# Codex, which takes its provider from the command line or from config.toml",
                f"export GYRE_KEY={self.key}",
                f"# {shlex.join(['codex', *codex.split()])}",
            ],
            "chat": [
                "# OpenAI clients",
                f"export OPENAI_BASE_URL={openai} OPENAI_API_KEY={self.key}",
            ],
        }
        return [line for name in lines if name in self.dialects for line in ("", *lines[name])]


def _print(recording: Recording) -> None:
    print("\n".join(recording.exports()), flush=True)


async def serve(
    engine_urls: Sequence[str],
    store: Path,
    checkpoint: Path,
    *,
    host: str = "127.0.0.1",
    port: int = DEFAULT_PORT,
    config: RolloutConfig | None = None,
    model_name: str = "gyre",
    on_ready: Callable[[Recording], None] = _print,
) -> None:
    """Serve until SIGINT or SIGTERM, or until cancelled.

    Args:
        engine_urls: SGLang servers of the same weights; calls are spread over them.
        store: SQLite file that the execution is recorded into; made if missing.
        checkpoint: The model's Hugging Face directory: tokenizer, chat template and config.
        host: Address to bind; whoever reaches it and knows the key can call.
        port: 0 takes a free one.
        config: Sampling, dialects, call roles and limits.
        model_name: What /v1/models lists.
        on_ready: Called once the proxy serves.

    Raises:
        ConfigError: the configuration, the model's template or the address cannot be used.
        EngineError: no server answers at one of the URLs.
    """
    config = config or RolloutConfig()
    load_extensions(config.proxy)
    limits = await asyncio.to_thread(_context_lengths, engine_urls)
    if config.proxy.context_length is not None:
        limits.append(config.proxy.context_length)
    limited = config.proxy.model_copy(update={"context_length": min(limits, default=None)})
    renderer = await asyncio.to_thread(Renderer.from_checkpoint, checkpoint, limited)
    async with contextlib.AsyncExitStack() as closing:
        listener = closing.enter_context(listen(host, port, "--port"))
        records = closing.enter_context(TrajectoryStore(store))
        router = Router(config.router)
        closing.push_async_callback(router.close)
        for number, url in enumerate(engine_urls):
            router.add_engine(number, url, _CALLS_PER_ENGINE)
        app = create_proxy_app(records, router, renderer, config, model_name)
        execution_id, key = _begin(records)
        closing.callback(_end, records, execution_id)
        await closing.enter_async_context(serving(app, listener))
        told_to_stop = closing.enter_context(_stop_signals())
        on_ready(
            Recording(
                url=f"http://{host}:{listener.getsockname()[1]}",
                key=key,
                execution_id=execution_id,
                model=model_name,
                context_length=renderer.context_length,
                dialects=tuple(config.proxy.dialects),
            )
        )
        await told_to_stop.wait()


def _context_lengths(urls: Sequence[str]) -> list[int]:
    """The longest call that each engine takes, of those that say."""
    lengths = []
    for url in urls:
        with contextlib.closing(EngineHttp(url)) as http:
            if not http.is_healthy():
                raise EngineError(
                    f"no engine answers at {url}/health; start one with `python -m "
                    "sglang.launch_server --model-path DIR --port PORT`, or mend --engine"
                )
            try:
                info = http.get("/server_info")
            except EngineRefused:  # not SGLang's own server, but something that speaks /generate
                continue
            # Shorter than the engine's context: SGLang keeps a few tokens for itself.
            if isinstance(info, dict) and isinstance(info.get("max_req_input_len"), int):
                lengths.append(info["max_req_input_len"])
    return lengths


def _begin(store: TrajectoryStore) -> tuple[str, str]:
    group = f"proxy-{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(2)}"
    (execution_id,) = store.add_group(group, {"task": "standalone proxy"}, 1, 0)
    return execution_id, store.start_execution(execution_id)


def _end(store: TrajectoryStore, execution_id: str) -> None:
    reason = "recorded by a standalone proxy; nothing scored it"
    store.finish_execution(execution_id, Outcome("excluded", None, {"reason": reason}))


@contextlib.contextmanager
def _stop_signals() -> Iterator[asyncio.Event]:
    """An event that SIGINT and SIGTERM set, instead of ending the process with its store open."""
    loop = asyncio.get_running_loop()
    told = asyncio.Event()
    numbers = (signal.SIGINT, signal.SIGTERM)
    for number in numbers:
        loop.add_signal_handler(number, told.set)
    try:
        yield told
    finally:
        for number in numbers:
            loop.remove_signal_handler(number)


class _Settings(Section):
    """What `--set` may name."""

    rollout: RolloutConfig = RolloutConfig()


def _configured(overrides: Sequence[str]) -> RolloutConfig:
    values = Values()
    for override in overrides:
        values.merge(*parse_override(override))
    try:
        return _Settings.model_validate(values.tree).rollout
    except ValidationError as error:
        raise ConfigError(one_line(error)) from None


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="gyre proxy",
        description="Record what any harness does with a running SGLang server, token by token.",
    )
    parser.add_argument(
        "--engine",
        action="append",
        required=True,
        metavar="URL",
        help="an SGLang server; give it again for each further one of the same weights",
    )
    parser.add_argument("--store", type=Path, required=True, metavar="FILE", help="SQLite file")
    parser.add_argument(
        "--model", type=Path, required=True, metavar="DIR", help="checkpoint that the engine serves"
    )
    parser.add_argument("--host", default="127.0.0.1", help="address to bind (%(default)s)")
    parser.add_argument("--port", type=int, default=DEFAULT_PORT, help="%(default)s; 0 is any")
    parser.add_argument("--model-name", default="gyre", metavar="NAME", help="what clients see")
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        dest="overrides",
        metavar="rollout.K=V",
        help="a value of the rollout section, for example rollout.proxy.harness_profile=codex",
    )
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; returns the exit code.

    Raises:
        GyreError: see serve.
    """
    options = _parser().parse_args(arguments)

    def ready(recording: Recording) -> None:
        engines = ", ".join(options.engine)
        print(f"# {recording.url} -> {engines}; {recording.context_length} tokens a call")
        print(f"# execution {recording.execution_id} is recorded into {options.store}")
        _print(recording)

    asyncio.run(
        serve(
            options.engine,
            options.store,
            options.model,
            host=options.host,
            port=options.port,
            config=_configured(options.overrides),
            model_name=options.model_name,
            on_ready=ready,
        )
    )
    print(f"# ended; see `gyre trajectory list {options.store}`", flush=True)
    return 0
