"""Scores a workspace of the tables tasks by what is in its files alone."""

import json
from pathlib import Path

DIGITS = "0123456789"


def score(workspace: Path, task: Path) -> dict:
    """Mean over the files the task asks for of the share of characters that are decimal digits.

    The list of files is read from the task, not from the workspace, which the agent may have
    changed. A missing or empty file earns 0.
    """
    files = json.loads((task / "workspace" / "spec.json").read_text())["files"]
    shares = {name: _share_of_digits(workspace / name) for name in files}
    return {"reward": sum(shares.values()) / len(shares), "files": shares}


def _share_of_digits(file: Path) -> float:
    text = file.read_text(encoding="utf-8", errors="replace").strip() if file.is_file() else ""
    return sum(character in DIGITS for character in text) / len(text) if text else 0.0
