"""What a decode worker has said and the client has not yet been told: bounded, and taken all at once.

As long as the client keeps up, each message is passed on as it came. While the last one is still being written, what
comes gathers here, and is then one message.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from router.merging import merged

MAX_BYTES = 256 * 1024  # of one answer: beyond it the worker is asked to wait


class Inbox:
    """One reader; event loop only. `pause` is told whether the worker is to wait, whenever that changes."""

    def __init__(self, pause: Callable[[bool], None]) -> None:
        self._pause = pause
        self._messages: list[bytes] = []
        self._num_bytes = 0
        self.has_room = asyncio.Event()
        self.has_room.set()
        self._error: Exception | None = None
        self._changed = asyncio.Event()
        self.ended = asyncio.Event()  # nothing comes any more

    @property
    def is_read_out(self) -> bool:
        """To an end that was none of error."""
        return self.ended.is_set() and self._error is None and not self._messages

    def put(self, message: bytes) -> None:
        self._messages.append(message)
        self._num_bytes += len(message)
        self._changed.set()
        if self._num_bytes > MAX_BYTES and self.has_room.is_set():
            self.has_room.clear()
            self._pause(True)

    def end(self, error: Exception | None = None) -> None:
        """What is here is read before the end, or the error, is. The first end counts."""
        if not self.ended.is_set():
            self._error = error
            self.ended.set()
            self._changed.set()

    async def read(self) -> bytes | None:
        """What has come, as one message if it can be; None at the end. Raises the error it was ended with."""
        while not self._messages:
            if self.ended.is_set():
                if self._error is not None:
                    raise self._error
                return None
            self._changed.clear()
            await self._changed.wait()
        message, num_merged = merged(self._messages)
        del self._messages[:num_merged]
        self._num_bytes = sum(map(len, self._messages))
        if not self._messages and not self.has_room.is_set():
            self.has_room.set()
            self._pause(False)
        return message
