"""Finds the files that come with the package, so that their names work from any directory.

In a wheel they lie inside the package (`gyre_megatron/configs`, `gyre_megatron/examples`), in a
checkout beside it. Invariant: what the working directory holds comes first.
"""

from __future__ import annotations

from pathlib import Path

FOLDERS = ("configs", "examples")
_PACKAGE = Path(__file__).resolve().parent


def shipped_directory(folder: str = "configs") -> Path:
    """One of the folders that are shipped."""
    inside = _PACKAGE / folder
    return inside if inside.is_dir() else _PACKAGE.parent / folder


def shipped_names() -> dict[str, Path]:
    """Short name of a configuration -> file: `qwen3_8b`, `demo_cpu`, ..."""
    return {file.stem: file for file in sorted(shipped_directory().rglob("*.yaml"))}


def find_file(path: Path) -> Path:
    """The file or directory that `path` means: one that exists, or else the shipped one of that
    name (`examples/tables/tasks`); a path that means neither comes back as it is."""
    folder, *parts = path.parts or ("",)
    if folder not in FOLDERS or path.exists():
        return path
    shipped = shipped_directory(folder).joinpath(*parts)
    return shipped if shipped.exists() else path


def find_config(name: str | Path) -> Path:
    """The configuration file that `name` means: as `find_file`, or a shipped one's path below
    configs/ or short name.

    A name that means nothing comes back as it is, for the reader to complain about.
    """
    path = find_file(Path(name))
    if path.exists() or path.is_absolute():
        return path
    below = shipped_directory() / path
    if path.suffix == ".yaml" and below.is_file():
        return below
    return shipped_names().get(str(name), path)
