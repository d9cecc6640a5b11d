"""The secret that the routers and workers of one cluster share: by it they know each other, with TLS or without."""

from __future__ import annotations

import hashlib
import hmac
import re
from collections.abc import Sequence
from pathlib import Path

from protos.watched import Watched

MIN_CHARACTERS = 32
_USABLE = re.compile(r"[!-~]+")  # it travels as a header


class ClusterSecret:
    """A line of a file, of at least 32 printable characters. Of several lines the first is shown to others, and all are
    taken from them: a new one goes below the old, everywhere, then above it, then alone.
    """

    def __init__(self, path: Path) -> None:
        """Raises OSError or ValueError, naming the file."""
        self._path = path
        self._lines = Watched([path], self._parsed)

    def __repr__(self) -> str:
        return f"ClusterSecret({str(self._path)!r})"

    @property
    def current(self) -> str:
        return self._lines.value[0]

    def is_known(self, shown: str) -> bool:
        """In a time that does not depend on what was shown: digests are compared, and each of them."""
        digest = _digest(shown)
        return any([hmac.compare_digest(digest, _digest(line)) for line in self._lines.value])

    def _parsed(self, contents: Sequence[bytes]) -> tuple[str, ...]:
        lines = tuple(contents[0].decode("utf-8", "replace").split())
        if not lines:
            raise ValueError(f"{self._path} is empty: make a secret with `openssl rand -hex 32`")
        for line in lines:
            if len(line) < MIN_CHARACTERS or not _USABLE.fullmatch(line):
                raise ValueError(
                    f"{self._path}: a secret is a line of at least {MIN_CHARACTERS} printable ASCII characters without "
                    "spaces, such as `openssl rand -hex 32` makes"
                )
        return lines


def _digest(text: str) -> bytes:
    return hashlib.sha256(text.encode()).digest()
