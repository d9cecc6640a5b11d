"""What a person is told while processes start and end: lines that stay, and one that says what is waited for.

It knows no process: whoever waits says what to show.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Protocol

from rich.console import Console
from rich.status import Status
from rich.text import Text

_NAME_WIDTH, _SPINNER_WIDTH = 12, 3
_REFRESH_S = 0.25
_FIRST_LINE_S, _LINE_EVERY_S = 1.0, 10.0  # where lines cannot be written over; what is over sooner is not told


class Progress(Protocol):
    def became(self, name: str, text: str) -> None:
        """A process called `name` is ready, has ended, ..."""

    def waiting(self, text: str) -> None:
        """Said again and again while it lasts. An empty text ends it."""


class Silent:
    """Implements `Progress` for programs."""

    def became(self, name: str, text: str) -> None:
        """Nobody looks."""

    def waiting(self, text: str) -> None:
        """Nobody waits."""


class ConsoleProgress:
    """Implements `Progress`. On a terminal one line is written again and again, elsewhere some are added."""

    def __init__(self, console: Console, clock: Callable[[], float] = time.monotonic) -> None:
        self._console = console
        self._clock = clock
        self._began_at: float | None = None
        self._tell_at = 0.0
        self._status: Status | None = None

    def became(self, name: str, text: str) -> None:
        self._console.print(f"  {name:<{_NAME_WIDTH}}{text}", soft_wrap=True, markup=False)  # a log may hold brackets

    def waiting(self, text: str) -> None:
        if not text:
            self._end()
            return
        now = self._clock()
        if self._began_at is None:
            self._began_at, self._tell_at = now, now + _FIRST_LINE_S
        line = f"{now - self._began_at:.0f} s  {text}"
        if self._console.is_terminal and not self._console.is_dumb_terminal:
            self._write_over(line)
        elif now >= self._tell_at:
            self._tell_at = now + _LINE_EVERY_S
            self._console.print(f"  {line}", soft_wrap=True, markup=False)

    def _write_over(self, line: str) -> None:
        text = Text(line)
        text.truncate(self._console.width - _SPINNER_WIDTH, overflow="ellipsis")
        if self._status is None:
            self._status = self._console.status(text)
            self._status.start()
        else:
            self._status.update(text)

    def _end(self) -> None:
        self._began_at = None
        if self._status is not None:
            self._status.stop()
            self._status = None


@asynccontextmanager
async def shown(progress: Progress, describe: Callable[[], Awaitable[str]]) -> AsyncIterator[None]:
    """While the body runs, what `describe` says is what is waited for."""

    async def repeat() -> None:
        while True:
            progress.waiting(await describe())
            await asyncio.sleep(_REFRESH_S)

    repeating = asyncio.create_task(repeat())
    try:
        yield
    finally:
        repeating.cancel()
        await asyncio.wait([repeating])
        progress.waiting("")
        if not repeating.cancelled():
            repeating.result()  # `describe` failed
