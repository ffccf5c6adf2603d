"""The limits that must agree: derived once, checked before anything starts, and kept by the proxy,
the engine, the packing and the scheduler."""

from __future__ import annotations

from pathlib import Path

import anthropic
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gyre_megatron.config.limits import ENGINE_RESERVED_TOKENS, Limits, derive_limits
from gyre_megatron.config.loader import GyreConfig, load_config
from gyre_megatron.errors import ConfigError
from tests.support.scripted_engine import chain_policy
from tests.support.threaded import ThreadedProxy

ROOT = Path(__file__).parents[2]
MODEL_40K = 40_960


@pytest.fixture
def derive(tmp_path: Path):
    file = tmp_path / "run.yaml"
    file.write_text("model: {tiny: {}}\n")

    def derived(*overrides: str, model: int = MODEL_40K) -> Limits:
        return derive_limits(load_config(file, list(overrides)).config, model)

    return derived


def test_with_defaults_everything_agrees_on_the_models_context(derive):
    limits = derive()
    assert limits.engine_context_length == MODEL_40K
    assert limits.context_length == MODEL_40K - ENGINE_RESERVED_TOKENS
    assert limits.max_new_tokens == limits.token_budget == limits.context_length
    assert limits.max_executions == 2 * 16
    assert limits.max_running_requests >= limits.executions_per_cell
    assert limits.warnings == ()
    assert derive(model=2048).token_budget == 16_384  # a bin is not smaller than a GPU needs


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ("engine.context_length=2048", dict(engine_context_length=2048, context_length=2042)),
        ("engine.max_total_tokens=1024", dict(engine_context_length=1024, context_length=1018)),
        ("engine.max_total_tokens=99999", dict(engine_context_length=MODEL_40K)),
        ("training.token_budget=512", dict(context_length=512, max_new_tokens=512)),
        ("training.token_budget=99999", dict(context_length=40_954, token_budget=99_999)),
        ("rollout.proxy.context_length=20000", dict(context_length=20_000, token_budget=20_000)),
        ("rollout.proxy.context_length=40960", dict(context_length=40_954)),
        ("rollout.sampling.max_new_tokens=100", dict(max_new_tokens=100)),
        ("scheduler.cell_capacity=64 cluster.num_cells=8", dict(max_executions=512)),
        ("scheduler.cell_capacity=99", dict(max_running_requests=396)),
        ("rollout.harness.max_concurrent=1000", dict(max_executions=32, warnings=())),
        ("training.gspo.ratio_level=execution", dict(keep_executions_whole=True)),
    ],
)
def test_what_is_left_open_follows_from_what_is_set(derive, overrides: str, expected: dict):
    limits = derive(*overrides.split())
    assert {name: getattr(limits, name) for name in expected} == expected


@pytest.mark.parametrize(
    ("overrides", "keys"),
    [
        ("engine.context_length=50000", ["engine.context_length=50000", "embeddings=40960"]),
        (
            "engine.max_total_tokens=1000 engine.context_length=2048",
            ["engine.max_total_tokens=1000", "engine.context_length=2048"],
        ),
        (
            "rollout.proxy.context_length=4096 engine.context_length=2048",
            ["rollout.proxy.context_length=4096", "engine.context_length=2048"],
        ),
        (
            "rollout.proxy.context_length=4096 engine.max_total_tokens=2048",
            ["rollout.proxy.context_length=4096", "engine.max_total_tokens=2048"],
        ),
        (
            "rollout.proxy.context_length=50000",
            ["rollout.proxy.context_length=50000", "max_position_embeddings=40960"],
        ),
        (
            "rollout.proxy.context_length=4096 training.token_budget=2048",
            ["rollout.proxy.context_length=4096", "training.token_budget=2048"],
        ),
        (
            "rollout.sampling.max_new_tokens=4096 engine.context_length=2048",
            ["rollout.sampling.max_new_tokens=4096", "engine.context_length=2048"],
        ),
        (
            "rollout.sampling.max_new_tokens=4096 training.token_budget=2048",
            ["rollout.sampling.max_new_tokens=4096", "training.token_budget=2048"],
        ),
        (
            "engine.max_running_requests=8 scheduler.cell_capacity=9",
            ["engine.max_running_requests=8", "scheduler.cell_capacity=9"],
        ),
    ],
)
def test_contradictions_name_both_keys(derive, overrides: str, keys: list[str]):
    with pytest.raises(ConfigError) as caught:
        derive(*overrides.split())
    assert all(key in str(caught.value) for key in keys), caught.value
    assert "\n" not in str(caught.value)


def test_a_model_without_room_for_a_call_is_refused(derive):
    with pytest.raises(ConfigError, match="max_position_embeddings=32 leaves less than 64"):
        derive(model=32)


@pytest.mark.parametrize(
    "word", ["--context-length", "--context-length=99", "--context-l", "--tp", "--ep-size"]
)
def test_an_engine_argument_has_one_owner(derive, word: str):
    with pytest.raises(ConfigError, match=f"extra_args holds {word}; set engine"):
        derive(f"engine.extra_args=[{word}, '8']")
    assert derive("engine.extra_args=[--log-requests, --page-size, '16']")


def test_a_cap_below_the_slots_is_said_aloud(derive):
    limits = derive("rollout.harness.max_concurrent=16", "cluster.num_cells=8")
    assert limits.max_executions == 16
    (warning,) = limits.warnings
    for part in ("max_concurrent=16", "128 executions", "cell_capacity=16", "num_cells=8"):
        assert part in warning


maybe = lambda *values: st.sampled_from([None, *values])  # noqa: E731


@settings(max_examples=400, deadline=None)
@given(
    model=st.integers(64, 5000),
    engine=st.fixed_dictionaries(
        dict(
            context_length=maybe(64, 512, 4096),
            max_total_tokens=maybe(100, 1024, 9999),
            max_running_requests=maybe(1, 16, 64),
        )
    ),
    proxy=maybe(64, 500, 2000),
    answer=maybe(10, 600, 3000),
    budget=maybe(64, 700, 20_000),
    harnesses=maybe(1, 40),
)
def test_whatever_is_set_limits_agree_or_are_refused(
    model, engine, proxy, answer, budget, harnesses
):
    config = GyreConfig.model_validate(
        dict(
            engine=engine,
            rollout=dict(
                proxy=dict(context_length=proxy),
                sampling=dict(max_new_tokens=answer),
                harness=dict(max_concurrent=harnesses),
            ),
            training=dict(token_budget=budget),
        )
    )
    try:
        limits = derive_limits(config, model)
    except ConfigError:
        return
    assert limits.engine_context_length <= model
    assert limits.context_length + ENGINE_RESERVED_TOKENS <= limits.engine_context_length or (
        limits.context_length <= limits.token_budget
    )
    assert limits.context_length <= min(limits.engine_context_length, limits.token_budget)
    assert 0 < limits.max_new_tokens <= limits.context_length
    assert limits.executions_per_cell <= limits.max_running_requests
    assert (limits.max_executions < 32) == bool(limits.warnings)
    applied = limits.apply(config)
    assert derive_limits(applied, model) == limits  # filled in, they are what they were
    assert applied.training.token_budget == limits.token_budget
    assert applied.rollout.proxy.context_length == limits.context_length


@pytest.mark.parametrize("file", sorted((ROOT / "configs").glob("*.yaml")), ids=lambda f: f.stem)
def test_the_limits_of_shipped_runs_agree(file: Path):
    config = load_config(file).config
    assert config.model.tiny is not None
    assert derive_limits(config, config.model.tiny.max_position_embeddings).warnings == ()


# What the proxy then does


CONTEXT = 2048


def test_the_proxy_takes_what_the_engine_takes(derive, tmp_path: Path):
    """An answer longer than the context is cut to what fits, and every prompt that the proxy
    admits is one that the engine serves."""
    asked = f"engine.context_length={CONTEXT}"
    limits = derive(asked)
    config = limits.apply(load_config(tmp_path / "run.yaml", [asked]).config)
    server = ThreadedProxy(
        tmp_path, chain_policy(), config=config.rollout, context_length=MODEL_40K
    )
    server.engine.context_length = CONTEXT
    _, token = server.run(_started(server))
    url = server.proxy.url
    client = anthropic.Anthropic(base_url=url, auth_token=token, api_key=None, max_retries=0)

    def ask(words: int) -> anthropic.types.Message:
        content = "0" * words
        messages = [{"role": "user", "content": content}]
        return client.messages.create(model="m", max_tokens=32_000, messages=messages, timeout=60)

    try:
        answer = ask(1)
        assert answer.stop_reason == "max_tokens" and answer.usage.input_tokens < 30
        total = answer.usage.input_tokens + answer.usage.output_tokens
        assert total == CONTEXT - ENGINE_RESERVED_TOKENS == limits.context_length
        overhead = answer.usage.input_tokens - 1
        longest = limits.context_length - 1 - overhead
        assert ask(longest).usage.output_tokens == 1
        with pytest.raises(
            anthropic.BadRequestError, match="prompt is too long: 2042 tokens > 2042"
        ):
            ask(longest + 1)
        assert len(server.engine.prompts) == 2  # what is too long never reaches the engine
    finally:
        server.close()


async def _started(server: ThreadedProxy) -> tuple[str, str]:
    return server.proxy.start_execution()
