"""The published table: its keys, and that published figures never enter a simulated value."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from gyre_megatron.cli import main
from gyre_megatron.simulation import paper

FOLDER = Path(__file__).parents[2] / "examples" / "simulation"
SCALED_DOWN = (
    "scheduler.groups_per_step=2",
    "scheduler.executions_per_group=4",
    "scheduler.cell_capacity=2",
    "scheduler.steps_per_burst=1",
)


@pytest.fixture(scope="module")
def table() -> dict:
    return paper.paper_table(FOLDER, 2, SCALED_DOWN)


def test_every_published_row_is_simulated_and_its_error_shown(table):
    assert [row["name"] for row in table["rows"]] == list(paper.PUBLISHED)
    for row in table["rows"]:
        assert set(row) == {"name", "paper", "simulated", "error", "fitted"}
        assert row["paper"] == paper.PUBLISHED[row["name"]]
        assert row["fitted"] == (row["name"] in paper.FITTED)
    errors = {row["name"]: abs(row["error"]) for row in table["rows"]}
    assert table["max_abs_error"] == max(errors.values())
    predicted = [error for name, error in errors.items() if name not in paper.FITTED]
    assert table["predicted_max_abs_error"] == max(predicted)


def test_no_published_figure_enters_a_simulated_value(table, monkeypatch):
    doubled = {
        name: tuple(2 * v for v in value) if isinstance(value, tuple) else 2 * value
        for name, value in paper.PUBLISHED.items()
    }
    monkeypatch.setattr(paper, "PUBLISHED", doubled)
    again = paper.paper_table(FOLDER, 2, SCALED_DOWN)
    for row, before in zip(again["rows"], table["rows"], strict=True):
        assert row["simulated"] == before["simulated"] and row["paper"] != before["paper"]


def test_a_range_has_no_error_inside_and_the_nearest_end_outside(monkeypatch):
    monkeypatch.setattr(paper, "PUBLISHED", {"speed-up": (1.2, 1.5), "slack": 0.2})
    assert paper._row("speed-up", 1.3)["error"] == 0
    assert paper._row("speed-up", 0.6)["error"] == pytest.approx(-0.5)
    assert paper._row("speed-up", 1.8)["error"] == pytest.approx(0.2)
    assert paper._row("slack", 0.15)["error"] == pytest.approx(-0.05)


def test_at_most_four_numbers_were_fitted_a_workload():
    for workload in ("2.4T", "122B"):
        assert 0 < sum(name.startswith(workload) for name in paper.FITTED) <= 4


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    out = tmp_path / "paper.json"
    changes = [word for change in SCALED_DOWN for word in ("--set", change)]
    words = ["simulate", str(FOLDER), "--paper", "--steps", "2", "--json", str(out), *changes]
    assert main(words) == 0
    assert "largest error" in capsys.readouterr().out
    keys = {"rows", "max_abs_error", "predicted_max_abs_error", "seconds", "steps"}
    assert set(json.loads(out.read_text())) == keys
    assert main(["simulate", str(tmp_path), "--paper"]) == 2
    assert "--paper needs qwen_2_4t.yaml" in capsys.readouterr().err
