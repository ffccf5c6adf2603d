"""Extension points: a configuration field that names one of ours, or somebody's own
`module:function`.

The only loader of such names. A room that can be extended owns an `ExtensionPoint` beside its own
implementations and calls `load`; everything is loaded before a run starts, so a wrong name never
ends a run that is under way.
"""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any, Generic, TypeVar

from gyre_megatron.errors import ConfigError
from gyre_megatron.shipped import find_file

Hook = TypeVar("Hook", bound=Callable[..., Any])


@dataclass(frozen=True)
class ExtensionPoint(Generic[Hook]):
    """One thing that users can bring themselves.

    Attributes:
        key: the configuration field that names it.
        parameters: positional parameters that a hook is called with, in order; the contract.
        builtin: our own, by name.
        returns: what a hook gives back, in words, for the error message.
    """

    key: str
    parameters: tuple[str, ...]
    builtin: Mapping[str, Hook] = field(default_factory=dict)
    returns: str = ""

    def load(self, name: str) -> Hook:
        """The hook that `name` stands for.

        Args:
            name: a name of `builtin`, `package.module:function`, or `path/to/file.py:function`.

        Raises:
            ConfigError: there is no such hook, or it cannot be called with `parameters`.
        """
        if name in self.builtin:
            return self.builtin[name]
        if ":" not in name:
            near = difflib.get_close_matches(name, list(self.builtin), n=1, cutoff=0.0)
            meant = f"; did you mean {near[0]}?" if near else ";"
            ours = f" Ours: {', '.join(self.builtin)}." if self.builtin else ""
            raise ConfigError(
                f"{self.key}: unknown name {name!r}{meant}{ours} Your own is written "
                "package.module:function "
                "or path/to/file.py:function"
            )
        hook = load_reference(name, self.key)
        self._check_signature(name, hook)
        return hook

    def _check_signature(self, name: str, hook: Any) -> None:
        if not callable(hook):
            raise ConfigError(
                f"{self.key}: {name} is a {type(hook).__name__}; a function or class was expected"
            )
        try:
            inspect.signature(hook).bind(*self.parameters)
        except TypeError as error:
            returns = f" -> {self.returns}" if self.returns else ""
            raise ConfigError(
                f"{self.key}: {name}{inspect.signature(hook)} cannot be called as "
                f"({', '.join(self.parameters)}){returns}: {error}"
            ) from None


def load_reference(name: str, key: str) -> Any:
    """The object that `package.module:attribute` or `path/to/file.py:attribute` names.

    Raises:
        ConfigError: the module does not import, or has no such attribute; `key` says which field
        named it.
    """
    where, _, attribute = name.rpartition(":")
    try:
        module = (
            _load_file(find_file(Path(where).expanduser()))
            if where.endswith(".py")
            else importlib.import_module(where)
        )
    except Exception as error:  # whatever somebody's module raises while it is imported
        raise ConfigError(
            f"{key}: {where} cannot be imported: {type(error).__name__}: {error}"
        ) from error
    if not hasattr(module, attribute):
        public = [name for name in vars(module) if not name.startswith("_")]
        near = difflib.get_close_matches(attribute, public, n=1, cutoff=0.0)
        raise ConfigError(
            f"{key}: {where} has no {attribute!r}"
            + (f"; did you mean {where}:{near[0]}?" if near else "")
        )
    return getattr(module, attribute)


def _load_file(path: Path) -> ModuleType:
    if not path.is_file():
        raise FileNotFoundError(f"no file {path} (relative paths start at the working directory)")
    name = f"gyre_extension_{path.resolve().as_posix().replace('/', '_')}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None  # a .py file always has both
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and pickle look their module up by name
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module
