"""Answers on their way to the same router in one stream: what many sequences say in a step is one message, not many.

To write a message costs as much time as a small model's step for one sequence, whatever is in it. Who says something
waits until it has been written, so that its next message has all that was made meanwhile. Event loop only.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from typing import Any, cast

from decode.direct import Answer, DirectDecode, Readings
from protos import decode_pb2, decode_pb2_grpc, inference_pb2
from protos.calls import Context
from protos.errors import AlreadyExists, InvalidArgument, Unavailable
from protos.serve import GrpcServer

_MAX_ID_BYTES = 128
_FULL_BYTES = 2**20  # what comes beyond it is for the next message; one alone may be larger


class Bundle:
    """One writer takes what any number of answers say."""

    def __init__(self) -> None:
        self._parts = decode_pb2.TokenBundle()
        self._num_bytes = 0  # of the messages in it
        self._filled = asyncio.Event()
        self._written = asyncio.Event()  # of what is in _parts
        self._going_on: dict[int, asyncio.Event] = {}  # by stream: not set while it is paused
        self._is_closed = False

    async def send_all(self, number: int, answer: Answer) -> None:
        """Raises AlreadyExists; Unavailable if nobody reads the bundle any more; and what `answer` raises."""
        if number in self._going_on:
            raise AlreadyExists(f"stream {number} of this bundle is in use", field="stream")
        self._going_on[number] = going_on = asyncio.Event()
        going_on.set()
        try:
            has_ended = False
            async for message in answer:
                await going_on.wait()
                has_ended = message.finish_reason != inference_pb2.FINISH_REASON_UNSPECIFIED
                await self._send(number, message.SerializeToString(), is_last=has_ended)
            if not has_ended:  # it goes on elsewhere
                await self._send(number, b"", is_last=True)
        finally:
            del self._going_on[number]

    async def _send(self, number: int, message: bytes, *, is_last: bool) -> None:
        """Returns once it has been written."""
        while not self._is_closed and 0 < self._num_bytes > _FULL_BYTES - len(message):
            await self._written.wait()
        if not self._is_closed:
            self._parts.parts.add(stream=number, message=message, last=is_last)
            self._num_bytes += len(message)
            self._filled.set()
            await self._written.wait()
        if self._is_closed:
            raise Unavailable("the router's bundle of streams has ended")

    def pause(self, number: int, pause: bool) -> None:
        """Nothing happens if the answer has ended."""
        if (going_on := self._going_on.get(number)) is not None:
            if pause:
                going_on.clear()
            else:
                going_on.set()

    async def messages(self) -> AsyncGenerator[decode_pb2.TokenBundle, None]:
        """An empty one, then each time what has gathered. When it is closed, so is the bundle."""
        written = asyncio.Event()
        try:
            yield decode_pb2.TokenBundle()
            while True:
                await self._filled.wait()
                self._filled.clear()
                parts, self._parts, self._num_bytes = self._parts, decode_pb2.TokenBundle(), 0
                written, self._written = self._written, asyncio.Event()
                yield parts
                written.set()
        finally:
            self._is_closed = True
            for event in (written, self._written, *self._going_on.values()):
                event.set()


class Bundles(decode_pb2_grpc.BundlesServicer):
    """Those that routers have opened here, by id."""

    def __init__(self) -> None:
        self._bundles: dict[str, Bundle] = {}

    def get(self, bundle_id: str) -> Bundle | None:
        return self._bundles.get(bundle_id)

    async def Open(
        self, request_iterator: AsyncIterator[decode_pb2.BundleCommand], context: Context
    ) -> AsyncGenerator[decode_pb2.TokenBundle, None]:
        first = await anext(request_iterator, None)
        bundle_id = "" if first is None else first.bundle_id
        if not 1 <= len(bundle_id.encode()) <= _MAX_ID_BYTES:
            raise InvalidArgument(f"bundle_id must have 1 to {_MAX_ID_BYTES} bytes", field="bundle_id")
        if bundle_id in self._bundles:
            raise AlreadyExists(f"bundle {bundle_id!r} is open already", field="bundle_id")
        self._bundles[bundle_id] = bundle = Bundle()
        obeying = asyncio.create_task(_obey(bundle, request_iterator))
        try:
            async with aclosing(bundle.messages()) as messages:
                async for parts in messages:
                    yield parts
        finally:
            del self._bundles[bundle_id]
            obeying.cancel()
            await asyncio.wait([obeying])


class BundledDecode:
    """A Decode service whose answers go into the bundles that are named; all else is `inner`'s."""

    def __init__(self, inner: decode_pb2_grpc.DecodeServicer, bundles: Bundles) -> None:
        self._inner = inner
        self._bundles = bundles

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    async def Decode(
        self, request: decode_pb2.DecodeRequest, context: Context
    ) -> AsyncGenerator[inference_pb2.GenerateResponse, None]:
        bundle = self._bundles.get(request.bundle_id)
        async with aclosing(cast("Answer", self._inner.Decode(request, context))) as answer:
            if bundle is not None:
                await bundle.send_all(request.stream, answer)
                return
            async for message in answer:
                yield message


def serve_decode(server: GrpcServer, decode: decode_pb2_grpc.DecodeServicer) -> None:
    """Adds the service, with bundles, and with what clients read here themselves."""
    bundles, readings = Bundles(), Readings()
    server.add(decode_pb2_grpc.add_BundlesServicer_to_server, bundles)
    server.add(decode_pb2_grpc.add_DirectServicer_to_server, readings)
    direct = cast("decode_pb2_grpc.DecodeServicer", DirectDecode(decode, readings))
    bundled = cast("decode_pb2_grpc.DecodeServicer", BundledDecode(direct, bundles))
    server.add(decode_pb2_grpc.add_DecodeServicer_to_server, bundled)


async def _obey(bundle: Bundle, commands: AsyncIterator[decode_pb2.BundleCommand]) -> None:
    async for command in commands:
        bundle.pause(command.stream, command.pause)
