"""Parts of bench_schedule that compute: whose turn a step is, and what the records come to."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.schedule import turns as turns_module
from benchmarks.schedule.analysis import Measured
from benchmarks.schedule.turns import Turns, split
from gyre_megatron.config.scheduler import SchedulerConfig
from gyre_megatron.observe.files import RunFiles
from gyre_megatron.scheduler import SchedulerState

TURNS = Turns(("gyre", "colocate", "async2"), steps=2)


def test_turns_go_there_and_back():
    names = [TURNS.policy_of(step) for step in range(1, 13)]
    there = ["gyre", "gyre", "colocate", "colocate", "async2", "async2"]
    assert names == there + there[::-1]


def test_a_step_after_another_policy_does_not_count():
    first = [step for step in range(1, 13) if TURNS.is_first(step)]
    assert first == [1, 3, 5, 9, 11]  # the policy that ends a lap begins the next one


def test_names_of_splits():
    assert (split("async3"), split("async"), split("gyre")) == (
        ("async", 3),
        ("async", 1),
        ("gyre", 1),
    )


def test_the_policy_of_the_step_in_progress_is_asked(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv(turns_module.VARIABLE, Turns(("async2", "async3"), 1).to_json())
    turns_module._turns.cache_clear()
    state = SchedulerState.at_start(4, total_steps=2)
    assert turns_module.policy(state, SchedulerConfig()) == 2
    turns_module._turns.cache_clear()


def test_figures_of_a_run(tmp_path: Path):
    """Two cells, two policies, two steps a turn: the second step of each counts."""
    files = RunFiles(tmp_path)
    steps = [(1, 10.0), (2, 20.0), (3, 30.0), (4, 45.0)]
    records = [
        {"step": step, "time": time, "reward": 0.5, "training_seconds_by_cell": {"0": 4.0}}
        for step, time in steps
    ]
    events = [
        {"time": 0.0, "cell": 0, "role": "rollout"},
        {"time": 0.0, "cell": 1, "role": "rollout"},
        {"time": 0.0, "waterlevel": 8},
        {"time": 13.0, "waterlevel": 0},
        {"time": 13.0, "cell": 0, "role": "leaving"},
        {"time": 15.0, "cell": 0, "role": "train"},
        {"time": 19.0, "cell": 0, "role": "returning"},
        {"time": 20.0, "cell": 0, "role": "rollout"},
    ]
    _write(files.metrics_file, records)
    _write(files.timeline_file, events)
    figures = Measured(files, Turns(("gyre", "colocate"), 2), num_cells=2).figures()
    assert figures["seconds"]["gyre"]["median"] == 10.0
    assert figures["speedup_vs_colocate"]["median"] == 1.5
    moves = figures["transition_seconds"]
    assert moves["rollout_to_train"]["mean"] == 2.0 and moves["train_to_rollout"]["mean"] == 1.0
    # In gyre's step, 10 s to 20 s: 3 s of serving on two cells, 4 s of training, 3 s of moves.
    assert figures["idle_fraction"]["gyre"] == pytest.approx(1 - (2 * 3 + 4 + 3) / 20)


def _write(file: Path, lines: list[dict[str, object]]) -> None:
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
