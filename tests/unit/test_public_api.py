"""What others build on: every public name and signature, held against `public_api.txt`.

A change here is a change for users. After one that is meant:
`python -m tests.unit.test_public_api > tests/unit/public_api.txt`
"""

from __future__ import annotations

import ast
import importlib
import inspect
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PINNED = Path(__file__).with_name("public_api.txt")
PACKAGES = (
    "gyre_megatron",
    "gyre_megatron.algos",
    "gyre_megatron.harness",
    "gyre_megatron.integrations.megatron",
    "gyre_megatron.integrations.slime",
    "gyre_megatron.proxy",
    "gyre_megatron.scheduler",
    "gyre_megatron.training",
    "gyre_megatron.trajectory",
    "gyre_megatron.weights",
)
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
CONFIG = "gyre_megatron.config."
"""Sections of the configuration are public by their documented fields (docs/configuration.md)."""


def public_names() -> Iterator[str]:
    """One line a name: where it is, and how it is called."""
    for package in PACKAGES:
        module = importlib.import_module(package)
        for name in sorted(module.__all__):
            yield f"{package}.{name}{_signature(getattr(module, name))}"


def _signature(value: object) -> str:
    if not inspect.isclass(value) and not inspect.isroutine(value):
        return ""
    try:
        parameters = inspect.signature(value).parameters.values()
    except ValueError:  # a class of C without one
        return "()"
    return f"({', '.join(_parameter(parameter) for parameter in parameters)})"


def _parameter(parameter: inspect.Parameter) -> str:
    """Name and kind, and whether it may be left out; not the default itself."""
    star = {parameter.VAR_POSITIONAL: "*", parameter.VAR_KEYWORD: "**"}.get(parameter.kind, "")
    only = "kw:" if parameter.kind is parameter.KEYWORD_ONLY else ""
    optional = "" if parameter.default is parameter.empty else "="
    return f"{only}{star}{parameter.name}{optional}"


def test_names_and_signatures_are_those_that_were_promised():
    assert list(public_names()) == PINNED.read_text().splitlines()


def imports_of(page: Path) -> Iterator[tuple[str, str]]:
    """(module, name) of every import of ours in the page's Python blocks."""
    for block in re.findall(r"```python\n(.*?)```", page.read_text(), flags=re.S):
        for node in ast.walk(ast.parse(block)):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("gyre_megatron"):
                for alias in node.names:
                    yield node.module or "", alias.name


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_pages_import_public_names_only(page: Path):
    for module, name in imports_of(page):
        if module.startswith(CONFIG):
            assert hasattr(importlib.import_module(module), name)
            continue
        assert module in PACKAGES or f"{module}.{name}" in _documented(), f"{module}.{name}"
        assert hasattr(importlib.import_module(module), name), f"{module} has no {name}"


def _documented() -> set[str]:
    """Public names below a package: explicit entrances."""
    return {
        "gyre_megatron.cpu.enable_cpu",
        "gyre_megatron.engines.client.EngineHttp",
        "gyre_megatron.engines.loader.LOADER",
    }


if __name__ == "__main__":
    print("\n".join(public_names()))
