"""For users of slime: any harness, unmodified, behind Gyre's proxy, as a custom generate function.

    --custom-generate-function-path gyre_megatron.integrations.slime.generate
    --custom-rm-path gyre_megatron.integrations.slime.reward
    --custom-reward-post-process-path gyre_megatron.integrations.slime.group_rewards
    --custom-config-path slime.yaml        # gyre_config: FILE

`generate` runs one execution of a task against slime's own SGLang router and gives back one sample
for each branch that trains, with the tokens, log-probabilities and masks that the proxy recorded.
`args` and samples are slime's, used by their fields only; slime is not imported. Invariant: a
sampled token trains in exactly one of the samples of its execution.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from gyre_megatron.config.base import Section, UserPath
from gyre_megatron.config.loader import load_section
from gyre_megatron.config.rollout import RolloutConfig
from gyre_megatron.engines.router import Router
from gyre_megatron.errors import ConfigError
from gyre_megatron.harness.extensions import load_extensions
from gyre_megatron.harness.runner import HarnessContext, run_execution
from gyre_megatron.integrations.slime_samples import record_of, samples_of
from gyre_megatron.proxy.app import create_proxy_app
from gyre_megatron.proxy.http_server import listen, serving
from gyre_megatron.text.renderer import Renderer
from gyre_megatron.trajectory.advantages import group_advantages
from gyre_megatron.trajectory.processor import process_group
from gyre_megatron.trajectory.store import TrajectoryStore

__all__ = ["SlimeConfig", "close", "generate", "group_rewards", "reward"]

_COUNTED = ("scored", "placeholder")
_CALLS_OF_THE_ROUTER = 4096  # slime's router spreads calls over its engines: to ours it is one


class SlimeConfig(Section):
    """The file that `args.gyre_config` names."""

    rollout: RolloutConfig
    """As in a run of Gyre: tasks, harness, evaluator, dialects, processor. `sampling` is slime's."""
    store: UserPath = Path("gyre_slime")
    """Directory of the recorded executions, one SQLite file for each way of sampling."""
    host: str = "127.0.0.1"
    """Address at which harnesses reach the proxy."""


async def generate(
    args: Any, sample: Any, sampling_params: Mapping[str, Any], evaluation: bool = False
) -> list[Any]:
    """Run the execution that a sample asks for.

    Args:
        args: slime's; read are `hf_checkpoint`, `sglang_router_ip`, `sglang_router_port`,
            `rollout_max_context_len` and `gyre_config`, a file of `SlimeConfig`.
        sample: its `metadata["task"]` names a task of `rollout.harness.tasks`; it is not changed.
        sampling_params: `temperature` and `max_new_tokens` hold for every call of the harness. An
            answer ends where the chat template ends a turn: `stop_token_ids` are not read.
        evaluation: recorded in the same way; slime decides what trains.

    Returns:
        Copies of `sample`, one a trajectory, with `rollout_id` in common. Where nothing trains, one
        whose loss mask is 0 and which is to be removed.

    Raises:
        ConfigError: the file, the task or slime's arguments ask for what cannot be recorded exactly.
    """
    _check(args, sampling_params)
    service = await _service(args, sampling_params)
    query = {"task": _task_of(sample, service), "evaluation": evaluation}
    group_id = f"slime-{sample.group_index}-{sample.index}-{secrets.token_hex(4)}"
    (execution_id,) = service.context.store.add_group(group_id, query, 1, 0)
    outcome = await run_execution(service.context, execution_id)
    processor = service.context.config.processor
    group = await asyncio.to_thread(process_group, service.context.store, group_id, processor)
    return samples_of(sample, group, outcome, execution_id, service.renderer)


async def reward(args: Any, sample: Any, **_: Any) -> Any:
    """The reward that the task's evaluator gave; of a list of samples, one for each.

    Raises:
        ConfigError: the sample was not made by `generate`.
    """
    if isinstance(sample, list):
        return [await reward(args, one) for one in sample]
    return float(record_of(sample)["reward"])


def group_rewards(args: Any, samples: Sequence[Any]) -> tuple[list[float], list[float]]:
    """Rewards as the evaluator gave them, and advantages: relative to the group of the prompt, in
    which each execution counts once, however many samples it became.

    Executions that count nowhere (their evaluator failed, they timed out) get 0 and shift nobody's
    mean. `rollout.processor.advantage` of the configuration says how they are computed.

    Raises:
        ConfigError: a sample was not made by `generate`.
    """
    groups: dict[Any, dict[str, float]] = {}
    for sample in samples:
        record = record_of(sample)
        rewards = groups.setdefault(sample.group_index, {})
        if record["status"] in _COUNTED:
            rewards[record["execution"]] = float(record["reward"])
    processor = _settings(str(args.gyre_config)).rollout.processor
    advantages: dict[str, float] = {}
    for rewards in groups.values():
        found = group_advantages(np.asarray(list(rewards.values()), np.float64), processor)
        advantages |= dict(zip(rewards, found, strict=True))
    raw = [float(record_of(sample)["reward"]) for sample in samples]
    return raw, [advantages.get(record_of(sample)["execution"], 0.0) for sample in samples]


async def close() -> None:
    """End the proxies of this event loop and close their stores; slime's process may also just
    end."""
    loop = asyncio.get_running_loop()
    for key in [key for key in _services if key[0] is loop]:
        starting = _services.pop(key)
        with contextlib.suppress(Exception):  # one that never started has nothing to close
            await (await starting).closing.aclose()


@dataclass(frozen=True)
class _Service:
    """A proxy that serves, and what it takes to run executions against it."""

    context: HarnessContext
    renderer: Renderer
    closing: contextlib.AsyncExitStack


_services: dict[tuple[Any, ...], asyncio.Task[_Service]] = {}
"""(event loop, configuration, sampling) -> its service; made when it is first asked for."""


async def _service(args: Any, sampling_params: Mapping[str, Any]) -> _Service:
    sampling = (sampling_params["temperature"], sampling_params["max_new_tokens"])
    key = (asyncio.get_running_loop(), str(args.gyre_config), *sampling)
    if key not in _services:
        _services[key] = asyncio.create_task(_start(args, *sampling))
    try:
        # Samples wait for it together: one that is cancelled must not end it for the others.
        return await asyncio.shield(_services[key])
    except Exception:
        _services.pop(key, None)  # mended, it can be asked for again
        raise


async def _start(args: Any, temperature: float, max_new_tokens: int) -> _Service:
    settings = _settings(str(args.gyre_config))
    config = _rollout_config(settings.rollout, args, temperature, max_new_tokens)
    tasks = load_extensions(config.harness).tasks
    renderer = await asyncio.to_thread(Renderer.from_checkpoint, args.hf_checkpoint, config.proxy)
    async with contextlib.AsyncExitStack() as opened:
        settings.store.mkdir(parents=True, exist_ok=True)
        name = f"calls_t{temperature}_n{max_new_tokens}.db"
        store = opened.enter_context(TrajectoryStore(settings.store / name))
        router = Router(config.router)
        opened.push_async_callback(router.close)
        url = f"http://{args.sglang_router_ip}:{args.sglang_router_port}"
        router.add_engine(0, url, _CALLS_OF_THE_ROUTER)
        listener = opened.enter_context(listen(settings.host, 0, "host"))
        app = create_proxy_app(store, router, renderer, config)
        await opened.enter_async_context(serving(app, listener))
        proxy = f"http://{settings.host}:{listener.getsockname()[1]}"
        closing = opened.pop_all()
    return _Service(HarnessContext(store, tasks, config, proxy), renderer, closing)


@lru_cache(maxsize=16)
def _settings(path: str) -> SlimeConfig:
    return load_section(path, SlimeConfig)


def _rollout_config(
    config: RolloutConfig, args: Any, temperature: float, max_new_tokens: int
) -> RolloutConfig:
    """The configuration with slime's sampling and the shorter of both contexts."""
    sampling = config.sampling.model_copy(
        update={"temperature": temperature, "top_p": 1.0, "max_new_tokens": max_new_tokens}
    )
    lengths = [config.proxy.context_length, getattr(args, "rollout_max_context_len", None)]
    context = min((length for length in lengths if length), default=None)
    proxy = config.proxy.model_copy(update={"context_length": context})
    return config.model_copy(update={"sampling": sampling, "proxy": proxy})


def _check(args: Any, sampling_params: Mapping[str, Any]) -> None:
    """Refuse what the proxy does not do, instead of training on something else than was sampled."""
    if not getattr(args, "gyre_config", None):
        raise ConfigError(
            "args.gyre_config is not set: give slime --custom-config-path a YAML file with the line "
            "gyre_config: FILE, where FILE has the sections of integrations.slime.SlimeConfig"
        )
    asked = {
        "top_p": sampling_params.get("top_p", 1.0) not in (None, 1.0),
        "top_k": sampling_params.get("top_k", -1) not in (None, -1),
        "stop": bool(sampling_params.get("stop")),
        "sampling_seed": sampling_params.get("sampling_seed") is not None,
        "use_rollout_routing_replay": bool(getattr(args, "use_rollout_routing_replay", False)),
        "partial_rollout": bool(getattr(args, "partial_rollout", False)),
    }
    if found := [name for name, is_asked in asked.items() if is_asked]:
        raise ConfigError(
            f"{', '.join(found)}: not done by gyre_megatron.integrations.slime; leave slime's default"
        )


def _task_of(sample: Any, service: _Service) -> str:
    name: Any = (sample.metadata or {}).get("task")
    try:
        return service.context.tasks[name].name
    except ConfigError as error:
        raise ConfigError(f"sample {sample.index}: metadata.task: {error}") from None
