"""Scores a workspace of the tables task by what is in its files alone; prints {"reward": R} with R in [0, 1].

Each file of spec.json earns the share of its characters that are decimal digits; a missing or empty file earns 0.
"""

import json
from pathlib import Path


def score(path):
    text = path.read_text(encoding="utf-8", errors="replace").strip() if path.is_file() else ""
    return sum(character in "0123456789" for character in text) / len(text) if text else 0.0


def main():
    files = json.loads(Path("spec.json").read_text())["files"]
    print(json.dumps({"reward": sum(score(Path(name)) for name in files) / len(files)}))


if __name__ == "__main__":
    main()
