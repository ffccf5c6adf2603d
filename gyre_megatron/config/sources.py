"""Reads YAML files and `--set` words, and merges them into one tree of values with their origins.

Called by the loader only, which knows what the values mean. Invariant: whatever a file holds, what
comes out is a plain tree of mappings, or one `ConfigError` that names file and line.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml

from gyre_megatron.config.base import expand_user
from gyre_megatron.errors import ConfigError
from gyre_megatron.shipped import find_config, shipped_names

Key = tuple[str, ...]
"""The place of a value: one entry a level."""


class Values:
    """Values merged so far, and where each came from.

    Attributes:
        tree: nested mappings.
        origins: source of each leaf, by its place.
    """

    def __init__(self) -> None:
        self.tree: dict[str, Any] = {}
        self.origins: dict[Key, str] = {}

    def merge(self, new: dict[str, Any], source: str) -> None:
        """Lay `new` over what is there. Mappings merge key by key; all else replaces."""
        self._merge(self.tree, new, (), lambda key: source)

    def merge_values(self, other: Values) -> None:
        """Lay another file's values over these; they keep their origins."""
        self._merge(self.tree, other.tree, (), other.origins.__getitem__)

    def _merge(
        self, into: dict[str, Any], new: dict[str, Any], prefix: Key, origin: Callable[[Key], str]
    ) -> None:
        for name, value in new.items():
            key = (*prefix, name)
            if not isinstance(value, dict):
                into[name] = value
                self.origins[key] = origin(key)
                continue
            if not isinstance(into.get(name), dict):
                into[name] = {}
            if not value and not into[name]:
                self.origins[key] = origin(key)
            self._merge(into[name], value, key, origin)


def compose(path: Path, chain: tuple[Path, ...] = ()) -> Values:
    """A file over the files that its `base:` names, later ones over earlier ones.

    Raises:
        ConfigError: a file is missing, unreadable or no mapping, or names itself.
    """
    identity = Path(os.path.realpath(path))
    if identity in chain:
        raise ConfigError(f"{path} names itself under base: {' -> '.join(map(str, chain))}")
    document = _read(path, chain)
    bases = _bases(document.pop("base", []), path)
    values = Values()
    for base in bases:
        beside = path.parent / base
        named = find_config(base)  # a shipped file, or not there: then the one beside is named
        found = beside if os.path.lexists(beside) or not named.exists() else named
        values.merge_values(compose(found, (*chain, identity)))
    values.merge(document, str(path))
    return values


def _bases(named: Any, path: Path) -> list[Path]:
    bases = [named] if isinstance(named, str) else named
    if not isinstance(bases, list) or not all(isinstance(b, str) and b for b in bases):
        raise ConfigError(
            f"{path}: base is {named!r}; the name of a file or a list of names was expected, "
            "relative to this file"
        )
    try:
        return [expand_user(base) for base in bases]
    except ValueError as error:
        raise ConfigError(f"{path}: base: {error}") from None


def _read(path: Path, chain: tuple[Path, ...]) -> dict[str, Any]:
    named_by = f" (named by base: of {chain[-1]})" if chain else ""
    if not os.path.lexists(path):
        raise ConfigError(
            f"no configuration file {path}{named_by}; shipped ones are {', '.join(shipped_names())}"
        )
    return read_mapping(path, "a mapping of sections", named_by)


def read_mapping(path: Path, expected: str, note: str = "") -> dict[str, Any]:
    """The mapping that a YAML file holds; an empty file holds an empty one.

    Args:
        path: the file.
        expected: what the mapping is, in words, for the error message.
        note: follows the file's name in error messages.

    Raises:
        ConfigError: it cannot be read, is no YAML, or holds something else.
    """
    if path.is_dir():
        raise ConfigError(f"{path}{note} is a directory; name a YAML file in it")
    try:
        text = path.read_bytes()
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise ConfigError(f"{path}{note} cannot be read: {reason}") from None
    document = parse_yaml(text, f"{path}{note}")
    if document is None:
        return {}
    if not isinstance(document, dict):
        raise ConfigError(
            f"{path}{note} holds a {type(document).__name__}; {expected} was expected"
        )
    return document


def parse_override(word: str) -> tuple[dict[str, Any], str]:
    """`section.key=value` as a tree with one leaf, and the name of its origin.

    Raises:
        ConfigError: it has no `=`, a part of the key is empty, or the value is not YAML.
    """
    key, separator, text = word.partition("=")
    parts = key.strip().split(".")
    if not separator or not all(parts):
        raise ConfigError(f"--set {word!r} is not of the form section.key=value")
    value = parse_yaml(text, f"--set {key.strip()}: the value {text!r}")
    for part in reversed(parts):
        value = {part: value}
    return value, f"--set {key.strip()}"


def parse_yaml(text: str | bytes, name: str) -> Any:
    """One YAML document, read strictly: a key may stand only once in a mapping.

    Raises:
        ConfigError: it cannot be read; the message names `name`, the line and the reason.
    """
    try:
        return yaml.load(text, _StrictLoader)
    except yaml.MarkedYAMLError as error:
        reason = " ".join(part for part in (error.context, error.problem) if part)
        mark = error.problem_mark
        where = f" (line {mark.line + 1}, column {mark.column + 1})" if mark is not None else ""
        hint = "; put text with special characters in quotes" if isinstance(text, str) else ""
        raise ConfigError(f"{name} cannot be read as YAML: {reason}{where}{hint}") from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        # ValueError: a date or number that YAML's grammar allows and Python does not (2024-13-45).
        reason = "nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise ConfigError(f"{name} cannot be read as YAML: {' '.join(reason.split())}") from None


class _StrictLoader(yaml.SafeLoader):
    """YAML's safe subset, without repeated keys and without values that hold themselves."""

    def get_single_node(self) -> yaml.Node | None:
        """The document's root, after the checks that construction would not make."""
        root = super().get_single_node()
        if root is not None:
            _check(root, [], set())
        return root

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        """Keys are text as it was written: to a person `on`, `1` and `"1"` are names, not True or
        a number."""
        self.flatten_mapping(node)  # `<<: *anchor`
        return {key.value: self.construct_object(value, deep=True) for key, value in node.value}


def _check(node: yaml.Node, above: list[yaml.Node], checked: set[int]) -> None:
    if node in above:
        raise _error("an anchor is used inside its own value", node)
    if id(node) in checked:  # an alias; checking it again could take exponential time
        return
    checked.add(id(node))
    above.append(node)
    for child in _children(node):
        _check(child, above, checked)
    above.pop()


def _children(node: yaml.Node) -> list[yaml.Node]:
    if isinstance(node, yaml.SequenceNode):
        return node.value
    if not isinstance(node, yaml.MappingNode):
        return []
    first: dict[str, yaml.Node] = {}
    for key, _ in node.value:
        if not isinstance(key, yaml.ScalarNode):
            raise _error("a list or mapping cannot be a key", key)
        before = first.setdefault(key.value, key)
        if before is not key:
            line = before.start_mark.line + 1
            raise _error(f"key {key.value!r} stands twice, first in line {line}", key)
    return [value for _, value in node.value]


def _error(problem: str, node: yaml.Node) -> yaml.constructor.ConstructorError:
    return yaml.constructor.ConstructorError(None, None, problem, node.start_mark)
