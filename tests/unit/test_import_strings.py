"""Strings that name modules of ours (`-m` arguments, SGLang's loader, extension points) keep to the
same order of rooms as imports do: import-linter cannot see them."""

from __future__ import annotations

import ast
import importlib.util
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
_MODULE = re.compile(r"\bgyre_megatron(?:\.\w+)+")


def rooms() -> dict[str, int]:
    """Height of every room above `errors`, as the import rules in pyproject.toml list them."""
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]
    layers = next(c["layers"] for c in contracts["contracts"] if c["type"] == "layers")
    heights = {}
    for height, layer in enumerate(reversed(layers)):
        heights |= {name.strip().split(".")[1]: height for name in layer.split("|")}
    return heights


def named_modules(source: str) -> Iterator[tuple[int, str]]:
    """(line, dotted name) of every module of ours named in a string that is not a docstring."""
    tree = ast.parse(source)
    prose = {
        id(node.value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in prose:
            for match in _MODULE.finditer(node.value):
                yield node.lineno, match[0]


def upward(room: str, source: str, heights: dict[str, int]) -> list[str]:
    """What a module of `room` names that it must not know: rooms above it and beside it."""
    wrong = []
    for line, name in named_modules(source):
        other = name.split(".")[1].replace("_C", "ops")  # the native extension's only face
        known = other == room or heights[other] < heights[room]
        if not known:
            wrong.append(f"line {line}: {room} names {name}")
    return wrong


MODULES = sorted((ROOT / "gyre_megatron").rglob("*.py"))


@pytest.mark.parametrize("path", MODULES, ids=lambda p: str(p.relative_to(ROOT)))
def test_strings_name_modules_of_rooms_below_only(path):
    heights = rooms()
    relative = path.relative_to(ROOT / "gyre_megatron")
    room = relative.parts[0].removesuffix(".py")
    if room not in heights:  # the package's own face and the command line stand above all rooms
        assert room in ("__init__", "__main__", "cli")
        return
    assert upward(room, path.read_text(), heights) == []


def test_strings_name_modules_that_exist():
    for path in MODULES:
        for line, name in named_modules(path.read_text()):
            assert _exists(name), f"{path}:{line} names {name}, which does not exist"


def _exists(name: str) -> bool:
    """Whether `name` is a module, or something inside one."""
    parts = name.split(".")
    if parts[1] == "_C":
        return True  # built from csrc/
    for length in range(len(parts), 1, -1):
        file = ROOT.joinpath(*parts[:length])
        if file.with_suffix(".py").is_file():
            return length == len(parts) or parts[length] in file.with_suffix(".py").read_text()
        if file.is_dir():
            face = (file / "__init__.py").read_text()
            return length == len(parts) or (length + 1 == len(parts) and parts[-1] in face)
    return False


@pytest.mark.parametrize(
    ("room", "source", "found"),
    [
        ("weights", 'LOADER = "gyre_megatron.engines.loader.load"', 1),
        ("weights", 'name = f"gyre_megatron.engines.loader.{function}"', 1),
        ("weights", 'words = ["-m", "gyre_megatron.cpu.sglang.launch"]', 1),  # beside, not below
        ("ops", '"""Used by gyre_megatron.weights.executor."""', 0),  # prose may name its callers
        ("engines", 'LOADER = "gyre_megatron.engines.loader.load"', 0),
        ("engines", 'module = "gyre_megatron.cpu.sglang.launch"', 0),
        ("proxy", '"""A docstring."""\nx = "see gyre_megatron.runtime.service"', 1),
    ],
)
def test_the_rule(room, source, found):
    assert len(upward(room, source, rooms())) == found


def test_the_rule_finds_what_the_code_names():
    names = {name for path in MODULES for _, name in named_modules(path.read_text())}
    assert "gyre_megatron.cpu.sglang.launch" in names
    loader = importlib.util.find_spec("gyre_megatron.engines.loader")
    assert loader is not None  # SGLang imports it by this name
