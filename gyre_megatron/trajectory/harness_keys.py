"""Which attempt of which execution a harness's key (a bearer token) stands for.

Owned by the store, asked by the proxy for every request. A running execution has one key; the file
holds only its digest. Changed by the writer's thread after a commit; reads are one dictionary
look-up, from any thread.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Iterable

Attempt = tuple[str, int]
"""(execution id, number of the attempt)."""


def new_key() -> str:
    """A key that nobody can guess."""
    return f"gyre-{secrets.token_urlsafe(24)}"


def key_digest(key: str) -> bytes:
    """What the file keeps of a key. Requests may carry any text, lone surrogates included."""
    return hashlib.sha256(key.encode("utf-8", "surrogatepass")).digest()


class HarnessKeys:
    """Keys of the executions that run.

    Args:
        issued: (digest, execution id, attempt) of each.
    """

    def __init__(self, issued: Iterable[tuple[bytes, str, int]] = ()) -> None:
        self._attempts: dict[bytes, Attempt] = {}
        self._digests: dict[str, bytes] = {}
        for digest, execution_id, attempt in issued:
            self.issue(digest, execution_id, attempt)

    def find(self, key: str) -> Attempt | None:
        """The attempt that a key stands for; None if it stands for nothing."""
        return self._attempts.get(key_digest(key))

    def issue(self, digest: bytes, execution_id: str, attempt: int) -> None:
        """An attempt started."""
        self._attempts[digest] = (execution_id, attempt)
        self._digests[execution_id] = digest

    def revoke(self, execution_id: str) -> None:
        """The execution ended."""
        self._attempts.pop(self._digests.pop(execution_id, b""), None)

    def revoke_all(self) -> None:
        """No execution runs any more."""
        self._attempts.clear()
        self._digests.clear()
