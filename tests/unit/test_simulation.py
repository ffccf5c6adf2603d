"""The modelled world: driven by the real scheduler, conserved in time, honest baselines, clear
errors."""

from __future__ import annotations

import json
import random
from pathlib import Path

import numpy as np
import pytest

from gyre_megatron.cli import main
from gyre_megatron.config.loader import load_section
from gyre_megatron.errors import ConfigError
from gyre_megatron.simulation.build import build
from gyre_megatron.simulation.compare import best_split, run_policy
from gyre_megatron.simulation.config import SimulationConfig
from gyre_megatron.simulation.pictures import pareto_front
from gyre_megatron.simulation.workload import WorkloadConfig, draw

CONFIGS = Path(__file__).parents[2] / "examples" / "simulation"


def small(**changes) -> SimulationConfig:
    overrides = [f"{key.replace('__', '.')}={value}" for key, value in changes.items()]
    return load_section(CONFIGS / "small.yaml", SimulationConfig, overrides)


def random_system(seed: int) -> SimulationConfig:
    """Small systems of every kind: cells, groups, lag, capacity, tails, prices of moves."""
    rng = random.Random(seed)
    cells = rng.choice((2, 3, 4))
    groups = rng.choice((1, 2, 3))
    executions = rng.choice((1, 2, 4))
    burst = rng.choice((1, 1, 2, 3))
    lag = rng.choice((0, 0, 1, 2))
    room = rng.choice((0.3, 0.6, 1.0, 1.5, 2.0))
    capacity = max(1, round(groups * executions * (burst + lag) / cells * room))
    return small(
        run__num_steps=max(rng.choice((3, 4, 6)), burst),
        run__seed=seed,
        cluster__num_cells=cells,
        cluster__measured__call_s=rng.choice((3, 10, 20)),
        cluster__measured__slowdown=rng.choice((0, 0.5, 2)),
        cluster__measured__training_us_per_token=rng.choice((300, 1500, 6000)),
        cluster__transitions__leave_s=rng.choice((2, 8.5, 30)),
        scheduler__groups_per_step=groups,
        scheduler__executions_per_group=executions,
        scheduler__steps_per_burst=burst,
        scheduler__max_lag_steps=lag,
        scheduler__cell_capacity=capacity,
        workload__sigma_task=rng.choice((0, 0.3, 0.6)),
        workload__sigma_execution=rng.choice((0.1, 0.25, 0.5)),
    )


@pytest.mark.parametrize("policy", ["gyre", "colocate", "async"])
def test_random_systems_run_to_their_end_and_no_second_is_lost(policy: str):
    for seed in range(25):
        setting = build(random_system(seed))
        result = run_policy(setting, policy)
        accounts = result.accounts
        config = setting.config
        assert len(accounts.step_ends) == config.run.num_steps
        assert len(accounts.staleness) == config.run.num_steps * config.scheduler.groups_per_step
        cells = config.cluster.num_cells
        spent = sum(accounts.seconds().values())
        last = max(span.end for span in accounts.spans)
        assert spent == pytest.approx(cells * last)
        for cell in range(cells):
            spans = sorted((s for s in accounts.spans if s.cell == cell), key=lambda s: s.start)
            ends = [span.end for span in spans]
            assert [span.start for span in spans] == pytest.approx([0.0, *ends[:-1]])
        work = setting.executions.trained_tokens.sum() * setting.costs.training_s_per_token
        micro_step = setting.costs.tokens_per_micro_step * setting.costs.training_s_per_token
        slack = len(accounts.staleness) * micro_step  # each group is rounded to whole micro-steps
        assert accounts.seconds()["training"] == pytest.approx(work, abs=slack)


def test_moves_pay_on_random_systems():
    """Against both baselines at their best, in the mean and nearly always."""
    ratios = []
    for seed in range(30):
        setting = build(random_system(seed))
        best = min(run_policy(setting, "colocate").seconds, best_split(setting).seconds)
        ratios.append(run_policy(setting, "gyre").seconds / best)
    assert np.mean(ratios) < 0.99
    assert np.mean(np.asarray(ratios) > 1.02) < 0.15


def test_an_execution_that_times_out_ends_then():
    setting = build(small(workload__timeout_s=1000))
    accounts = run_policy(setting, "gyre").accounts
    assert max(accounts.execution_seconds) == pytest.approx(1000)


def test_streaming_only_helps():
    with_streaming = run_policy(build(small()), "async", 2).seconds
    without = run_policy(build(small(trainer__streaming=False)), "async", 2).seconds
    assert with_streaming < without


def test_a_standalone_pool_serves_while_every_other_cell_trains():
    setting = build(small(cluster__standalone_cells=2))
    accounts = run_policy(setting, "gyre").accounts
    activities = {span.activity for span in accounts.spans if span.cell >= 4}
    assert activities <= {"serving", "idle"}


def test_draws_have_the_stated_means_and_repeat():
    workload = WorkloadConfig(mean_calls=200, sigma_task=0.5, sigma_execution=0.25)
    drawn = draw(workload, 4000, 16, seed=3)
    assert drawn.calls.mean() == pytest.approx(200, rel=0.05)
    longest = drawn.calls.reshape(-1, 16).max(axis=1).mean()
    assert longest / drawn.calls.mean() == pytest.approx(1.53, rel=0.05)
    assert np.array_equal(drawn.calls, draw(workload, 4000, 16, seed=3).calls)


def test_the_front_is_what_nothing_beats():
    points = [
        {"hours": h, "staleness_mean": s, "name": f"{h}{s}"}
        for h, s in ((3, 0), (1, 2), (2, 1), (2, 2), (4, 0))
    ]
    assert [point["name"] for point in pareto_front(points)] == ["12", "21", "30"]


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    file = str(CONFIGS / "small.yaml")
    out = tmp_path / "result.json"
    assert main(["simulate", file, "--json", str(out), "--pictures", str(tmp_path / "p")]) == 0
    result = json.loads(out.read_text())
    assert result["speedup_vs_colocate"] > 1 and result["speedup_vs_async"] > 1
    assert {f.name for f in (tmp_path / "p").iterdir()} == {"gyre.png", "colocate.png", "async.png"}
    assert main(["simulate", file, "--sweep", "phi=0,1", "--json", str(out)]) == 0
    assert [point["name"] for point in json.loads(out.read_text())["points"]] == ["phi=0", "phi=1"]
    assert main(["simulate", file, "--set", "workload.mean_cals=3"]) == 2
    assert "did you mean workload.mean_calls" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"cluster__measured": "null"}, "model.architecture is missing"),
        ({"workload__summary_tokens": 300_000}, "must be below max_context_tokens"),
        ({"cluster__engines_per_cell": 3}, "does not divide devices_per_cell"),
    ],
)
def test_mistakes_are_named(changes, message):
    with pytest.raises(ConfigError, match=message):
        small(**changes)
