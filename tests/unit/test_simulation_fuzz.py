"""Random systems under the real scheduler, driven to their end; and the command that does it for as
many as one likes."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from gyre_megatron.simulation import fuzz
from gyre_megatron.simulation.build import build
from gyre_megatron.simulation.compare import run_policy
from gyre_megatron.simulation.config import CapacityLoss


@pytest.fixture(scope="module")
def outcomes() -> list[fuzz.Outcome]:
    return [fuzz.run_system(number) for number in range(200)]


def test_no_system_ends_in_an_error_or_gets_stuck(outcomes):
    assert [(outcome.number, outcome.error) for outcome in outcomes if outcome.error] == []


def test_no_sample_is_older_than_the_bound(outcomes):
    assert sum(outcome.stale for outcome in outcomes) == 0


def test_moves_pay_against_the_better_of_both_baselines(outcomes):
    ratios = np.array([outcome.ratio for outcome in outcomes])
    assert ratios.mean() < 0.97 and np.median(ratios) < 0.99
    assert np.mean(ratios > fuzz.TOLERATED) < 0.08 and ratios.max() < 1.25


def test_most_moves_serve_or_train_something(outcomes):
    assert np.mean([outcome.useless_trips > 0 for outcome in outcomes]) < 0.25


def test_systems_are_of_every_kind():
    configs = [fuzz.random_system(number) for number in range(300)]
    assert {config.scheduler.max_lag_steps for config in configs} == {0, 1, 2}
    assert {config.scheduler.steps_per_burst for config in configs} == {1, 2, 3}
    assert {len(config.cluster.losses) for config in configs} == {0, 1, 2}
    assert {config.cluster.standalone_cells for config in configs} == {0, 1}
    assert any(config.workload.death_share for config in configs)
    assert fuzz.random_system(7) == fuzz.random_system(7) != fuzz.random_system(8)


def test_engines_that_die_send_their_work_elsewhere_and_cells_back():
    """Of two cells the core trains; the other one's engines die for good with work left."""
    config = fuzz.random_system(5)
    cluster = config.cluster.model_copy(
        update={
            "num_cells": 2,
            "standalone_cells": 0,
            "losses": (CapacityLoss(cell=1, at_s=100.0),),
        }
    )
    setting = build(config.model_copy(update={"cluster": cluster}))
    whole = build(config.model_copy(update={"cluster": cluster.model_copy(update={"losses": ()})}))
    hurt = run_policy(setting, "gyre")
    assert len(hurt.accounts.step_ends) == config.run.num_steps
    assert hurt.seconds > run_policy(whole, "gyre").seconds
    assert not any(
        s.cell == 1 and s.activity == "serving" and s.end > 101 for s in hurt.accounts.spans
    )


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    out = tmp_path / "fuzz.json"
    assert fuzz.main(["--systems", "1", "--first", "3", "--json", str(out)]) == 0
    shown = capsys.readouterr().out
    assert '"name": "system 3"' in shown and "Outcome(number=3" in shown
    result = json.loads(out.read_text())
    assert result["systems"] == 1 and result["errors"] == result["deadlocks"] == []
    assert {"stale_samples", "useless_trips", "ratio", "slowest", "seconds"} <= set(result)


def test_what_went_wrong_is_counted_and_named():
    good = fuzz.Outcome(1, "", False, 90.0, 100.0, 110.0, 0, 0)
    slow = fuzz.Outcome(2, "", False, 150.0, 100.0, 120.0, 1, 3)
    stuck = fuzz.Outcome(3, "StalledError: so", True, fuzz.NEVER, 1.0, 1.0, 0, 0)
    broken = fuzz.Outcome(4, "KeyError: so", False, fuzz.NEVER, 1.0, 1.0, 0, 0)
    result = fuzz.summary([good, slow, stuck, broken], 1.0, 1)
    assert result["errors"] == [4] and result["deadlocks"] == [3]
    assert result["stale_samples"] == 1 and result["useless_trips"] == 3
    assert result["ratio"]["worst"] == 1.5 and result["faster_than_both"] == 0.5
    assert result["slowest"] == [{"number": 2, "ratio": 1.5}]
