"""Writes the table of extension points in ARCHITECTURE.md from the `ExtensionPoint` objects.

python docs/make_extension_table.py --write | --check
"""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from docs.blocks import ROOT, main, table, with_block
from gyre_megatron.extensions import ExtensionPoint

PAGE = "ARCHITECTURE.md"


def extension_points() -> list[tuple[str, ExtensionPoint]]:
    """Every extension point of the package with the module that owns it, by key."""
    found: dict[int, tuple[str, ExtensionPoint]] = {}
    for path in sorted((ROOT / "gyre_megatron").rglob("*.py")):
        if "ExtensionPoint(" not in path.read_text():
            continue
        parts = path.relative_to(ROOT).with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        for value in vars(importlib.import_module(name)).values():
            if isinstance(value, ExtensionPoint):
                found.setdefault(id(value), (name, value))
    return sorted(found.values(), key=lambda item: item[1].key)


def rows() -> list[list[str]]:
    """Key, owner, our own names, and how a hook is called."""
    return [
        [
            f"`{point.key}`",
            f"`{module.removeprefix('gyre_megatron.')}`",
            ", ".join(f"`{name}`" for name in point.builtin) or "none",
            f"`({', '.join(point.parameters)})`"
            + (f" -> {point.returns}" if point.returns else ""),
        ]
        for module, point in extension_points()
    ]


def page() -> str:
    """ARCHITECTURE.md with the table as the code says."""
    content = table(["key", "owned by", "ours", "yours is called as"], rows())
    return with_block((ROOT / PAGE).read_text(), "extension-points", content)


if __name__ == "__main__":
    sys.exit(main({PAGE: page()}, "Table of extension points, from the code."))
