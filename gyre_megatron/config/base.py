"""The base of every config section, frozen, typed and strict about names; and the type of paths."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Any

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    ValidationError,
    ValidationInfo,
    field_validator,
)

from gyre_megatron.shipped import find_file


def expand_user(path: str | Path) -> Path:
    """`~/x` and `~name/x` as the directory they stand for; other paths as they are.

    Raises:
        ValueError: the path is empty or holds a NUL byte, or there is no such user.
    """
    text = str(path)
    if not text or "\0" in text:
        raise ValueError("a path was expected, for example runs or ~/runs")
    expanded = os.path.expanduser(text)
    if text.startswith("~") and expanded == text:
        raise ValueError(f"there is no user {text.split('/')[0]}; write the path out")
    return Path(expanded)


def _expanded(value: Any) -> Any:
    return expand_user(value) if isinstance(value, str | Path) else value


UserPath = Annotated[Path, BeforeValidator(_expanded)]
"""A path as a user writes it; `~` is expanded when the configuration is loaded."""

InputPath = Annotated[UserPath, AfterValidator(find_file)]
"""The same for what is read only: examples/... is found where the package is, too."""


class Section(BaseModel):
    """One section of the configuration. Unknown keys are refused; values cannot change after
    loading."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        validate_default=True,
        use_attribute_docstrings=True,
        # NaN fails no comparison that a later check makes, and poisons whatever it multiplies.
        allow_inf_nan=False,
    )

    @field_validator("*", mode="before")
    @classmethod
    def _no_truth_for_a_number(cls, value: Any, info: ValidationInfo) -> Any:
        """`tp: yes` is True in YAML, and pydantic would take True for 1."""
        annotation = cls.model_fields[info.field_name or ""].annotation
        kinds = {annotation, *getattr(annotation, "__args__", ())}
        if isinstance(value, bool) and bool not in kinds and kinds & {int, float}:
            raise ValueError(f"a number was expected, found {str(value).lower()}")
        return value


def one_line(error: ValidationError) -> str:
    """Pydantic's findings as `key: what is wrong (got ...)`, joined by semicolons."""
    return "; ".join(
        f"{'.'.join(map(str, item['loc']))}: {item['msg'].removeprefix('Value error, ')} "
        f"(got {item['input']!r})"
        for item in error.errors()
    )
