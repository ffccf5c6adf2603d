"""Stands in for torchvision, which SGLang imports for its vision models only.

The published torchvision does not load beside a CPU build of torch. Every submodule of this one can
be imported and every name can be named (class bodies and annotations need that); calling one fails.
"""

import importlib.abc
import importlib.machinery
import sys
import types

__version__ = "0.0.0"


class _Missing(type):
    """Metaclass of placeholders: attributes of a placeholder are strings, as enum-like members are
    used."""

    def __getattr__(cls, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return f"{cls.__name__}.{name}"


def _placeholder(module, name):
    if name.startswith("__"):
        raise AttributeError(name)

    def refuse(self, *_args, **_kwargs):
        raise NotImplementedError(
            f"{module}.{name}: vision models cannot be served here, torchvision is absent"
        )

    return _Missing(name, (), {"__init__": refuse, "__module__": module})


class _PlaceholderModule(types.ModuleType):
    def __getattr__(self, name):
        return _placeholder(self.__name__, name)


class _Submodules(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, fullname, _path=None, _target=None):
        if not fullname.startswith(__name__ + "."):
            return None
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec):
        return _PlaceholderModule(spec.name)

    def exec_module(self, _module):
        """Nothing to run: the module's names come from __getattr__."""


sys.meta_path.insert(0, _Submodules())


def __getattr__(name):
    return _placeholder(__name__, name)
