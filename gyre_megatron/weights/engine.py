"""An SGLang server that takes weights, and how an install into it can end."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import msgspec

State = Literal["committed", "not committed", "unknown"]
"""Of a version: all ranks of the engine have it, none has it, or some may have it."""


class EngineHttp(Protocol):
    """What an install needs of the engine's HTTP client; `engines.client` has the real one."""

    @property
    def url(self) -> str: ...

    def post(
        self, path: str, body: Mapping[str, Any] | None = None, timeout_s: float = 120.0
    ) -> Any:
        """POST a JSON body and wait; EngineError where the engine refuses or does not answer."""

    def get(self, path: str, timeout_s: float = 30.0) -> Any:
        """GET and wait; EngineError where the engine refuses or does not answer."""


@dataclass(frozen=True)
class ServingEngine:
    """An SGLang server that takes weights.

    Attributes:
        http: its client.
        tp: its tensor-parallel size.
        loader: dotted name of the function that it runs in its own processes, as it was given to
            `--custom-weight-loader`.
    """

    http: EngineHttp
    tp: int
    loader: str


class Outcome(msgspec.Struct, frozen=True):
    """What is known after an install."""

    state: State
    problem: str = ""
    """What went wrong; empty after an install that went well."""
    served: str | None = None
    """The version that the engine says it serves, read back from it after a problem; None if it
    does not answer."""
    held: bool = False
    """Whether generation is still held, because the engine must not serve what it has."""
