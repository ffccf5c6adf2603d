"""What README tells a newcomer to write, as it stands in examples/newcomer: a task, an evaluator
and a harness."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest

from gyre_megatron.config.loader import load_config
from gyre_megatron.harness import HarnessContext, load_extensions, run_execution
from gyre_megatron.trajectory.processor import process_group
from gyre_megatron.trajectory.store import TrajectoryStore
from tests.support.proxies import running_proxy
from tests.support.replay import assert_replays
from tests.support.scripted_agents import ScriptedAgent
from tests.support.scripted_engine import ScriptedEngine
from tests.support.training_runs import ROOT, training_run

CONFIG = "examples/newcomer/config.yaml"


def test_each_part_is_ten_lines() -> None:
    folder = ROOT / "examples" / "newcomer"
    for name in ("harness.py", "tasks/digits/score.py", "tasks/digits/task.yaml", "config.yaml"):
        assert 0 < len((folder / name).read_text().splitlines()) <= 16


def test_an_execution_is_recorded_scored_and_ready_to_train(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)  # the configuration names its files from there
    config = load_config(CONFIG).config.rollout
    tasks = load_extensions(config.harness).tasks
    answers = iter(["12ab", "0000"])

    async def main() -> list[float | None]:
        agent = ScriptedAgent(lambda text, last: next(answers))
        engine = await ScriptedEngine(agent, version=1).start()
        async with running_proxy(tmp_path, [engine], config=config) as proxy:
            agent.renderer = proxy.renderer
            context = HarnessContext(proxy.store, tasks, config, proxy.url)
            query = tasks["digits"].query()
            rewards = []
            for execution_id in proxy.store.add_group("g", query, 2, 0):
                outcome = await run_execution(context, execution_id)
                assert outcome.status == "scored" and outcome.detail["harness"]["code"] == 0
                assert len(proxy.store.calls(execution_id)) == 1
                rewards.append(outcome.reward)
            seen = replace(engine, prompts=[], outputs=[])
            for index, execution_id in enumerate(("g.00", "g.01")):
                seen.prompts, seen.outputs = [engine.prompts[index]], [engine.outputs[index]]
                assert_replays(proxy.store, execution_id, seen)
            group = process_group(proxy.store, "g", config.processor)
            assert [tree.advantage for tree in group.trees] == [-1.0, 1.0]
            assert all(tree.num_trained_tokens > 0 for tree in group.trees)
        await engine.stop()
        return rewards

    assert asyncio.run(main()) == [0.5, 1.0]


@pytest.mark.e2e
@pytest.mark.timeout(420)
def test_the_main_job_trains_on_it(tmp_path: Path) -> None:
    small = ["run.num_steps=1", "scheduler.executions_per_group=4", "run.name=demo"]
    words = [word for override in small for word in ("--set", override)]
    with training_run(tmp_path, *words, config=CONFIG) as run:
        assert run.wait(timeout_s=360) == 0, run.output[-4000:]
        assert len(run.records()) == 1
    with TrajectoryStore(run.directory / "store.db", read_only=True) as store:
        finished = store.executions(states=["finished"])
        assert len(finished) >= 8 and {e.outcome.status for e in finished} == {"scored"}
        assert all(e.outcome.detail["harness"]["code"] == 0 for e in finished)
        assert len({e.outcome.reward for e in finished}) > 1, "every answer scored the same"
