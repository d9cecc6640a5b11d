"""A link that can be cut: connections stay open on both sides, and nothing passes until it is whole again."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

_PART_BYTES = 64 * 1024


class Cuttable:
    """Listens at one socket and passes on to another. `is_whole` is set unless it is cut."""

    def __init__(self, target: Path) -> None:
        self.is_whole = asyncio.Event()
        self.is_whole.set()
        self._target = target
        self._passing: set[asyncio.Task[None]] = set()

    async def _take(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        far_reader, far_writer = await asyncio.open_unix_connection(self._target)
        for source, sink in ((reader, far_writer), (far_reader, writer)):
            task = asyncio.create_task(self._pass_on(source, sink))
            self._passing.add(task)
            task.add_done_callback(self._passing.discard)

    async def _pass_on(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        try:
            while part := await source.read(_PART_BYTES):
                await self.is_whole.wait()
                sink.write(part)
                await sink.drain()
        except ConnectionError:
            pass
        finally:
            sink.close()

    async def close(self) -> None:
        for task in self._passing:
            task.cancel()
        await asyncio.gather(*self._passing, return_exceptions=True)


@asynccontextmanager
async def cuttable(path: Path, target: Path) -> AsyncIterator[Cuttable]:
    link = Cuttable(target)
    server = await asyncio.start_unix_server(link._take, path)
    try:
        yield link
    finally:
        server.close()
        await link.close()
