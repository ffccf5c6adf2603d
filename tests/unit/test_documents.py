"""What the pages say is so: figures, tables, names, links, quoted files and named tests."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

from docs.make_extension_table import extension_points
from gyre_megatron.cli import COMMANDS

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted(
    path.relative_to(ROOT).as_posix()
    for path in [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md"), *ROOT.glob("examples/**/*.md")]
)
GENERATORS = ("benchmarks/figures.py", "docs/make_configuration.py", "docs/make_extension_table.py")


def text_of(page: str) -> str:
    return (ROOT / page).read_text(encoding="utf-8")


@pytest.mark.parametrize("script", GENERATORS)
def test_generated_parts_are_up_to_date(script: str) -> None:
    done = subprocess.run(
        [sys.executable, str(ROOT / script), "--check"],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        cwd=ROOT,
    )
    assert done.returncode == 0, done.stderr[-4000:]


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page: str) -> None:
    """Relative links and pictures, and the headings they name."""
    here = (ROOT / page).parent
    targets = re.findall(r"\]\(([^)\s]+)\)|(?:src|srcset)=\"([^\"]+)\"", text_of(page))
    for target in (first or second for first, second in targets):
        if target.startswith(("http://", "https://")):
            continue
        path, _, anchor = target.partition("#")
        file = (here / path).resolve() if path else ROOT / page
        assert file.exists(), f"{page} links to {target}"
        if anchor:
            assert anchor in headings(file), f"{page} links to {target}"


def headings(file: Path) -> set[str]:
    """Anchors of a page, as GitHub makes them."""
    lines = re.findall(r"^#+ (.*)$", file.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", line.lower()).strip().replace(" ", "-") for line in lines}


PATH = re.compile(
    r"`((?:gyre_megatron|launch|configs|docs|examples|tests|benchmarks|csrc)/[\w./-]*)"
)


@pytest.mark.parametrize("page", [page for page in PAGES if page != "CHANGELOG.md"])
def test_files_that_are_named_exist(page: str) -> None:
    for name in PATH.findall(text_of(page)):
        assert (ROOT / name.rstrip(".")).exists(), f"{page} names {name}"


@pytest.mark.parametrize("page", PAGES)
def test_commands_name_files_that_exist(page: str) -> None:
    """`python path/to/script.py` and `python -m package.module` in the pages."""
    text = text_of(page)
    for script in re.findall(r"(?:python|torchrun.*?) ((?:[\w]+/)+\w+\.py)", text):
        assert (ROOT / script).is_file(), f"{page}: python {script}"
    for module in re.findall(r"python -m (gyre_megatron[\w.]*)", text):
        path = ROOT / module.replace(".", "/")
        main = path / "__main__.py"
        assert main.is_file() or path.with_suffix(".py").is_file(), f"{page}: python -m {module}"


@pytest.mark.parametrize("page", PAGES)
def test_gyre_commands_exist(page: str) -> None:
    for command in re.findall(r"(?:^|`)gyre ([a-z]\w*)", text_of(page), re.MULTILINE):
        assert command in COMMANDS, f"{page}: gyre {command}"


@pytest.mark.parametrize("page", PAGES)
def test_make_targets_exist(page: str) -> None:
    targets = set(re.findall(r"^([\w-]+):", text_of("Makefile"), re.MULTILINE))
    for target in re.findall(r"(?:^|`)make ([\w-]+)", text_of(page), re.MULTILINE):
        assert target in targets, f"{page}: make {target}"


@cache
def functions_of(file: str) -> set[str]:
    tree = ast.parse((ROOT / file).read_text())
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
    return {node.name for node in ast.walk(tree) if isinstance(node, kinds)}


@pytest.mark.parametrize("page", PAGES)
def test_tests_that_are_named_exist(page: str) -> None:
    """`tests/x/test_y.py::test_z`; the parameters in brackets are checked by collecting them."""
    for file, function in re.findall(r"(tests/[\w/]+\.py)::(\w+)", text_of(page)):
        assert function in functions_of(file), f"{page} names {file}::{function}"


def test_every_row_of_the_support_matrix_has_tests() -> None:
    section = text_of("README.md").split("\n## Support\n")[1].split("\n## ")[0]
    rows = [line for line in section.splitlines() if line.startswith("| ")][2:]
    assert len(rows) >= 4
    for row in rows:
        assert re.search(r"tests/[\w/]+\.py", row), f"no test proves this row: {row}"


@pytest.mark.slow
def test_parameters_of_the_named_tests_exist() -> None:
    """Rows such as `test_tree_equals_flat.py::test_tree_equals_flat[moe-...]` by collection."""
    named = re.findall(r"(tests/[\w/]+\.py)::(\w+)\[([^\]]+)\]", text_of("README.md"))
    assert named
    files = sorted({file for file, _, _ in named})
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-o", "addopts=", "--collect-only", "-q", *files],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
        cwd=ROOT,
    )
    collected = done.stdout.splitlines()
    for file, function, parameters in named:
        pattern = re.compile(
            re.escape(f"{file}::{function}[{parameters}]").replace(re.escape("*"), ".*")
        )
        assert any(pattern.fullmatch(line) for line in collected), (file, function, parameters)


QUOTE = re.compile(
    r"<!-- file: (?P<file>[\w./-]+)(?: (?P<part>part))? -->\n```\w*\n(?P<code>.*?)```", re.DOTALL
)


@pytest.mark.parametrize("page", PAGES)
def test_quoted_files_are_quoted_exactly(page: str) -> None:
    """A code block under `<!-- file: PATH -->` is that file; with `part`, lines of it as they stand."""
    for match in QUOTE.finditer(text_of(page)):
        source = (ROOT / match["file"]).read_text()
        if match["part"]:
            assert match["code"] in source, f"{page} quotes {match['file']}"
        else:
            assert match["code"] == source, f"{page} quotes {match['file']}"


def test_the_six_files_name_what_is_in_them() -> None:
    """ARCHITECTURE.md names for each file to read the things to look at: they are defined there."""
    section = text_of("ARCHITECTURE.md").split("\n## Read these six files\n")[1].split("\n## ")[0]
    rows = re.findall(r"^\d\. `([\w/.]+)`: (.*?)(?=^\d\. |\Z)", section, re.MULTILINE | re.DOTALL)
    assert len(rows) == 6
    for file, words in rows:
        tree = ast.parse((ROOT / file).read_text())
        defined = {
            node.name
            for node in ast.walk(tree)
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef))
        }
        for name in re.findall(r"`(\w+)`", words):
            assert name in defined, f"ARCHITECTURE.md: {file} does not define {name}"


def test_every_room_is_described_and_no_other() -> None:
    listed = set(re.findall(r"^  (\w+)/ ", text_of("ARCHITECTURE.md"), re.MULTILINE))
    rooms = {p.parent.name for p in (ROOT / "gyre_megatron").glob("*/__init__.py")}
    assert listed == rooms


def test_the_import_order_is_the_one_that_is_checked() -> None:
    """ARCHITECTURE.md's line of layers equals import-linter's contract."""
    contract = text_of("pyproject.toml").split('type = "layers"')[1].split("]")[0]
    layers = [
        {room.strip().removeprefix("gyre_megatron.") for room in line.split("|")}
        for line in re.findall(r'"([^"]+)"', contract)
    ]
    line = text_of("ARCHITECTURE.md").split("<!-- import order -->\n")[1].split("\n\n")[0]
    stated = [
        {room.strip() for room in layer.strip(" {}`\n").split(",")} for layer in line.split("->")
    ]
    assert stated == layers


def test_there_are_extension_points() -> None:
    """The generated table is not empty because discovery broke."""
    keys = {point.key for _, point in extension_points()}
    assert len(keys) >= 5, keys


FORBIDDEN = {
    "machine paths": re.compile(r"(?<![\w.])/(?:work|tmp|home|root|mnt)/"),
    "addresses of registries": re.compile(
        r"pypi\.org|files\.pythonhosted|registry\.npmjs|proxy\.golang"
    ),
}


@pytest.mark.parametrize("page", PAGES)
@pytest.mark.parametrize("what", FORBIDDEN)
def test_pages_are_free_of(what: str, page: str) -> None:
    found = FORBIDDEN[what].findall(text_of(page))
    assert not found, f"{page} has {what}: {found}"


def test_results_are_free_of_machine_paths() -> None:
    for path in (ROOT / "benchmarks" / "results").glob("*.json"):
        assert not FORBIDDEN["machine paths"].search(path.read_text()), path.name
