"""What files say, read again when they have changed: certificates, secrets and keys are replaced while we serve."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Generic, TypeVar

logger = logging.getLogger(__name__)

T = TypeVar("T")

LOOK_S = 1.0  # how soon a change is seen


class Watched(Generic[T]):
    """Looks when it is asked, at most once in LOOK_S, and compares contents: times of files are too coarse for it.

    What cannot be used is told once, without what it says, and what was said before holds on. For any thread: gRPC asks
    from threads of its own.
    """

    def __init__(self, paths: Sequence[Path], parse: Callable[[Sequence[bytes]], T]) -> None:
        """Raises OSError naming a file that cannot be read, and what `parse` raises, which is a ValueError."""
        self._paths = paths
        self._parse = parse
        self._lock = threading.Lock()
        self._contents = _read(paths)
        self._value = parse(self._contents)
        self._looked_at = time.monotonic()
        self._problem = ""

    @property
    def value(self) -> T:
        with self._lock:
            if time.monotonic() - self._looked_at >= LOOK_S:
                self._look()
                self._looked_at = time.monotonic()
            return self._value

    def _look(self) -> None:
        try:
            contents = _read(self._paths)
            if contents != self._contents:
                self._value, self._contents = self._parse(contents), contents
                logger.info("%s read anew", _names(self._paths))
            self._problem = ""
        except (OSError, ValueError) as error:
            if str(error) != self._problem:
                self._problem = str(error)
                logger.error("%s; what was read before holds on", error)


def _read(paths: Sequence[Path]) -> list[bytes]:
    return [read_file(path) for path in paths]


def read_file(path: Path) -> bytes:
    """Raises OSError that names the file and the reason, in words that need no errno."""
    try:
        return path.read_bytes()
    except OSError as error:
        raise OSError(f"{path} cannot be read: {error.strerror or error}") from error


def _names(paths: Sequence[Path]) -> str:
    return ", ".join(map(str, paths))
