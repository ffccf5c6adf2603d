"""Which attempt of which execution a bearer token stands for.

Owned by the store, asked by the proxy for every request. A running execution has one token; the
file holds only its digest. Changed by the writer's thread after a commit; reads are one dictionary
look-up, from any thread.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Iterable

Attempt = tuple[str, int]
"""(execution id, number of the attempt)."""


def new_token() -> str:
    """A token that nobody can guess."""
    return f"gyre-{secrets.token_urlsafe(24)}"


def digest(token: str) -> bytes:
    """What the file keeps of a token. Requests may carry any text, lone surrogates included."""
    return hashlib.sha256(token.encode("utf-8", "surrogatepass")).digest()


class HarnessTokens:
    """Tokens of the executions that run.

    Args:
        issued: (digest, execution id, attempt) of each.
    """

    def __init__(self, issued: Iterable[tuple[bytes, str, int]] = ()) -> None:
        self._attempts: dict[bytes, Attempt] = {}
        self._digests: dict[str, bytes] = {}
        for token_digest, execution_id, attempt in issued:
            self.issue(token_digest, execution_id, attempt)

    def find(self, token: str) -> Attempt | None:
        """The attempt that a token stands for; None if it stands for nothing."""
        return self._attempts.get(digest(token))

    def issue(self, token_digest: bytes, execution_id: str, attempt: int) -> None:
        """An attempt started."""
        self._attempts[token_digest] = (execution_id, attempt)
        self._digests[execution_id] = token_digest

    def revoke(self, execution_id: str) -> None:
        """The execution ended."""
        self._attempts.pop(self._digests.pop(execution_id, b""), None)

    def revoke_all(self) -> None:
        """No execution runs any more."""
        self._attempts.clear()
        self._digests.clear()
