"""Writes docs/configuration.md: every configuration field with its type, default and docstring.

python docs/make_configuration.py --write | --check
"""

from __future__ import annotations

import inspect
import sys
import types
import typing
from pathlib import Path
from typing import Any, Literal

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from docs.blocks import main
from gyre_megatron.config.loader import GyreConfig

INTRODUCTION = """\
# Configuration

Written by `python docs/make_configuration.py --write` from the classes in `gyre_megatron/config/`; a test
compares the two.

A configuration is YAML whose sections are the headings below. Files compose: `base: [file, ...]` reads other
files first, later ones win, `--set section.field=value` wins last. Unknown or repeated keys and wrong types are
errors that name the field and the nearest valid name.
"""
BOUNDS = {"ge": ">=", "gt": ">", "le": "<=", "lt": "<"}


def page() -> str:
    """The whole page."""
    return INTRODUCTION + "".join(_section("", GyreConfig))


def _section(path: str, model: type[BaseModel]) -> list[str]:
    """A heading and table for the section, then its subsections."""
    rows: list[str] = []
    below: list[str] = []
    for name, field in model.model_fields.items():
        full = f"{path}.{name}" if path else name
        inner = _model_in(field.annotation)
        if inner is not None:
            below += _section(full, inner)
        else:
            note = " ".join((field.description or "").split())
            rows.append(
                f"| `{full}` | {_type(field.annotation)}{_bounds(field)} | {_default(field)} | {_cell(note)} |\n"
            )
    heading = f"\n## `{path}`\n\n{_summary(model)}\n" if path else ""
    header = "\n| field | type | default | meaning |\n| --- | --- | --- | --- |\n" if rows else ""
    return [heading, header, *rows, *below]


def _model_in(annotation: Any) -> type[BaseModel] | None:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        inner = [_model_in(a) for a in typing.get_args(annotation)]
        return next((m for m in inner if m is not None), None)
    return None


def _type(annotation: Any) -> str:
    origin = typing.get_origin(annotation)
    arguments = typing.get_args(annotation)
    if origin is typing.Annotated:
        return _type(arguments[0])
    if origin is Literal:
        return ", ".join(f"`{value}`" for value in arguments)
    if origin in (typing.Union, types.UnionType):
        named = [_type(a) for a in arguments if a is not type(None)]
        return " or ".join([*named, "none"] if type(None) in arguments else named)
    if origin is not None:
        inner = [_type(a) for a in arguments if a is not Ellipsis]
        words = {dict: "mapping of {}", tuple: "list of {}", list: "list of {}"}
        return words.get(origin, str(origin) + " of {}").format(" to ".join(inner))
    return "path" if annotation is Path else getattr(annotation, "__name__", str(annotation))


def _bounds(field: FieldInfo) -> str:
    found = [
        f"{sign} {getattr(rule, name)}"
        for rule in field.metadata
        for name, sign in BOUNDS.items()
        if getattr(rule, name, None) is not None
    ]
    return " " + ", ".join(found) if found else ""


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    value = field.get_default(call_default_factory=True, validated_data={})
    if value is None:
        return "none"
    if isinstance(value, (tuple, list, dict)) and not value:
        return "empty"
    return _cell(f"`{value}`")


def _summary(model: type[BaseModel]) -> str:
    return " ".join((inspect.getdoc(model) or "").split("\n\n")[0].split())


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


if __name__ == "__main__":
    sys.exit(main({"docs/configuration.md": page()}, "docs/configuration.md from the fields."))
