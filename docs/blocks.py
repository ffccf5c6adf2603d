"""Generated parts of the pages: text between two markers, written or checked by a script.

A block reads `<!-- NAME:begin ... -->`, generated lines, `<!-- NAME:end -->`. Used by
`benchmarks/figures.py` and the `make_*.py` scripts of this folder; tests run each with `--check`.
"""

from __future__ import annotations

import argparse
import difflib
import re
import sys
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def with_block(text: str, name: str, content: str) -> str:
    """`text` with the lines of the block `name` replaced by `content`.

    Raises:
        ValueError: the page has no such block, or more than one.
    """
    pattern = re.compile(
        rf"(<!-- {re.escape(name)}:begin\b[^>]*-->\n).*?(<!-- {re.escape(name)}:end -->)", re.DOTALL
    )
    replaced, count = pattern.subn(lambda m: m[1] + content.strip("\n") + "\n" + m[2], text)
    if count != 1:
        raise ValueError(f"expected one block {name!r} in the page, found {count}")
    return replaced


def table(header: list[str], rows: list[list[str]]) -> str:
    """A Markdown table."""
    lines = [header, ["---"] * len(header), *rows]
    escaped = ([cell.replace("|", "\\|") for cell in cells] for cells in lines)
    return "\n".join("| " + " | ".join(cells) + " |" for cells in escaped)


def main(pages: Mapping[str, str], description: str) -> int:
    """`--write` the pages, or `--check` that the files already say so.

    Args:
        pages: the wanted text of each file, by its path below the repository's root.

    Returns:
        The exit status: 1 when a check finds a difference.
    """
    parser = argparse.ArgumentParser(description=description)
    mode = parser.add_mutually_exclusive_group(required=True)
    mode.add_argument("--write", action="store_true", help="write the generated parts")
    mode.add_argument("--check", action="store_true", help="fail where a page differs")
    write = parser.parse_args().write
    stale = [name for name, wanted in pages.items() if _differs(name, wanted)]
    if write:
        for name in stale:
            (ROOT / name).write_text(pages[name])
            print(f"wrote {name}")
        return 0
    for name in stale:
        found = (ROOT / name).read_text() if (ROOT / name).exists() else ""
        sys.stderr.writelines(
            difflib.unified_diff(
                found.splitlines(True), pages[name].splitlines(True), name, "generated"
            )
        )
        print(f"{name} is out of date: run this script with --write", file=sys.stderr)
    return 1 if stale else 0


def _differs(name: str, wanted: str) -> bool:
    path = ROOT / name
    return not path.exists() or path.read_text() != wanted
