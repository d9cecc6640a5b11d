"""The stream in which a worker answers all that this router has running there. A message of it is a step's tokens of
many answers: to read them one by one would take as much time as everything else that is done for a token.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import secrets
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager, suppress

import grpc.aio

from protos import decode_pb2
from protos.channel import service_errors
from protos.errors import ServiceError, Unavailable
from router.inbox import Inbox

logger = logging.getLogger(__name__)

_METHOD = "/pdserve.v1.Bundles/Open"
_OPENING_S = 1.0


class Bundle:
    """To one worker. Where it is not open, answers come in their own calls: a worker need not know bundles."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self.id = secrets.token_hex(8)
        self.is_open = self._has_opened = False
        self._error: ServiceError = Unavailable("it has ended its bundle of streams")
        self._answered = asyncio.Event()
        self._inboxes: dict[int, Inbox] = {}
        self._numbers = itertools.count(1)
        self._commands: asyncio.Queue[decode_pb2.BundleCommand] = asyncio.Queue()
        self._reading = asyncio.create_task(self._read(channel))

    @property
    def is_broken(self) -> bool:
        """It has ended, and another may be opened: not where a worker has refused to."""
        return self._reading.done() and (self._has_opened or isinstance(self._error, Unavailable))

    async def opened(self) -> bool:
        """Waits for it: a round trip, for whoever is first."""
        with suppress(TimeoutError):
            async with asyncio.timeout(_OPENING_S):
                await self._answered.wait()
        return self.is_open

    @contextmanager
    def stream(self) -> Iterator[tuple[int, Inbox]]:
        """For one answer: its number, and where it comes."""
        number = next(self._numbers)
        self._inboxes[number] = inbox = Inbox(lambda pause: self._pause(number, pause))
        try:
            yield number, inbox
        finally:
            del self._inboxes[number]

    async def close(self) -> None:
        self._reading.cancel()
        await asyncio.wait([self._reading])

    def _pause(self, number: int, pause: bool) -> None:
        """Where it is not open, an answer comes in its own call, which is read or not."""
        if self.is_open:
            self._commands.put_nowait(decode_pb2.BundleCommand(stream=number, pause=pause))

    async def _read(self, channel: grpc.aio.Channel) -> None:
        self._commands.put_nowait(decode_pb2.BundleCommand(bundle_id=self.id))
        opening: grpc.aio.StreamStreamMultiCallable[decode_pb2.BundleCommand, bytes] = channel.stream_stream(
            _METHOD, decode_pb2.BundleCommand.SerializeToString
        )
        call = opening(self._next_commands())
        try:
            with service_errors():
                while isinstance(raw := await call.read(), bytes):
                    self._take(raw)
        except ServiceError as error:
            self._error = error
            if not self.is_open and not isinstance(error, Unavailable):
                logger.warning("a worker takes no bundle, its answers come in their own calls: %s", error)
        finally:
            self.is_open = False
            self._answered.set()
            call.cancel()
            for inbox in self._inboxes.values():
                inbox.end(self._error)

    def _take(self, raw: bytes) -> None:
        self.is_open = self._has_opened = True
        self._answered.set()
        for part in decode_pb2.TokenBundle.FromString(raw).parts:
            inbox = self._inboxes.get(part.stream)
            if inbox is None:
                continue  # its reader has gone
            if part.message:
                inbox.put(part.message)
            if part.last:
                inbox.end()

    async def _next_commands(self) -> AsyncIterator[decode_pb2.BundleCommand]:
        while True:
            yield await self._commands.get()
