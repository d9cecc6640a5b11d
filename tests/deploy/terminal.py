"""A process on a terminal of its own: what it shows, and what is typed to it."""

from __future__ import annotations

import codecs
import fcntl
import os
import pty
import re
import select
import signal
import subprocess
import sys
import termios
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


class Terminal:
    def __init__(self, process: subprocess.Popen[bytes], fd: int) -> None:
        self.process = process
        self.shown = ""
        self._fd = fd
        self._decode = codecs.getincrementaldecoder("utf-8")().decode
        self._cut_off = ""  # the beginning of an escape sequence whose end has not been read

    def type(self, text: str) -> None:
        os.write(self._fd, text.encode())

    def read_until(self, pattern: str, within_s: float = 60.0) -> str:
        """What is shown from here on, up to and with the pattern; that is then done with."""
        deadline = time.monotonic() + within_s
        while not (found := re.search(pattern, self.shown)):
            assert select.select([self._fd], [], [], max(0.0, deadline - time.monotonic()))[0], self.shown
            with suppress(OSError):  # nobody has the terminal open any more
                if raw := os.read(self._fd, 65536):
                    text = re.sub(r"\x1b(\[[0-9;?]*[A-Za-z]|[=>])", "", self._cut_off + self._decode(raw))
                    self._cut_off = cut[0] if (cut := re.search(r"\x1b(\[[0-9;?]*)?$", text)) else ""
                    self.shown += text[: len(text) - len(self._cut_off)]
                    continue
            raise AssertionError(f"it ended and had shown {self.shown}")
        seen, self.shown = self.shown[: found.end()], self.shown[found.end() :]
        return seen

    def wait(self) -> int:
        """The exit code. What is still shown is thrown away."""
        with suppress(OSError):
            while os.read(self._fd, 65536):
                pass
        return self.process.wait(60)


@contextmanager
def on_terminal(*arguments: str, environment: Mapping[str, str] | None = None) -> Iterator[Terminal]:
    """`pdserve` with these arguments; killed at the end, if it still runs."""
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "deploy.cli", *arguments]
    variables = {**os.environ, "TERM": "xterm", "COLUMNS": "80", **(environment or {})}
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        env=variables,
        start_new_session=True,
        preexec_fn=_take_terminal,
    )
    os.close(theirs)
    try:
        yield Terminal(process, ours)
    finally:
        process.kill()
        process.wait()
        os.close(ours)


def _take_terminal() -> None:
    """Ctrl-C then is a signal, and one that counts: what is started in the background inherits that it is ignored."""
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)
    signal.signal(signal.SIGINT, signal.SIG_DFL)
