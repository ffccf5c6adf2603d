"""Files of one JSON object a line, as the journal writes and the report reads them.

Invariant: a process that is killed while it writes leaves at most one cut line, at the end; it is
skipped by readers and removed before anything is appended.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any, TextIO

Record = dict[str, Any]


def read_lines(file: Path) -> list[Record]:
    """The objects of a file; lines that are none (cut short, or damaged) are left out. Empty if
    there is no such file."""
    if not file.exists():
        return []
    records = []
    for line in file.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            record = json.loads(line)
        except json.JSONDecodeError:
            continue
        if isinstance(record, dict):
            records.append(record)
    return records


def open_to_append(file: Path) -> TextIO:
    """Open for more lines. A cut last line goes first: the next one would be glued to it, and both
    lost."""
    if file.exists():
        with file.open("rb+") as binary:
            content = binary.read()
            binary.truncate(content.rfind(b"\n") + 1)
    return file.open("a", encoding="utf-8")


def replace_lines(file: Path, records: Iterable[Record]) -> None:
    """Write a file anew so that a kill leaves either the old content or the new."""
    staging = file.with_suffix(file.suffix + ".part")
    with staging.open("w", encoding="utf-8") as output:
        for record in records:
            output.write(json.dumps(record) + "\n")
        output.flush()
        os.fsync(output.fileno())
    os.replace(staging, file)


def write_line(output: TextIO, record: Record) -> None:
    """Append one object and hand it to the operating system at once."""
    output.write(json.dumps(record) + "\n")
    output.flush()
