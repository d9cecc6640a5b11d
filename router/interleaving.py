"""Several answers at once, in the order in which they come."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence

from router.answering import Messages


async def interleaved(streams: Sequence[Messages]) -> AsyncGenerator[tuple[int, bytes], None]:
    """Messages with the index of their stream. No stream is more than one message ahead of the reader.

    The first failure ends all; closing it closes them.
    """
    reading: dict[asyncio.Task[bytes | None], int] = {}
    try:
        if len(streams) == 1:  # nothing to choose from
            async for message in streams[0]:
                yield 0, message
            return
        reading = {_read(stream): index for index, stream in enumerate(streams)}
        while reading:
            done, _ = await asyncio.wait(reading, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                index, following = reading.pop(task), task.result()
                if following is not None:
                    yield index, following
                    reading[_read(streams[index])] = index
    finally:
        for task in reading:
            task.cancel()
        await asyncio.gather(*reading, return_exceptions=True)
        for stream in streams:
            await stream.aclose()


def _read(stream: Messages) -> asyncio.Task[bytes | None]:
    """The next message; None at the end."""

    async def read() -> bytes | None:
        return await anext(stream, None)

    return asyncio.create_task(read())
