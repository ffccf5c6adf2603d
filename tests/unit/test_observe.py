"""What a person sees of a run: journal, timeline, totals, TensorBoard, report."""

from __future__ import annotations

import fcntl
import json
from collections import Counter, defaultdict
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_file_loader import LegacyEventFileLoader

from gyre_megatron.observe import report
from gyre_megatron.observe.batch_record import BatchRecord
from gyre_megatron.observe.files import RunFiles
from gyre_megatron.observe.journal import Journal
from gyre_megatron.observe.json_lines import open_to_append, read_lines, replace_lines, write_line
from gyre_megatron.scheduler import CellRole

R, L = CellRole.ROLLOUT, CellRole.LEAVING
T, B = CellRole.TRAIN, CellRole.RETURNING


def journal_at(path: Path, resumed_step: int = 0) -> Journal:
    return Journal(RunFiles(path), num_steps=9, resumed_step=resumed_step, tensorboard=True)


def write_steps(journal: Journal, steps: range) -> None:
    for step in steps:
        batch = BatchRecord(
            group_ids=[f"g{step}"],
            rewards=[step / 10, step / 10],
            num_bins=1,
            micro_steps_by_cell=Counter({1: 1, 0: 2}),
            training_seconds_by_cell=defaultdict(float, {1: 0.5, 0: 1.5}),
        )
        journal.step(step, batch, {"grad_norm": 1.0})


# Files of lines ------------------------------


def test_a_line_that_was_cut_by_a_kill_costs_no_other(tmp_path: Path):
    file = tmp_path / "lines.jsonl"
    file.write_text('{"a": 1}\n{"a": 2}\n{"a": 3, "cu')
    assert read_lines(file) == [{"a": 1}, {"a": 2}]
    with open_to_append(file) as output:
        write_line(output, {"a": 4})
    assert read_lines(file) == [{"a": 1}, {"a": 2}, {"a": 4}]
    file.write_text('{"a": 1}\n\x00\x00garbage\n[1]\n{"a": 2}\n')
    assert read_lines(file) == [{"a": 1}, {"a": 2}]
    assert read_lines(tmp_path / "missing") == []
    replace_lines(file, [{"b": 1}])
    assert read_lines(file) == [{"b": 1}]
    assert [path.name for path in tmp_path.iterdir()] == ["lines.jsonl"]


# Resuming ------------------------------


def test_a_resumed_journal_drops_what_the_checkpoint_does_not_hold(tmp_path: Path):
    journal = journal_at(tmp_path)
    journal.cells_ready([R, R])
    write_steps(journal, range(1, 6))
    journal.close()
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 6, "rew')  # killed in the middle of a line

    resumed = journal_at(tmp_path, resumed_step=3)
    write_steps(resumed, range(4, 8))
    summary = resumed.summary()
    resumed.close()
    records = read_lines(tmp_path / "metrics.jsonl")
    assert [record["step"] for record in records] == list(range(1, 8))
    assert records[0]["micro_steps_by_cell"] == {"0": 2, "1": 1}
    assert records[0]["training_seconds_by_cell"] == {"0": 1.5, "1": 0.5}
    assert summary["steps"] == 7
    assert summary["reward_first5"] == pytest.approx(0.3)
    assert summary["reward_last5"] == pytest.approx(0.5)


def scalars(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """(step, wall time) of every event of every file, by tag, in the order they were written."""
    found: dict[str, list[tuple[int, float]]] = {}
    for file in sorted(folder.iterdir()):
        for event in LegacyEventFileLoader(str(file)).Load():
            for value in event.summary.value:
                found.setdefault(value.tag, []).append((event.step, event.wall_time))
    return found


def test_tensorboard_holds_each_step_once_after_any_number_of_resumes(tmp_path: Path):
    journal = journal_at(tmp_path)
    write_steps(journal, range(1, 4))
    journal.close()
    for resumed_step in (2, 2, 4):
        journal = journal_at(tmp_path, resumed_step)
        write_steps(journal, range(resumed_step + 1, resumed_step + 3))
        journal.close()
    found = scalars(tmp_path / "tensorboard")
    assert {"reward", "seconds", "optimizer/grad_norm", "role_switches"} <= found.keys()
    times = [record["time"] for record in read_lines(tmp_path / "metrics.jsonl")]
    for tag, points in found.items():
        assert [step for step, _ in points] == [1, 2, 3, 4, 5, 6], tag
        assert [time for _, time in points] == pytest.approx(times), "the time of the step itself"


def test_totals_go_on_whatever_happened_after_the_last_step(tmp_path: Path):
    journal = journal_at(tmp_path)
    journal.cells_ready([R, R])
    journal.roles([L, R])
    journal.roles([T, R])
    journal.timeline.count("rerouted_calls")
    write_steps(journal, range(1, 3))
    journal.roles([B, R])
    journal.roles([R, R])
    journal.timeline.count("lost_calls")
    journal.timeline.count("harness_errors")
    journal.timeline.count("rerouted_calls")
    expected = {"role_switches": 2, "rerouted_calls": 2, "lost_calls": 1, "harness_errors": 1}
    assert {k: v for k, v in journal.totals().items() if k in expected} == expected
    # Killed: nothing is closed. The finished part is resumed, and finishes at once.
    resumed = journal_at(tmp_path, resumed_step=2)
    resumed.cells_ready([R, R])
    assert {k: v for k, v in resumed.totals().items() if k in expected} == expected
    assert {k: v for k, v in resumed.summary().items() if k in expected} == expected
    resumed.roles([L, R])
    resumed.roles([T, R])
    write_steps(resumed, range(3, 4))
    assert resumed.totals()["role_switches"] == 3
    assert [r["role_switches"] for r in resumed.records] == [1, 1, 3]
    assert [r["rerouted_calls"] for r in resumed.records] == [1, 1, 2]
    journal.close()
    resumed.close()


def test_the_timeline_survives_a_kill_in_the_middle_of_a_line(tmp_path: Path):
    journal = journal_at(tmp_path)
    journal.waterlevel(4)
    journal.timeline.count("rerouted_calls")
    journal.close()
    with (tmp_path / "timeline.jsonl").open("a") as file:
        file.write('{"time": 17.0, "rerouted_ca')
    resumed = journal_at(tmp_path)
    resumed.waterlevel(3)
    resumed.close()
    levels = [e["waterlevel"] for e in read_lines(tmp_path / "timeline.jsonl") if "waterlevel" in e]
    assert levels == [4, 3] and resumed.totals()["rerouted_calls"] == 1


def test_the_first_steps_time_begins_when_the_cells_are_ready(tmp_path: Path, monkeypatch):
    clock = iter([0.0, 100.0, 107.0, 110.0])
    monkeypatch.setattr("gyre_megatron.observe.journal.time.monotonic", lambda: next(clock))
    journal = journal_at(tmp_path)
    journal.cells_ready([R])
    write_steps(journal, range(1, 3))
    journal.close()
    assert [r["seconds"] for r in journal.records] == [7.0, 3.0]


# Report ------------------------------


@pytest.mark.parametrize(
    ("first", "last", "expected"),
    [(0.1, 0.4, True), (0.3, 0.55, False), (0.05, 0.2, False), (0.2, 0.4, True)],
)
def test_learning_means_twice_the_reward_and_a_fifth_more(first, last, expected):
    assert report.learnt({"reward_first5": first, "reward_last5": last}) is expected


def run_at(path: Path, num_steps: int = 3) -> Journal:
    """A run that was killed after `num_steps` steps."""
    (path / "config.json").write_text("{}")
    journal = journal_at(path)
    journal.cells_ready([R])
    for role in (L, T, B, R):
        journal.roles([role])
        journal.waterlevel(3)
    journal.timeline.count("rerouted_calls")
    write_steps(journal, range(1, num_steps + 1))
    journal.close()
    return journal


def finished_run(path: Path, last: float) -> Path:
    summary = run_at(path).summary() | {"reward_first5": 0.1, "reward_last5": last}
    (path / "summary.json").write_text(json.dumps(summary))
    return path


@pytest.mark.parametrize(
    ("expect", "last", "status"),
    [("rise", 0.9, 0), ("rise", 0.1, 1), ("flat", 0.1, 0), ("flat", 0.9, 1)],
)
def test_the_report_says_whether_the_run_did_as_expected(
    tmp_path: Path, capsys, expect, last, status
):
    run = finished_run(tmp_path, last)
    assert report.main([str(run), "--label", "demo", "--expect", expect]) == status
    line = capsys.readouterr().out.splitlines()[-1]
    assert line.startswith("demo: steps=3 reward_first5=0.1000 reward_last5=")
    assert line.endswith("role_switches=2 rerouted_calls=1 lost_calls=0 harness_errors=0")
    for name in ("timeline.png", "reward.png"):
        assert (run / name).read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("num_steps", [0, 3])
def test_a_crashed_run_has_a_report_that_says_so(tmp_path: Path, capsys, num_steps):
    run_at(tmp_path, num_steps)
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 4, "sec')
    assert report.main([str(tmp_path)]) == 0
    said = capsys.readouterr().out
    assert "has not ended well" in said
    assert f"run: steps={num_steps} reward_first5=" in said and "role_switches=2" in said
    assert (tmp_path / "timeline.png").read_bytes().startswith(b"\x89PNG")
    assert report.main([str(tmp_path), "--expect", "rise"]) == 1
    assert "judges a run that has ended well" in capsys.readouterr().err


def test_a_running_run_has_a_report_that_says_so(tmp_path: Path, capsys):
    finished_run(tmp_path, 0.9)  # a summary of the part before the resume proves nothing
    with (tmp_path / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert report.main([str(tmp_path)]) == 0
        assert "is still running" in capsys.readouterr().out
    assert report.main([str(tmp_path)]) == 0
    assert "is still running" not in capsys.readouterr().out


@pytest.mark.parametrize(
    "name", ["metrics.jsonl", "timeline.jsonl", "summary.json", "config.json", "lock"]
)
@pytest.mark.parametrize("content", ["", "null\n", "{}\n", '{"cell": 0}\n', "\x00\xff\n"])
def test_damaged_files_give_no_traceback(tmp_path: Path, capsys, name, content):
    finished_run(tmp_path, 0.9)
    (tmp_path / name).write_bytes(content.encode("latin-1"))
    assert report.main([str(tmp_path)]) == 0
    assert "run: steps=" in capsys.readouterr().out.splitlines()[-1]


def test_a_report_of_no_run_is_refused(tmp_path: Path, capsys):
    assert report.main([str(tmp_path)]) == 2
    assert "is no run directory" in capsys.readouterr().err
    assert report.main([str(tmp_path / "missing")]) == 2
    assert not list(tmp_path.iterdir())
