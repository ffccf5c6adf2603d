"""One attribute of another library that the CPU layer replaces, and how it is put in and taken out.

The tables of `cuda_stand_ins` and `megatron_assumptions` are made of `Patch`; `enable_cpu` applies
them and its report keeps what was there before. Invariant: nothing outside these tables is changed,
which a test checks against snapshots of torch and Megatron.
"""

from __future__ import annotations

import functools
import pkgutil
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

_MISSING = object()


@dataclass(frozen=True)
class Patch:
    """A declared replacement.

    Attributes:
        owner: module or class, as `package.module` or `package.module:Class`.
        name: attribute of the owner.
        make: what was there (None if nothing) -> what is put there.
        assumption: what Megatron takes for granted that does not hold on a CPU.
    """

    owner: str
    name: str
    make: Callable[[Any], Any]
    assumption: str

    @property
    def target(self) -> str:
        """The full name, e.g. `torch.Tensor.type`."""
        return f"{self.owner.replace(':', '.')}.{self.name}"

    def apply(self) -> AppliedPatch:
        """Put the replacement in."""
        owner = pkgutil.resolve_name(self.owner)
        own = vars(owner).get(self.name, _MISSING)  # torch.Tensor inherits most of its methods
        setattr(owner, self.name, self.make(getattr(owner, self.name, None)))
        return AppliedPatch(self, owner, own)


@dataclass(frozen=True)
class AppliedPatch:
    """A replacement that is in place."""

    patch: Patch
    owner: Any
    own: Any
    """What the owner itself held: not an inherited attribute."""

    def undo(self) -> None:
        """Put back what was there."""
        if self.own is _MISSING:
            delattr(self.owner, self.patch.name)
        else:
            setattr(self.owner, self.patch.name, self.own)


def called_by_megatron(depth: int) -> bool:
    """Whether the function `depth` frames above the caller belongs to Megatron."""
    name = sys._getframe(depth + 1).f_globals.get("__name__", "")
    return name == "megatron" or name.startswith("megatron.")


def for_megatron(
    original: Callable[..., Any], substitute: Callable[..., Any]
) -> Callable[..., Any]:
    """`substitute` for calls from Megatron's modules, `original` for everybody else.

    Megatron's assumptions are Megatron's: a user's `torch.zeros(1, device="cuda")` still fails as
    torch fails, and `torch.ones(1).type()` still tells the truth.
    """

    @functools.wraps(original)
    def choose(*args: Any, **kwargs: Any) -> Any:
        # While torch.compile traces, frames are not real; nothing of Megatron is compiled here.
        if torch.compiler.is_compiling() or not called_by_megatron(1):
            return original(*args, **kwargs)
        return substitute(*args, **kwargs)

    return choose
