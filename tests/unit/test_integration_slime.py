"""Our functions for slime, against a real proxy, a real harness and an engine whose every token is
known. slime itself is not here: args and samples have the fields of its 0.3.1."""

from __future__ import annotations

import asyncio
import copy
import importlib
import inspect
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from gyre_megatron.config.rollout import ProxyConfig
from gyre_megatron.errors import ConfigError
from gyre_megatron.integrations import slime
from gyre_megatron.text.renderer import Renderer
from gyre_megatron.trajectory.store import TrajectoryStore
from tests.support.checkpoints import make_checkpoint
from tests.support.replay import assert_replays
from tests.support.scripted_agents import ScriptedAgent
from tests.support.scripted_engine import ScriptedEngine, logprob_of

VERSION = 1
SAMPLING = {"temperature": 1.0, "top_p": 1.0, "top_k": -1, "max_new_tokens": 24, "stop": None}

HARNESS = '''
from openai import AsyncOpenAI


async def fork(request):
    """Asks, then goes on from the answer in two ways; the answers are what is scored."""
    async with AsyncOpenAI(base_url=f"{request.base_url}/v1", api_key=request.key) as client:

        async def ask(messages):
            answer = await client.chat.completions.create(model=request.model, messages=messages)
            return answer.choices[0].message.content or ""

        begin = [{"role": "user", "content": request.prompt}]
        first = await ask(begin)
        said = [*begin, {"role": "assistant", "content": first}]
        ends = [await ask([*said, {"role": "user", "content": way}]) for way in ("left", "right")]
    (request.workspace / "answer.txt").write_text("".join([first, *ends]))


async def idle(request):
    (request.workspace / "answer.txt").write_text("12")
'''
SCORE = """
def share_of_digits(workspace, task):
    text = (workspace / "answer.txt").read_text()
    if "x" in text:
        raise ValueError("no score for x")
    return sum(c in "0123456789" for c in text) / len(text)
"""
CONFIG = """
store: {store}
rollout:
  evaluator: {{retries: 0}}
  harness:
    tasks: {tasks}
    kind: {harness}
"""


@dataclass
class Sample:
    """The fields of slime's Sample that a custom generate function meets."""

    class Status(Enum):
        PENDING = "pending"
        COMPLETED = "completed"
        TRUNCATED = "truncated"
        ABORTED = "aborted"
        FAILED = "failed"

    group_index: int | None = None
    index: int | None = None
    rollout_id: int | None = None
    prompt: str = ""
    tokens: list[int] = field(default_factory=list)
    response: str = ""
    response_length: int = 0
    label: str | None = None
    reward: float | None = None
    loss_mask: list[int] | None = None
    weight_versions: list[str] = field(default_factory=list)
    rollout_log_probs: list[float] | None = None
    remove_sample: bool = False
    status: Status = Status.PENDING
    metadata: dict[str, Any] = field(default_factory=dict)


@dataclass
class Slime:
    """What a slime user has set up, and the engine behind its router."""

    folder: Path
    args: SimpleNamespace
    engine: ScriptedEngine
    renderer: Renderer

    def sample(self, index: int, group: int = 0) -> Sample:
        return Sample(group_index=group, index=index, metadata={"task": "digits", "kept": 1})

    @property
    def stores(self) -> list[Path]:
        return sorted((self.folder / "store").glob("*.db"))


def with_slime(
    folder: Path, answers: list[str], test: Callable[[Slime], Coroutine], harness: str = "fork"
) -> None:
    """Run `test` in an event loop with everything up; answers are given in the order of calls."""
    folder.mkdir(exist_ok=True)
    task = folder / "tasks" / "digits"
    task.mkdir(parents=True)
    (task / "task.yaml").write_text("prompt: digits\nevaluator: {kind: score.py:share_of_digits}\n")
    (task / "score.py").write_text(SCORE)
    (folder / "harness.py").write_text(HARNESS)
    settings = dict(
        store=folder / "store", tasks=folder / "tasks", harness=f"{folder}/harness.py:{harness}"
    )
    (folder / "gyre.yaml").write_text(CONFIG.format(**settings))
    checkpoint = make_checkpoint(folder / "checkpoint")
    said = iter(answers)
    agent = ScriptedAgent(lambda text, last: next(said))
    agent.renderer = Renderer.from_checkpoint(checkpoint, ProxyConfig())

    async def main() -> None:
        engine = await ScriptedEngine(agent, version=VERSION).start()
        host, port = engine.url.removeprefix("http://").split(":")
        args = SimpleNamespace(
            hf_checkpoint=str(checkpoint),
            sglang_router_ip=host,
            sglang_router_port=int(port),
            rollout_max_context_len=None,
            use_rollout_routing_replay=False,
            partial_rollout=False,
            gyre_config=str(folder / "gyre.yaml"),
        )
        try:
            await test(Slime(folder, args, engine, agent.renderer))
        finally:
            await slime.close()
            await engine.stop()

    asyncio.run(main())


def test_slime_can_load_and_call_them() -> None:
    """As its `load_function` and its rollout do: by dotted name, `evaluation` where it is taken."""
    for name in ("generate", "reward", "group_rewards"):
        module, _, attribute = f"gyre_megatron.integrations.slime.{name}".rpartition(".")
        assert callable(getattr(importlib.import_module(module), attribute))
    assert inspect.iscoroutinefunction(slime.generate) and inspect.iscoroutinefunction(slime.reward)
    parameters = inspect.signature(slime.generate).parameters
    assert list(parameters) == ["args", "sample", "sampling_params", "evaluation"]
    assert not inspect.iscoroutinefunction(slime.group_rewards)
    assert list(inspect.signature(slime.group_rewards).parameters) == ["args", "samples"]


def test_samples_carry_what_was_recorded_each_token_once(tmp_path: Path) -> None:
    async def test(here: Slime) -> None:
        asked = here.sample(7)
        before = copy.deepcopy(asked)
        left, right = await slime.generate(here.args, asked, SAMPLING)
        assert asked == before
        calls = list(zip(here.engine.prompts, here.engine.outputs, strict=True))
        assert len(calls) == 3
        branches = {tuple(prompt + output) for prompt, output in calls[1:]}
        assert {tuple(left.tokens), tuple(right.tokens)} == branches
        trained = 0
        for sample in (left, right):
            assert (sample.index, sample.group_index, sample.rollout_id) == (7, 0, 7)
            assert sample.status is Sample.Status.COMPLETED and not sample.remove_sample
            assert sample.metadata["kept"] == 1 and sample.metadata["task"] == "digits"
            assert sample.reward == 10 / 12 and sample.weight_versions == [str(VERSION)]
            start = len(sample.tokens) - sample.response_length
            assert sample.tokens[:start] == here.engine.prompts[0]
            assert len(sample.loss_mask) == len(sample.rollout_log_probs) == sample.response_length
            for place, (mask, logprob) in enumerate(
                zip(sample.loss_mask, sample.rollout_log_probs, strict=True), start
            ):
                if mask:
                    assert logprob == logprob_of(place, sample.tokens[place], VERSION)
            trained += sum(sample.loss_mask)
            text = here.renderer.tokens.decode(sample.tokens[start:], skip_special=False)
            assert sample.response == text and "ab" in text
        assert trained == sum(map(len, here.engine.outputs))
        first = len(here.engine.outputs[0])
        assert sorted(sum(s.loss_mask[:first]) for s in (left, right)) == [0, first]
        with TrajectoryStore(here.stores[0], read_only=True) as store:
            (execution,) = store.executions()
            assert left.metadata["gyre"]["execution"] == execution.execution_id
            assert_replays(store, execution.execution_id, here.engine)

    with_slime(tmp_path, ["12ab", "3456", "7890"], test)


def test_advantages_are_the_groups_whatever_became_of_its_executions(tmp_path: Path) -> None:
    """Four samples of one prompt one after the other (5/6, 1 and 1 of the digits, one without a
    score), and another prompt's."""

    async def test(here: Slime) -> None:
        made = [await slime.generate(here.args, here.sample(i), SAMPLING) for i in range(4)]
        other = await slime.generate(here.args, here.sample(4, group=1), SAMPLING)
        assert [len(samples) for samples in [*made, other]] == [2, 2, 1, 2, 2]
        (failed,) = made[2]
        assert failed.status is Sample.Status.ABORTED and failed.remove_sample
        assert failed.reward == 0.0 and failed.loss_mask == [0] and failed.response_length == 1
        assert failed.metadata["gyre"]["status"] == "excluded"
        assert "no_reward" in failed.metadata["gyre"]["reason"]
        flat = [sample for samples in [*made, other] for sample in samples]
        raw, advantages = slime.group_rewards(here.args, flat)
        assert raw == [0.5, 0.5, 1, 1, 0, 1, 1, 0.5, 0.5]
        spread = pytest.approx(2**-0.5, rel=1e-3)
        assert advantages[5] == advantages[2] == spread
        assert advantages[0] == advantages[1] == pytest.approx(-(2**0.5), rel=1e-3)
        assert advantages[4] == 0.0 and advantages[7:] == [0.0, 0.0]
        assert await slime.reward(here.args, flat[0]) == 0.5
        assert await slime.reward(here.args, made) == [[0.5, 0.5], [1.0, 1.0], [0.0], [1.0, 1.0]]

    with_slime(
        tmp_path,
        ["ab", "c1", "23", "1", "2", "3", "x", "1", "2", "4", "5", "6", "ab", "c1", "23"],
        test,
    )


def test_one_proxy_serves_all_samples_and_evaluation_has_its_own_sampling(tmp_path: Path) -> None:
    async def test(here: Slime) -> None:
        samples = [here.sample(index) for index in range(4)]
        made = await asyncio.gather(*(slime.generate(here.args, s, SAMPLING) for s in samples))
        assert {s.rollout_id for samples in made for s in samples} == {0, 1, 2, 3}
        assert len(here.stores) == 1
        cooler = SAMPLING | {"temperature": 0.6, "max_new_tokens": 8}
        (kept, *_) = await slime.generate(here.args, here.sample(9), cooler, evaluation=True)
        assert len(here.stores) == 2 and kept.reward == 1.0
        (file,) = [file for file in here.stores if "t0.6" in file.name]
        with TrajectoryStore(file, read_only=True) as store:
            (group,) = store.groups()
            assert group.query["evaluation"] is True
            nodes = store.nodes(store.executions()[0].execution_id)
            assert [n.temperature for n in nodes if n.sampled] == [pytest.approx(0.6)] * 3

    with_slime(tmp_path, ["1"] * 15, test)


def test_an_execution_without_a_call_counts_and_trains_nothing(tmp_path: Path) -> None:
    async def test(here: Slime) -> None:
        (sample,) = await slime.generate(here.args, here.sample(0), SAMPLING)
        assert sample.status is Sample.Status.COMPLETED and sample.remove_sample
        assert sample.reward == 1.0 and sum(sample.loss_mask) == 0
        assert len(sample.tokens) == 2 and sample.response_length == 1
        assert slime.group_rewards(here.args, [sample]) == ([1.0], [0.0])

    with_slime(tmp_path, [], test, harness="idle")


@pytest.mark.parametrize(
    ("args", "sampling", "metadata", "message"),
    [
        ({"gyre_config": None}, {}, {}, "args.gyre_config is not set"),
        ({"use_rollout_routing_replay": True}, {}, {}, "use_rollout_routing_replay: not done"),
        ({"partial_rollout": True}, {}, {}, "partial_rollout: not done"),
        ({}, {"top_p": 0.9, "top_k": 20}, {}, "top_p, top_k: not done"),
        ({}, {"stop": ["\n"]}, {}, "stop: not done"),
        ({}, {"sampling_seed": 7}, {}, "sampling_seed: not done"),
        ({}, {}, {"task": "grid"}, "sample 0: metadata.task: no task 'grid'; there are digits"),
        ({}, {}, {"task": None}, "sample 0: metadata.task: no task None"),
        ({"gyre_config": "nowhere.yaml"}, {}, {}, "no configuration file nowhere.yaml"),
    ],
)
def test_what_cannot_be_recorded_exactly_is_refused(
    tmp_path: Path, args: dict, sampling: dict, metadata: dict, message: str
) -> None:
    async def test(here: Slime) -> None:
        vars(here.args).update(args)
        sample = here.sample(0)
        sample.metadata |= metadata
        with pytest.raises(ConfigError, match=message):
            await slime.generate(here.args, sample, SAMPLING | sampling)
        assert here.engine.prompts == []
        with pytest.raises(ConfigError, match="was not made by"):
            await slime.reward(here.args, sample)

    with_slime(tmp_path, [], test)


def test_a_mended_configuration_can_be_asked_for_again(tmp_path: Path) -> None:
    async def test(here: Slime) -> None:
        checkpoint = here.args.hf_checkpoint
        here.args.hf_checkpoint = str(tmp_path / "nowhere")
        with pytest.raises(Exception, match="nowhere"):
            await slime.generate(here.args, here.sample(0), SAMPLING)
        here.args.hf_checkpoint = checkpoint
        assert len(await slime.generate(here.args, here.sample(0), SAMPLING)) == 2

    with_slime(tmp_path, ["1", "2", "3"], test)
