"""An answer that its client reads at the worker that makes it. The router tells where, and when it has ended."""

from __future__ import annotations

import asyncio
import time
from contextlib import aclosing
from dataclasses import dataclass
from typing import TypeAlias

import grpc.aio

from protos import decode_pb2, decode_pb2_grpc
from protos import inference_pb2 as pb
from protos.channel import open_channel, service_errors
from protos.credentials import Credentials
from protos.errors import DeadlineExceeded, Internal, Interrupted, ServiceError
from protos.resuming import Asked, Stream, generated
from protos.routers import Router

_MAX_WAITING = 256  # messages of a worker that have come and whose turn has not
_AVOIDED_S = 30.0
_MAX_IN_VAIN = 2  # in a row: one worker may just have died, whom its router will not name again


@dataclass(frozen=True, slots=True)
class _Read:
    """A worker has said all that it will. Whether more is to come from another, the router tells."""

    error: ServiceError


Event: TypeAlias = "pb.GenerateResponse | ServiceError | _Read"


class Direct:
    """`answer` is a `protos.resuming.Ask`. Workers are shown a permit, and no key."""

    def __init__(self, credentials: Credentials | None) -> None:
        self._credentials = credentials
        self._channels: dict[str, grpc.aio.Channel] = {}  # to workers, by address
        self._avoided_until = 0.0
        self._num_in_vain = 0

    async def close(self) -> None:
        await asyncio.gather(*(channel.close() for channel in self._channels.values()))

    async def answer(self, router: Router, request: Asked, timeout_s: float | None) -> Stream:
        """For a while through the router, where workers could not be read from: they may be out of our reach."""
        is_avoided = time.monotonic() < self._avoided_until
        source = generated(router, request, timeout_s) if is_avoided else self._messages(router, request, timeout_s)
        async with aclosing(source):
            async for message in source:
                yield message

    async def _messages(self, router: Router, request: Asked, timeout_s: float | None) -> Stream:
        """Puts in order what comes from both sides: the worker may be ahead of the router's first token."""
        events, places = asyncio.Queue[Event](_MAX_WAITING), asyncio.Queue[pb.Directions]()
        room = asyncio.Semaphore(_MAX_WAITING)
        tasks = [
            asyncio.create_task(_follow(router, request, timeout_s, events)),
            asyncio.create_task(self._read(places, timeout_s, events, room)),
        ]
        num_tokens, is_finished = sum(len(each.ids) for each in request.emitted), False
        early: dict[int, pb.GenerateResponse] = {}
        summary: pb.GenerateResponse | None = None
        num_to_read = 0
        missing: ServiceError = Interrupted("the answer broke off: tokens are missing")
        try:
            while summary is None or not is_finished:
                if summary is not None and num_to_read == 0:
                    raise missing
                event = await events.get()
                if isinstance(event, ServiceError):
                    raise event
                if isinstance(event, _Read):
                    num_to_read, missing = num_to_read - 1, event.error
                    continue
                if event.HasField("directions"):
                    num_to_read += 1
                    places.put_nowait(event.directions)
                    continue
                if event.HasField("usage"):
                    summary = event
                    continue
                early[event.output_index] = event
                while (message := early.pop(num_tokens, None)) is not None:
                    room.release()  # also for the router's first token, which took none
                    num_tokens += len(message.token_ids)
                    is_finished = message.finish_reason != pb.FINISH_REASON_UNSPECIFIED
                    yield message
            yield summary
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _read(
        self,
        places: asyncio.Queue[pb.Directions],
        timeout_s: float | None,
        events: asyncio.Queue[Event],
        room: asyncio.Semaphore,
    ) -> None:
        """At one worker after another, as the answer is moved. Takes no more from it than there is room for."""
        while True:
            place = await places.get()
            request = decode_pb2.ReadRequest(attempt_id=place.attempt_id, permit=place.permit)
            has_read, where = False, f"at worker {place.worker_id!r}"
            try:
                with service_errors():
                    async for message in self._stub(place.address).Read(request, timeout=timeout_s):
                        has_read, self._num_in_vain = True, 0
                        await room.acquire()
                        await events.put(message)
                await events.put(_Read(Interrupted(f"the answer broke off {where}: it ended without its last token")))
            except DeadlineExceeded as error:
                await events.put(error)
            except ServiceError as error:
                told = Interrupted(f"the answer cannot be read {where}: {error}")
                if has_read or isinstance(error, Interrupted):
                    await events.put(_Read(told))
                else:
                    self._unreached()
                    await events.put(told)

    def _unreached(self) -> None:
        self._num_in_vain += 1
        if self._num_in_vain >= _MAX_IN_VAIN:
            self._num_in_vain, self._avoided_until = 0, time.monotonic() + _AVOIDED_S

    def _stub(self, address: str) -> decode_pb2_grpc.DirectStub:
        channel = self._channels.get(address)
        if channel is None:
            channel = self._channels[address] = open_channel(address, self._credentials)
        return decode_pb2_grpc.DirectStub(channel)


async def _follow(
    router: Router,
    request: Asked,
    timeout_s: float | None,
    events: asyncio.Queue[Event],
) -> None:
    """What the router says. Cancelled, it ends the answer."""
    if isinstance(request, pb.ChatRequest):
        message = pb.RouteRequest(chat=request)
    else:
        message = pb.RouteRequest(generate=request)
    call, has_summary = router.inference.Route(message, timeout=timeout_s), False
    try:
        with service_errors(router.nobody_there):
            async for response in call:
                await events.put(response)
                has_summary = response.HasField("usage")
            if not has_summary:
                raise Internal("the answer ended without its summary")
    except ServiceError as error:
        await events.put(error)
    finally:
        call.cancel()  # nothing happens if it has ended
