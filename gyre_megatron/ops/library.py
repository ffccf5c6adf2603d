"""Loads the native extension; every module of `ops` imports this first."""

from __future__ import annotations

import importlib

import torch  # noqa: F401  (its symbols must be loaded before the extension's)


def load() -> None:
    """Register the operators of csrc/ under `torch.ops.gyre`.

    Raises:
        ImportError: the extension was not built for this interpreter.
    """
    try:
        importlib.import_module("gyre_megatron._C")
    except ImportError as error:
        raise ImportError(
            f"the native extension gyre_megatron._C cannot be loaded ({error}); build it with "
            "`make build`"
        ) from error


load()
