"""What pyproject.toml declares agrees with what the code imports and what the tests pin."""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from importlib.metadata import packages_distributions
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
USED_BY_OTHERS = {
    "httptools": "uvicorn's parser",
    "psutil": "megatron-core saves checkpoints with it",
}
OPTIONAL = {
    # module -> the extra that brings it
    "mooncake": "mooncake",
    "pyarrow": "parquet",
    "sglang": "sglang",
}
BROUGHT_BY = {"pydantic_core": "pydantic", "starlette": "fastapi"}  # a part of what they promise


def requirements(lines: list[str]) -> dict[str, Requirement]:
    parsed = (Requirement(line) for line in lines)
    return {canonicalize_name(r.name): r for r in parsed}


DEPENDENCIES = requirements(PROJECT["dependencies"])
EXTRAS = {name: requirements(lines) for name, lines in PROJECT["optional-dependencies"].items()}


def imported_modules() -> dict[str, str]:
    """Top-level names that the package imports -> one file that does; stand-ins left out."""
    found: dict[str, str] = {}
    for file in (ROOT / "gyre_megatron").rglob("*.py"):
        if "stubs" in file.parts:
            continue
        for node in ast.walk(ast.parse(file.read_text())):
            names = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.level == 0:
                names = [node.module or ""]
            found |= {name.split(".")[0]: str(file.relative_to(ROOT)) for name in names}
    own = {"gyre_megatron", *sys.stdlib_module_names}
    return {name: file for name, file in found.items() if name not in own}


def test_everything_imported_is_declared_and_nothing_else():
    by_module = packages_distributions()
    undeclared, used = [], set(USED_BY_OTHERS)
    for module, file in imported_modules().items():
        if module in OPTIONAL:
            assert OPTIONAL[module] in EXTRAS
            continue
        module = BROUGHT_BY.get(module, module)
        names = {canonicalize_name(name) for name in by_module.get(module, [module])}
        used |= names
        if not names & DEPENDENCIES.keys():
            undeclared.append(f"{file} imports {module}")
    assert not undeclared
    assert not DEPENDENCIES.keys() - used, "declared, but nothing imports it"


def test_apex_is_nobodys_dependency():
    for name, group in {"dependencies": DEPENDENCIES, **EXTRAS}.items():
        assert "apex" not in group, name
    for file in (ROOT / "requirements").glob("*.txt"):
        assert not re.search(r"^apex\b", file.read_text(), re.MULTILINE), file


def pinned() -> list[tuple[str, Requirement]]:
    """(file, requirement) of every line of requirements/."""
    found = []
    for file in sorted((ROOT / "requirements").glob("*.txt")):
        lines = (line.split("#")[0].strip() for line in file.read_text().splitlines())
        found += [(file.name, Requirement(line)) for line in lines if line]
    return found


def test_every_range_has_a_pin_inside_it():
    pins: dict[str, list[tuple[str, str]]] = {}
    for file, requirement in pinned():
        versions = [s.version for s in requirement.specifier if s.operator == "=="]
        pins.setdefault(canonicalize_name(requirement.name), []).extend((file, v) for v in versions)
    unpinned = {"wheel", "setuptools", "gyre-megatron"}  # tools of the build; any will do
    for group in (DEPENDENCIES, *EXTRAS.values()):
        for name, requirement in group.items():
            if name in unpinned:
                continue
            assert name in pins, f"{requirement} has no tested pin in requirements/"
            for file, version in pins[name]:
                assert requirement.specifier.contains(version), f"{file}: {name}=={version}"


def test_ranges_have_no_upper_bound():
    """A newer release is refused at start, by name, where it matters; not by the resolver."""
    for group in (DEPENDENCIES, *EXTRAS.values()):
        for requirement in group.values():
            assert {s.operator for s in requirement.specifier} <= {">="}, str(requirement)


def test_a_gpu_and_a_cpu_machine_get_everything_the_package_needs():
    for file in ("cpu.txt", "gpu.txt"):
        there = {canonicalize_name(r.name) for name, r in pinned() if name == file}
        brought = {"numpy", "tokenizers", "requests", "packaging"} if file == "gpu.txt" else set()
        assert DEPENDENCIES.keys() <= there | brought, file
