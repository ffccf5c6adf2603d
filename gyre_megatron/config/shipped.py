"""Finds the configuration files that come with the package, so that their names work anywhere.

In a wheel they lie in `gyre_megatron/configs`; in a checkout in `configs/` beside the package.
"""

from __future__ import annotations

from pathlib import Path

_PACKAGE = Path(__file__).resolve().parent.parent


def shipped_directory() -> Path:
    """The directory of the shipped configuration files."""
    inside = _PACKAGE / "configs"
    return inside if inside.is_dir() else _PACKAGE.parent / "configs"


def shipped_names() -> dict[str, Path]:
    """Short name -> file: `qwen3_8b`, `demo_cpu`, ..."""
    return {file.stem: file for file in sorted(shipped_directory().rglob("*.yaml"))}


def find_config(name: str | Path) -> Path:
    """The file that `name` means: an existing path, a path below the shipped directory
    (`configs/demo_cpu.yaml` from anywhere), or a shipped file's short name.

    A name that means nothing comes back as it is, for the reader to complain about.
    """
    path = Path(name)
    if path.exists() or path.is_absolute():
        return path
    parts = path.parts[1:] if path.parts[:1] == ("configs",) else path.parts
    below = shipped_directory().joinpath(*parts)
    if path.suffix == ".yaml" and below.is_file():
        return below
    return shipped_names().get(str(name), path)
