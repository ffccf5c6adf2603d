"""What every benchmark shares: repeats in turns, median and range, the record of the machine."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.common import environment, interleaved, ratio, spread, write_results


def test_spread_is_median_range_and_count():
    assert spread([3, 1, 10]) == {"median": 3.0, "min": 1.0, "max": 10.0, "num_runs": 3}
    with pytest.raises(ValueError, match="at least one run"):
        spread([])


def test_a_ratio_is_formed_round_by_round():
    # The medians' quotient would be 2 / 4 = 0.5; round by round it is the median of 1, 0.2, 0.75.
    assert ratio([1, 2, 3], [1, 10, 4])["median"] == 0.75
    with pytest.raises(ValueError):
        ratio([1, 2], [1])


def test_rounds_are_interleaved_and_turn_their_order():
    order: list[str] = []

    def action(name: str):
        def run() -> float:
            order.append(name)
            return len(order)

        return run

    figures = interleaved({"a": action("a"), "b": action("b")}, 2, num_warmups=1)
    assert order == ["a", "b", "b", "a", "a", "b"]
    assert figures == {"a": [4, 5], "b": [3, 6]}


def test_the_record_names_commit_machine_and_versions(tmp_path):
    record = environment()
    for key in ("commit", "cpu", "num_cores", "python", "date", "command"):
        assert record[key] not in ("", None), key
    assert {"torch", "numpy"} <= set(record["versions"])
    path = tmp_path / "results" / "bench.json"
    config = {"repeats": 2, "json": Path("elsewhere")}
    write_results(path, record, config, {"swap": {"speedup": spread([2.0, 4.0]), "pair": "tp2"}})
    written = json.loads(path.read_text())
    assert 0 <= written["environment"]["cores_busy_otherwise"] <= record["num_cores"] + 0.5
    assert written["config"] == {"repeats": 2}
    assert written["swap"] == {"speedup": 3.0, "pair": "tp2"}
    assert written["spreads"] == {"swap.speedup": spread([2.0, 4.0])}
