"""`gyre config show FILE [--set a.b=c]`: print the resolved configuration and
its origins."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from typing import Any

from pydantic import BaseModel

from gyre_megatron.config.loader import load_config
from gyre_megatron.errors import ConfigError


def resolved(section: BaseModel, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Every leaf of a config as (dotted key, value)."""
    for name in type(section).model_fields:
        value = getattr(section, name)
        if isinstance(value, BaseModel):
            yield from resolved(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="gyre config", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    show = commands.add_parser("show", help="print each value with where it came from")
    show.add_argument("file")
    show.add_argument("--set", action="append", default=[], dest="overrides", metavar="a.b=c")
    arguments = parser.parse_args(argv)
    try:
        loaded = load_config(arguments.file, arguments.overrides, partial=True)
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    leaves = list(resolved(loaded.config))
    width = max(len(f"{key}: {value}") for key, value in leaves)
    for key, value in leaves:
        print(f"{f'{key}: {value}':<{width}}  # {loaded.origin_of(key)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
