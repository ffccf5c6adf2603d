"""The machinery of generated pages and figures: a stale page is found, a bound is a bound."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from benchmarks import figures
from benchmarks.tree.training import Counts, at_best, best_rates, probes
from docs import blocks

PAGE = "before\n<!-- t:begin (script) -->\nold\n<!-- t:end -->\nafter\n"


def test_a_block_is_replaced_and_nothing_else():
    assert blocks.with_block(PAGE, "t", "new\n") == PAGE.replace("old", "new")
    with pytest.raises(ValueError, match="found 0"):
        blocks.with_block(PAGE, "u", "new")
    with pytest.raises(ValueError, match="found 2"):
        blocks.with_block(PAGE + PAGE, "t", "new")


def test_cells_cannot_break_a_table():
    assert "a \\| b" in blocks.table(["x"], [["a | b"]])


def test_check_fails_on_a_stale_page_and_write_mends_it(tmp_path: Path, monkeypatch, capsys):
    monkeypatch.setattr(blocks, "ROOT", tmp_path)
    (tmp_path / "page.md").write_text(PAGE)
    wanted = {"page.md": blocks.with_block(PAGE, "t", "new")}
    monkeypatch.setattr(sys, "argv", ["script", "--check"])
    assert blocks.main(wanted, "") == 1
    assert "page.md is out of date" in capsys.readouterr().err
    assert (tmp_path / "page.md").read_text() == PAGE  # a check writes nothing
    monkeypatch.setattr(sys, "argv", ["script", "--write"])
    assert blocks.main(wanted, "") == 0
    monkeypatch.setattr(sys, "argv", ["script", "--check"])
    assert blocks.main(wanted, "") == 0


def test_a_figure_quotes_median_range_and_runs(tmp_path: Path, monkeypatch):
    spread = {"median": 2.0, "min": 1.5, "max": 2.25, "num_runs": 7}
    result = {"spreads": {"a.speedup": spread}, "a": {"tokens": 51149}}
    (tmp_path / "bench.json").write_text(json.dumps(result))
    monkeypatch.setattr(figures, "RESULTS", tmp_path)
    figures._result.cache_clear()
    try:
        figure = figures.Figure("{a/tokens} tokens", "bench", "a.speedup", "{:.2f}x")
        assert figure.row() == ["51,149 tokens", "2.00x (1.50x - 2.25x)", "7"]
        with pytest.raises(KeyError, match=r"no figure a\.ratio"):
            figures.Figure("", "bench", "a.ratio", "{}").row()
    finally:
        figures._result.cache_clear()


@pytest.mark.parametrize(("token", "pair", "edge"), [(3e-4, 1e-7, 5e-5), (1e-3, 0.0, 0.0)])
def test_probes_recover_the_cost_of_tokens_pairs_and_edges(token, pair, edge):
    """On a trainer whose time is exactly a sum of costs, the bound is that time."""
    bins = probes(4096)
    costs = {"token": token, "pair": pair, "edge": edge}
    seconds = {name: at_best(Counts.of(b), costs) for name, b in bins.items()}
    rates = best_rates(bins, seconds)
    assert rates == pytest.approx(costs, rel=1e-6, abs=1e-12)


def test_probes_differ_in_what_they_separate():
    counts = {name: Counts.of(bins) for name, bins in probes(4096).items()}
    base = counts["probe_tokens"]
    assert counts["probe_edges"].pairs == base.pairs
    assert counts["probe_edges"].edges > 10 * base.edges
    assert counts["probe_chain"].pairs > 10 * base.pairs
    for name in ("probe_chain", "probe_fork"):
        assert abs(counts[name].tokens - base.tokens) <= 256
