"""Composes YAML files into one frozen `GyreConfig` and remembers where each value came from.

A file may name others under `base:` (a name or a list, relative to itself); they are merged in
order, then the file itself, then `--set a.b=c` overrides; later wins. Unknown keys are refused with
the nearest valid name.
"""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, Field, ValidationError, model_validator
from pydantic_core import ErrorDetails

from gyre_megatron.config.base import Section, expand_user
from gyre_megatron.config.cluster import ClusterConfig, EngineConfig
from gyre_megatron.config.model import ModelConfig
from gyre_megatron.config.rollout import RolloutConfig
from gyre_megatron.config.run import RunConfig
from gyre_megatron.config.scheduler import SchedulerConfig
from gyre_megatron.config.sources import Values, compose, parse_override
from gyre_megatron.config.training import TrainingConfig
from gyre_megatron.config.weights import WeightsConfig
from gyre_megatron.errors import ConfigError
from gyre_megatron.shipped import find_config

SectionType = TypeVar("SectionType", bound=Section)


class GyreConfig(Section):
    """The whole configuration of a run."""

    run: RunConfig = Field(default_factory=RunConfig)
    model: ModelConfig = Field(default_factory=ModelConfig)
    cluster: ClusterConfig = Field(default_factory=ClusterConfig)
    engine: EngineConfig = Field(default_factory=EngineConfig)
    scheduler: SchedulerConfig = Field(default_factory=SchedulerConfig)
    rollout: RolloutConfig = Field(default_factory=RolloutConfig)
    training: TrainingConfig = Field(default_factory=TrainingConfig)
    weights: WeightsConfig = Field(default_factory=WeightsConfig)

    @model_validator(mode="after")
    def _async_needs_two_cells(self) -> GyreConfig:
        if self.scheduler.policy == "async" and self.cluster.num_cells < 2:
            raise ValueError(
                "scheduler.policy=async needs cluster.num_cells >= 2: one cell trains, the others "
                "serve"
            )
        return self


class LoadedConfig:
    """A config with the origin of each value: `origin_of("training.lr") == "configs/demo.yaml"`."""

    def __init__(self, config: GyreConfig, origins: dict[str, str]) -> None:
        self.config = config
        self.origins = origins

    def origin_of(self, key: str) -> str:
        """Where the value of `key` (dotted) came from; several sources where a mapping was merged
        from several; `default` if nobody set it."""
        found = [source for name, source in self.origins.items() if _is_at_or_below(name, key)]
        return ", ".join(dict.fromkeys(found)) or "default"


def load_config(
    path: str | Path, overrides: Sequence[str] = (), *, partial: bool = False
) -> LoadedConfig:
    """Read, compose and check a configuration file.

    Args:
        path: YAML file, or the name of a shipped one (`demo_cpu`).
        overrides: `section.key=value` strings; the value is parsed as YAML.
        partial: accept a file that says not yet which weights are trained, such as an overlay of
            `configs/models`: enough to look at or to plan with, not to run.

    Raises:
        ConfigError: a file is missing or not YAML, a key is unknown, or a value has the wrong type
        or range.
    """
    config, values = _load(path, GyreConfig, overrides)
    if not partial and config.model.checkpoint is None and config.model.tiny is None:
        raise ConfigError(
            f"{path} names no weights: set exactly one of model.checkpoint (a directory in Hugging "
            "Face format) and model.tiny (sizes and a seed)"
        )
    origins = {".".join(key): source for key, source in values.origins.items()}
    return LoadedConfig(config, origins)


def load_section(
    path: str | Path, schema: type[SectionType], overrides: Sequence[str] = ()
) -> SectionType:
    """As `load_config`, for a file of another schema, such as a simulation.

    Raises:
        ConfigError: as `load_config`.
    """
    return _load(path, schema, overrides)[0]


def _load(
    path: str | Path, schema: type[SectionType], overrides: Sequence[str]
) -> tuple[SectionType, Values]:
    try:
        values = compose(find_config(expand_user(path)))
    except ValueError as error:  # ConfigError is one, with its own words
        raise error if isinstance(error, ConfigError) else ConfigError(f"{path}: {error}") from None
    for override in overrides:
        values.merge(*parse_override(override))
    _check_keys(values.tree, schema, (), values)
    try:
        return schema.model_validate(values.tree), values
    except ValidationError as error:
        raise ConfigError("; ".join(_explain(item, values) for item in error.errors())) from None


def section_type(annotation: Any) -> type[BaseModel] | None:
    """The section class of a field, also behind `X | None`; None for plain values."""
    candidates = [annotation, *getattr(annotation, "__args__", ())]
    return next((c for c in candidates if isinstance(c, type) and issubclass(c, BaseModel)), None)


def _check_keys(
    tree: dict[str, Any], section: type[BaseModel], prefix: tuple[str, ...], values: Values
) -> None:
    """Refuse unknown names, plain values where a section belongs, and the reverse: pydantic's own
    words for these name types of ours, not what to write."""
    for name, value in tree.items():
        key = (*prefix, name)
        dotted = ".".join(key)
        field = section.model_fields.get(name)
        if field is None:
            raise ConfigError(_unknown(name, section, prefix) + f" (from {_origin(key, values)})")
        inner = section_type(field.annotation)
        may_be_null = field.annotation is not inner
        if inner is None:
            takes_mapping = getattr(field.annotation, "__origin__", None) is dict
            if isinstance(value, dict) and not takes_mapping:
                below = ", ".join(f"{dotted}.{n}" for n in value) or "{}"
                raise ConfigError(
                    f"{dotted} takes one value and has no keys of its own, found {below} "
                    f"(from {_origin(key, values)})"
                )
        elif isinstance(value, dict):
            _check_keys(value, inner, key, values)
        elif not (value is None and may_be_null):
            found = "nothing" if value is None else repr(value)
            raise ConfigError(
                f"{dotted} is a section, found {found} (from {_origin(key, values)}); give keys "
                f"below it ({', '.join(inner.model_fields)}), or leave it out"
            )


def _unknown(name: str, section: type[BaseModel], prefix: tuple[str, ...]) -> str:
    where = "".join(f"{part}." for part in prefix)
    if "." in name and name.split(".")[0] in section.model_fields:
        return f"unknown key {where}{name}; write one level a line: {name.replace('.', ': {', 1)}: ...}}"
    near = difflib.get_close_matches(name, list(section.model_fields), n=1, cutoff=0.0)
    return (
        f"unknown key {where}{name}; did you mean {where}{near[0]}? "
        f"Valid here: {', '.join(section.model_fields)}"
    )


def _explain(item: ErrorDetails, values: Values) -> str:
    """One of pydantic's findings in one line: key, what is wrong, what was found and where."""
    key = tuple(str(part) for part in item["loc"])
    message = item["msg"].removeprefix("Value error, ")
    if not key:
        return message
    known = sorted((place for place in values.origins if place == key[: len(place)]), key=len)
    name = ".".join(known[-1] if known else key)
    if not known:  # a default, or a rule about a whole section: its message says what was found
        return f"{name}: {message}"
    quote = " (put it in quotes)" if item["type"] == "string_type" else ""
    found = "" if isinstance(item["input"], BaseModel) else f"got {item['input']!r}, "
    return f"{name}: {message}{quote} ({found}from {_origin(key, values)})"


def _origin(key: tuple[str, ...], values: Values) -> str:
    """The source of a value, of the value it lies in, or of the first one below it."""
    for place in (key[:length] for length in range(len(key), 0, -1)):
        if place in values.origins:
            return values.origins[place]
    below = (source for place, source in values.origins.items() if place[: len(key)] == key)
    return next(below, "default")


def _is_at_or_below(name: str, key: str) -> bool:
    return name == key or name.startswith(f"{key}.")
