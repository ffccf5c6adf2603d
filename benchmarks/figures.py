"""The figures that the pages quote, read from benchmarks/results.

    python benchmarks/figures.py --write    # after a benchmark has been run again
    python benchmarks/figures.py --check    # what CI runs: fails where a page says something else

A figure is quoted as `median (min - max)` with its number of runs, its pair and its command. No page
has measured figures outside of these blocks.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from docs.blocks import ROOT, main, table, with_block

RESULTS = ROOT / "benchmarks" / "results"


@dataclass(frozen=True)
class Figure:
    """One row.

    Attributes:
        what: what was measured, with the pair that was compared.
        file: name of the result file, without its suffix.
        path: dotted path of the figure in the file.
        form: how a value is written, a format string.
    """

    what: str
    file: str
    path: str
    form: str

    def row(self) -> list[str]:
        """The cells of the row; text in braces of `what` is a plain value of the same file."""
        result = _result(self.file)
        spread = result["spreads"].get(self.path)
        if spread is None:
            raise KeyError(f"{self.file}.json has no figure {self.path}; it has {_names(result)}")
        low, middle, high = (self.form.format(spread[key]) for key in ("min", "median", "max"))
        what = self.what.format_map(_Values(result))
        return [what, f"{middle} ({low} - {high})", str(spread["num_runs"])]


@dataclass(frozen=True)
class Block:
    """A table of one page whose figures come from one command."""

    page: str
    name: str
    figures: tuple[Figure, ...]

    def text(self) -> str:
        """The table, and where and when it was measured."""
        rows = [figure.row() for figure in self.figures]
        parts = [table(["measured", "median (range)", "runs"], rows), ""]
        files = list(dict.fromkeys(figure.file for figure in self.figures))
        parts += [f"- {_provenance(file)}" for file in files]
        return "\n".join(parts)


class _Values(dict[str, Any]):
    """Plain values of a result file by dotted path, for a row's text."""

    def __init__(self, result: dict[str, Any]) -> None:
        self._result = result

    def __missing__(self, path: str) -> str:
        value: Any = self._result
        for key in path.split("/"):
            value = value[key]
        return f"{value:,.0f}" if isinstance(value, (int, float)) else str(value)


TREE = "bench_tree"
PROXY = "bench_proxy"
SWAP = "bench_swap"
DELTA = "bench_delta"
ONE = "training.workloads.one_execution"

BLOCKS = (
    Block(
        "README.md",
        "figures",
        (
            Figure(
                "training step on one branching execution: {training/workloads/one_execution/"
                "tokens_tree} tokens packed as a tree against {training/workloads/one_execution/"
                "tokens_flat} flattened, same budget",
                TREE,
                f"{ONE}.speedup",
                "{:.2f}x",
            ),
            Figure(
                "the same, share of what counts of tokens, pairs and edges allow at best",
                TREE,
                f"{ONE}.efficiency",
                "{:.2f}",
            ),
            Figure(
                "gather + broadcast of {gb_delivered} GB of weights, {pair}, against a publish, "
                "both over gloo",
                SWAP,
                "speedup_vs_gather",
                "{:.1f}x",
            ),
            Figure(
                "Megatron-Core's reshard of the same weights, {megatron_pair}, against ours, both "
                "over gloo",
                SWAP,
                "speedup_vs_megatron",
                "{:.1f}x",
            ),
            Figure(
                "a publish through shared memory, checksums and their comparison included, against "
                "one memcpy of the same bytes",
                SWAP,
                "ratio_to_bound",
                "{:.2f}x",
            ),
            Figure(
                "weights whole / only what changed, 3% of the elements, between two hosts over a "
                "link of {link_mbit_per_s} Mbit/s",
                DELTA,
                "delta.0_03.speedup",
                "{:.1f}x",
            ),
            Figure(
                "what the proxy adds to a call with {history_tokens} tokens of history, against "
                "the same ids sent to the engine",
                PROXY,
                "overhead_ms_p50",
                "{:.1f} ms",
            ),
            Figure(
                "rendering and encoding that history again, against what the proxy adds",
                PROXY,
                "times_cheaper_than_retokenising",
                "{:.0f}x",
            ),
        ),
    ),
    Block(
        "docs/tree_training.md",
        "figures",
        (
            Figure("speed-up, flattened / tree", TREE, f"{ONE}.speedup", "{:.2f}x"),
            Figure("the best possible by counts", TREE, f"{ONE}.ideal", "{:.2f}x"),
            Figure("share of it reached", TREE, f"{ONE}.efficiency", "{:.2f}"),
            Figure(
                "time with at most 1 of {caps/uncapped/trajectories} trajectories / all",
                TREE,
                "caps.1.share_of_uncapped",
                "{:.1%}",
            ),
            Figure("with at most 5 / all", TREE, "caps.5.share_of_uncapped", "{:.1%}"),
            Figure(
                "CPU tree attention / SDPA on as much causal work, rate",
                TREE,
                "attention.vs_sdpa",
                "{:.2f}x",
            ),
            Figure(
                "SDPA with a dense mask of {attention/dense_mask_tokens} tokens / tree attention",
                TREE,
                "attention.vs_dense_mask",
                "{:.1f}x",
            ),
            Figure("block tables of {mask/tokens} tokens", TREE, "mask.ms_1m_tokens", "{:.2f} ms"),
            Figure(
                "the same / writing as many bytes into their rows", TREE, "mask.vs_floor", "{:.2f}x"
            ),
        ),
    ),
    Block(
        "docs/hot_swap.md",
        "figures",
        (
            *(
                figure
                for kind, name in (("ipc", "shared memory"), ("collective", "gloo"))
                for figure in (
                    Figure(
                        f"a publish, {{pair}}, over {name}", SWAP, f"{kind}.seconds", "{:.2f} s"
                    ),
                    Figure("the same / its bytes raw", SWAP, f"{kind}.ratio_to_bound", "{:.2f}x"),
                    Figure(
                        "CPU seconds of all ranks for a GB delivered",
                        SWAP,
                        f"{kind}.cpu_seconds_per_gb",
                        "{:.2f} s",
                    ),
                    Figure(
                        "the same for its bytes raw",
                        SWAP,
                        f"{kind}.bound_cpu_seconds_per_gb",
                        "{:.2f} s",
                    ),
                )
            ),
            Figure(
                "gather + broadcast / a publish, both over gloo",
                SWAP,
                "speedup_vs_gather",
                "{:.1f}x",
            ),
            Figure(
                "Megatron-Core's reshard / ours, {megatron_pair}, both over gloo",
                SWAP,
                "speedup_vs_megatron",
                "{:.1f}x",
            ),
            Figure(
                "{mib} MiB to a cell on another host, {link_mbit_per_s} Mbit/s, whole / the same "
                "bytes over plain TCP",
                DELTA,
                "hosts.whole_vs_raw",
                "{:.2f}x",
            ),
            *(
                Figure(
                    f"whole / what changed, {name} of the elements, same link",
                    DELTA,
                    f"delta.{key}.speedup",
                    "{:.1f}x",
                )
                for key, name in (("0_01", "1%"), ("0_03", "3%"), ("0_1", "10%"))
            ),
        ),
    ),
    Block(
        "docs/proxy.md",
        "figures",
        (
            *(
                Figure(
                    f"added to a call at {{histories/{tokens}/history_tokens}} tokens of history, p50",
                    PROXY,
                    f"histories.{tokens}.overhead_ms_p50",
                    "{:.1f} ms",
                )
                for tokens in ("10000", "100000", "700000")
            ),
            Figure("CPU time of the proxy for the last", PROXY, "cpu_ms_per_call", "{:.0f} ms"),
            Figure(
                "rendering and encoding that history again", PROXY, "retokenise_ms", "{:.0f} ms"
            ),
            Figure(
                "calls a second of {config/concurrency} executions at once",
                PROXY,
                "calls_per_second",
                "{:.0f}",
            ),
            Figure("bytes stored per token", PROXY, "bytes_per_token_stored", "{:.1f}"),
        ),
    ),
)


@cache
def _result(file: str) -> dict[str, Any]:
    return json.loads((RESULTS / f"{file}.json").read_text())


def _names(result: dict[str, Any]) -> str:
    return ", ".join(result["spreads"])


def _provenance(file: str) -> str:
    """Command, machine and commit of a result file."""
    where = _result(file)["environment"]
    return (
        f"`{where['command']} --json benchmarks/results/{file}.json`: commit "
        f"{where['commit'][:9]}, {where['date']}, {where['num_cores']} cores of {where['cpu']}, "
        f"{where.get('cores_busy_otherwise', '?')} of them busy with other work"
    )


def pages() -> dict[str, str]:
    """Each page with its blocks as the results say."""
    texts: dict[str, str] = {}
    for block in BLOCKS:
        text = texts.get(block.page) or (ROOT / block.page).read_text()
        texts[block.page] = with_block(text, block.name, block.text())
    return texts


if __name__ == "__main__":
    sys.exit(main(pages(), "Figures of the pages, read from benchmarks/results."))
