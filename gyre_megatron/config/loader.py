"""Composes YAML files into one frozen `GyreConfig` and remembers where each value came from.

A file may name others under `base:` (a list, relative to itself); they are merged in order, then
the file itself, then `--set a.b=c` overrides; later wins. Unknown keys are refused with the nearest
valid name.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, Field, ValidationError, model_validator

from gyre_megatron.config.base import Section
from gyre_megatron.config.cluster import ClusterConfig, EngineConfig
from gyre_megatron.config.model import ModelConfig
from gyre_megatron.config.rollout import RolloutConfig
from gyre_megatron.config.run import RunConfig
from gyre_megatron.config.scheduler import SchedulerConfig
from gyre_megatron.config.training import TrainingConfig
from gyre_megatron.config.weights import WeightsConfig
from gyre_megatron.errors import ConfigError


class GyreConfig(Section):
    """The whole configuration of a run."""

    run: RunConfig = Field(default_factory=RunConfig)
    model: ModelConfig
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
    """A config with the origin of each value: `origins["training.lr"] == "configs/demo.yaml"`."""

    def __init__(self, config: GyreConfig, origins: dict[str, str]) -> None:
        self.config = config
        self.origins = origins


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> LoadedConfig:
    """Read, compose and check a configuration file.

    Args:
        path: YAML file.
        overrides: `section.key=value` strings; the value is parsed as YAML.

    Raises:
        ConfigError: a file is missing or not YAML, a key is unknown, or a value has the wrong type
        or range.
    """
    values, origins = _compose(Path(path), ())
    for override in overrides:
        key, separator, text = override.partition("=")
        if not separator or not key:
            raise ConfigError(f"--set {override!r} is not of the form section.key=value")
        flat = {key.strip(): yaml.safe_load(text)}
        _merge(values, origins, _nest(flat), f"--set {key.strip()}")
    _refuse_unknown(values, GyreConfig, "")
    try:
        return LoadedConfig(GyreConfig.model_validate(values), origins)
    except ValidationError as error:
        raise ConfigError(_explain(error, origins, path)) from None


def _compose(path: Path, chain: tuple[Path, ...]) -> tuple[dict[str, Any], dict[str, str]]:
    if path.resolve() in chain:
        raise ConfigError(f"{path} names itself under base: {' -> '.join(map(str, chain))}")
    try:
        document = yaml.safe_load(path.read_text())
    except FileNotFoundError:
        raise ConfigError(f"no configuration file {path}; shipped ones are in configs/") from None
    except (yaml.YAMLError, UnicodeDecodeError, OSError) as error:
        raise ConfigError(f"{path} cannot be read as YAML: {error}") from None
    document = {} if document is None else document
    if not isinstance(document, dict):
        raise ConfigError(
            f"{path} holds a {type(document).__name__}; a mapping of sections was expected"
        )
    values: dict[str, Any] = {}
    origins: dict[str, str] = {}
    bases = document.pop("base", [])
    for base in [bases] if isinstance(bases, str) else bases:
        inner, inner_origins = _compose(path.parent / base, (*chain, path.resolve()))
        _merge(values, origins, inner, "", inner_origins)
    _merge(values, origins, document, str(path))
    return values, origins


def _merge(
    into: dict[str, Any],
    origins: dict[str, str],
    new: dict[str, Any],
    source: str,
    known: dict[str, str] | None = None,
) -> None:
    for key, value in _leaves(new):
        parent = into
        *path, last = key.split(".")
        for part in path:
            if not isinstance(parent.get(part), dict):
                parent[part] = {}
            parent = parent[part]
        parent[last] = value
        origins[key] = known[key] if known else source


def _leaves(values: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in values.items():
        if isinstance(value, dict) and value:
            yield from _leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _nest(flat: dict[str, Any]) -> dict[str, Any]:
    nested: dict[str, Any] = {}
    for key, value in flat.items():
        *path, last = key.split(".")
        parent = nested
        for part in path:
            parent = parent.setdefault(part, {})
        parent[last] = value
    return nested


def section_type(annotation: Any) -> type[BaseModel] | None:
    """The section class of a field, also behind `X | None`; None for plain values."""
    candidates = [annotation, *getattr(annotation, "__args__", ())]
    return next((c for c in candidates if isinstance(c, type) and issubclass(c, BaseModel)), None)


def _refuse_unknown(values: dict[str, Any], section: type[BaseModel], prefix: str) -> None:
    for key, value in values.items():
        field = section.model_fields.get(str(key))
        if field is None:
            near = difflib.get_close_matches(str(key), list(section.model_fields), n=1, cutoff=0.0)
            raise ConfigError(
                f"unknown key {prefix}{key}; did you mean {prefix}{near[0]}? "
                f"Valid here: {', '.join(section.model_fields)}"
            )
        inner = section_type(field.annotation)
        if inner is not None and isinstance(value, dict):
            _refuse_unknown(value, inner, f"{prefix}{key}.")


def _explain(error: ValidationError, origins: dict[str, str], path: str | Path) -> str:
    lines = []
    for item in error.errors():
        key = ".".join(map(str, item["loc"])) or "configuration"
        source = origins.get(key, str(path))
        lines.append(
            f"{key}: {item['msg']} (got {item.get('input')!r}, from {source})"
            if item["loc"] and item["type"] != "value_error"
            else f"{key}: {item['msg']} (from {source})"
        )
    return "; ".join(lines)
