"""A folder for the logs of one run, in the system's folder for temporary files. It goes with its owner.

An owner killed with SIGKILL cannot remove its folder: whoever makes the next one does. A lock that the system drops
with the process tells who is alive, also where process ids do not: they are used again, and containers share folders.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import IO

_PREFIX = "pdserve-"
_OWNER = ".owner"  # held locked while the owner lives


class LogFolder:
    """Made at once; `remove` it. Failing that, it is removed when the interpreter ends."""

    def __init__(self) -> None:
        remove_left_behind()
        self._folder = tempfile.TemporaryDirectory(prefix=_PREFIX)
        self.path = Path(self._folder.name)
        self._lock = _locked(self.path)

    def remove(self) -> None:
        self._folder.cleanup()
        self._lock.close()


def remove_left_behind() -> None:
    """Removes this user's folders whose owners are gone. What it cannot remove it leaves."""
    for folder in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*"):
        with suppress(OSError):
            if folder.is_symlink() or folder.stat().st_uid != os.getuid():
                continue
            with (folder / _OWNER).open("rb") as lock:  # none: a folder that is being made, or not one of these
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)


def _locked(folder: Path) -> IO[bytes]:
    """The lock file gets its name only when it is locked: in between, others would take its owner for dead."""
    unnamed = folder / f"{_OWNER}-new"
    lock = unnamed.open("wb")
    fcntl.flock(lock, fcntl.LOCK_EX)
    unnamed.rename(folder / _OWNER)
    return lock
