"""The limits that must agree, derived once: how long a call may be, how much a bin holds, how many
run at a time.

Pure. Derived before anything starts, from the configuration and the model's own context, and
written into the configuration that engine, proxy, packing and scheduler then read (`apply`).
Invariant: `context_length <= engine_context_length` and `context_length <= token_budget`, so every
prompt that the proxy admits is served, and every trajectory that it records fits one bin.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TypeVar

from gyre_megatron.config.base import Section
from gyre_megatron.config.loader import GyreConfig
from gyre_megatron.errors import ConfigError

SectionType = TypeVar("SectionType", bound=Section)

ENGINE_RESERVED_TOKENS = 6
"""Tokens of its context that SGLang never gives out: a prompt must be shorter than
`min(context, KV cache) - 6`. Source: sglang 0.5.23, `TpModelWorker.get_worker_info` (max_req_len,
max_req_input_len) and `validate_input_length`."""
MIN_TOKEN_BUDGET = 16_384
"""Bins are at least this large unless told otherwise: smaller ones leave a GPU idle."""
CALLS_PER_EXECUTION = 4
"""Calls of one execution that an engine is ready to decode at once: harnesses run a few sub-agents
side by side."""
MIN_CONTEXT = 64


@dataclass(frozen=True)
class Limits:
    """What a run can hold, in numbers.

    Attributes:
        engine_context_length: tokens of one sequence in an engine (`--context-length`).
        context_length: tokens of prompt and answer together that the proxy admits.
        max_new_tokens: tokens of one answer; what the context leaves is less for most calls.
        token_budget: unique tokens of one bin.
        keep_executions_whole: all trajectories of an execution must share a bin (the
            execution-level ratio); one that is too large then is excluded from training.
        max_running_requests: calls that one engine decodes at once.
        executions_per_cell: executions that a serving cell holds.
        max_executions: executions that run at once while every cell serves.
        sources: for each of the numbers, the keys that it follows from.
        warnings: what is legal and still surprises; each in one line.
    """

    engine_context_length: int
    context_length: int
    max_new_tokens: int
    token_budget: int
    keep_executions_whole: bool
    max_running_requests: int
    executions_per_cell: int
    max_executions: int
    sources: dict[str, str] = field(default_factory=dict, compare=False)
    warnings: tuple[str, ...] = ()

    def apply(self, config: GyreConfig) -> GyreConfig:
        """The configuration with every limit that it left open filled in, so that all who read it
        find the same numbers, and `config.json` shows them."""
        engine = _filled(
            config.engine,
            context_length=self.engine_context_length,
            max_running_requests=self.max_running_requests,
        )
        rollout = _filled(
            config.rollout,
            proxy=_filled(config.rollout.proxy, context_length=self.context_length),
            sampling=_filled(config.rollout.sampling, max_new_tokens=self.max_new_tokens),
            harness=_filled(config.rollout.harness, max_concurrent=self.max_executions),
        )
        training = _filled(config.training, token_budget=self.token_budget)
        return _filled(config, engine=engine, rollout=rollout, training=training)

    def lines(self) -> list[str]:
        """`name: number  (what it follows from)`, one line each."""
        return [f"{name}: {getattr(self, name)}  ({why})" for name, why in self.sources.items()]


def derive_limits(config: GyreConfig, max_position_embeddings: int) -> Limits:
    """The limits of a run.

    Args:
        max_position_embeddings: the model's own context, in tokens.

    Raises:
        ConfigError: two keys contradict each other; the message names both, with their numbers.
    """
    engine_context, engine_source = _engine_context(config, max_position_embeddings)
    context, context_source = _context(config, engine_context, engine_source)
    budget, budget_source = _token_budget(config, context, context_source)
    answer, answer_source = _max_new_tokens(config, context, context_source)
    requests, requests_source = _max_running_requests(config)
    executions, executions_source = _max_executions(config)
    return Limits(
        engine_context_length=engine_context,
        context_length=context,
        max_new_tokens=answer,
        token_budget=budget,
        keep_executions_whole=config.training.gspo.ratio_level == "execution",
        max_running_requests=requests,
        executions_per_cell=config.scheduler.cell_capacity,
        max_executions=executions,
        sources={
            "engine_context_length": engine_source,
            "context_length": context_source,
            "max_new_tokens": answer_source,
            "token_budget": budget_source,
            "max_running_requests": requests_source,
            "executions_per_cell": "scheduler.cell_capacity",
            "max_executions": executions_source,
        },
        warnings=_warnings(config),
    )


def _filled(section: SectionType, **values: object) -> SectionType:
    return section.model_copy(update=values)


def _engine_context(config: GyreConfig, model_context: int) -> tuple[int, str]:
    model = f"the model's max_position_embeddings={model_context}"
    cache, asked = config.engine.max_total_tokens, config.engine.context_length
    if asked is not None:
        if asked > model_context:
            raise ConfigError(
                f"engine.context_length={asked} exceeds {model}; lower it, or leave it out"
            )
        if cache is not None and cache < asked:
            raise ConfigError(
                f"engine.max_total_tokens={cache} cannot hold one call of engine.context_length="
                f"{asked}; raise the first or lower the second"
            )
        return asked, f"engine.context_length={asked}"
    if cache is not None and cache < model_context:
        derived, source = cache, f"engine.max_total_tokens={cache}"
    else:
        derived, source = model_context, model
    if derived < MIN_CONTEXT:
        raise ConfigError(f"{source} leaves less than {MIN_CONTEXT} tokens for a call; raise it")
    return derived, source


def _context(config: GyreConfig, engine_context: int, engine_source: str) -> tuple[int, str]:
    served = engine_context - ENGINE_RESERVED_TOKENS
    served_source = f"{engine_source}, less {ENGINE_RESERVED_TOKENS} that SGLang keeps"
    asked, budget = config.rollout.proxy.context_length, config.training.token_budget
    if asked is not None:
        if asked > engine_context:
            raise ConfigError(
                f"rollout.proxy.context_length={asked} exceeds what the engines take "
                f"({engine_source}); lower the first or raise the second"
            )
        if budget is not None and asked > budget:
            raise ConfigError(
                f"rollout.proxy.context_length={asked} exceeds training.token_budget={budget}: a "
                "trajectory of that length could not be trained; lower the first or raise the "
                "second"
            )
        if asked <= served:
            return asked, f"rollout.proxy.context_length={asked}"
    elif budget is not None and budget < served:
        return budget, f"training.token_budget={budget}: a longer trajectory could not be trained"
    return served, served_source


def _token_budget(config: GyreConfig, context: int, source: str) -> tuple[int, str]:
    budget = config.training.token_budget
    if budget is not None:
        return budget, f"training.token_budget={budget}"
    if context > MIN_TOKEN_BUDGET:
        return context, f"the longest trajectory: {source}"
    return MIN_TOKEN_BUDGET, "training.token_budget is unset; the longest trajectory fits"


def _max_new_tokens(config: GyreConfig, context: int, source: str) -> tuple[int, str]:
    asked = config.rollout.sampling.max_new_tokens
    if asked is None:
        return context, f"what the context leaves: {source}"
    if asked > context:
        raise ConfigError(
            f"rollout.sampling.max_new_tokens={asked} exceeds the {context} tokens of a call "
            f"({source}); lower the first, or leave it out to take what fits"
        )
    return asked, f"rollout.sampling.max_new_tokens={asked}"


def _max_running_requests(config: GyreConfig) -> tuple[int, str]:
    asked, capacity = config.engine.max_running_requests, config.scheduler.cell_capacity
    if asked is None:
        source = f"{CALLS_PER_EXECUTION} calls of each of scheduler.cell_capacity={capacity}"
        return CALLS_PER_EXECUTION * capacity, source
    if asked < capacity:
        raise ConfigError(
            f"engine.max_running_requests={asked} is less than scheduler.cell_capacity={capacity}: "
            "executions that count as running would wait inside the engine; raise the first or "
            "lower the second"
        )
    return asked, f"engine.max_running_requests={asked}"


def _max_executions(config: GyreConfig) -> tuple[int, str]:
    capacity, cells = config.scheduler.cell_capacity, config.cluster.num_cells
    slots = capacity * cells
    asked = config.rollout.harness.max_concurrent
    if asked is not None and asked < slots:
        return asked, f"rollout.harness.max_concurrent={asked}"
    return slots, f"scheduler.cell_capacity={capacity} * cluster.num_cells={cells}"


def _warnings(config: GyreConfig) -> tuple[str, ...]:
    capacity, cells = config.scheduler.cell_capacity, config.cluster.num_cells
    asked = config.rollout.harness.max_concurrent
    if asked is None or asked >= capacity * cells:
        return ()
    return (
        f"rollout.harness.max_concurrent={asked} keeps the cluster below the "
        f"{capacity * cells} executions that it holds (scheduler.cell_capacity={capacity} * "
        f"cluster.num_cells={cells}); leave it out unless the control plane's host cannot run more "
        "harnesses",
    )
