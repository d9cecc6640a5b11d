"""The tokens of one sequence on their way to its stream: the scheduler puts, the service takes what has gathered."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

from model.runner import SampledToken


class Outbox:
    """One producer, one consumer, same event loop. Bounded by the sequence's own max_tokens."""

    def __init__(self) -> None:
        self._tokens: list[SampledToken] = []
        self._closed = False
        self._error: Exception | None = None
        self._changed = asyncio.Event()

    def put(self, token: SampledToken) -> None:
        self._tokens.append(token)
        self._changed.set()

    def close(self, error: Exception | None = None) -> None:
        """No more tokens. With an error, what is still in the box is delivered first."""
        self._closed = True
        self._error = error
        self._changed.set()

    async def batches(self) -> AsyncIterator[tuple[list[SampledToken], bool]]:
        """Yields (tokens, is_last): all that gathered since the last look: a slow reader gets fewer, larger ones.

        Raises the error the box was closed with.
        """
        while True:
            await self._changed.wait()
            self._changed.clear()
            tokens, self._tokens = self._tokens, []
            is_last = self._closed and self._error is None
            if tokens or is_last:
                yield tokens, is_last
            if self._error is not None:
                raise self._error
            if is_last:
                return
