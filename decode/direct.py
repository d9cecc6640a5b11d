"""Answers that clients read here themselves, past the router, which is told the tokens many at once.

The call of the router is still what a sequence lives by: cancelled, it ends. A client shows the permit that its router
gave it and, in the same attempt, this worker. Event loop only.
"""

from __future__ import annotations

import asyncio
import hmac
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from contextlib import aclosing, contextmanager, suppress
from typing import Any, TypeAlias, cast

from protos import decode_pb2, decode_pb2_grpc, inference_pb2
from protos.calls import Context
from protos.errors import AlreadyExists, Interrupted, InvalidArgument, PermissionDenied, ResourceExhausted

Answer: TypeAlias = AsyncGenerator[inference_pb2.GenerateResponse, None]

MIN_PERMIT_BYTES, MAX_PERMIT_BYTES = 16, 64
MAX_WAITING = 1024  # readers whose attempt is not here yet
_MAX_ID_BYTES = 128
_CLAIM_S = 10.0  # from when an attempt is opened until somebody reads it
_WAIT_S = 10.0  # of a reader, for the attempt
_MAX_BYTES = 256 * 1024  # said and not yet read, of one answer
_RECORD_TOKENS = 32  # an answer that is broken off has at most so many that the router has not heard of


class Reading:
    """What one answer has said and its client has not been sent yet."""

    def __init__(self, permit: bytes) -> None:
        self.permit = permit
        self.is_claimed = False
        self._messages: deque[inference_pb2.GenerateResponse] = deque()
        self._num_bytes = 0
        self._changed = asyncio.Event()  # for either side
        self._error: Interrupted | None = None
        self._has_ended = False
        self._claim_until = asyncio.get_running_loop().time() + _CLAIM_S

    @property
    def claim_s(self) -> float:
        """So long somebody may still come."""
        return max(0.0, self._claim_until - asyncio.get_running_loop().time())

    async def say(self, message: inference_pb2.GenerateResponse) -> None:
        """Waits while much is unread. Raises Interrupted if nobody reads it, or nobody does any more."""
        while self._error is None and self._num_bytes > _MAX_BYTES:
            self._changed.clear()
            with suppress(TimeoutError):
                async with asyncio.timeout(None if self.is_claimed else self.claim_s):
                    await self._changed.wait()
                    continue
            self._give_up_unclaimed()
        self._give_up_unclaimed()
        if self._error is not None:
            raise self._error
        self._messages.append(message)
        self._num_bytes += message.ByteSize()
        self._changed.set()

    def _give_up_unclaimed(self) -> None:
        if not self.is_claimed and self.claim_s == 0:
            self.fail("its client has not come to read it")

    def end(self) -> None:
        """Nothing more comes; what is unread is still to be read."""
        self._has_ended = True
        self._changed.set()

    def fail(self, reason: str) -> None:
        """The first reason counts. For both sides, at once."""
        if not self._has_ended:
            self._error = self._error or Interrupted(f"the answer broke off at its worker: {reason}")
            self._changed.set()

    async def messages(self) -> Answer:
        """To be read once. Raises Interrupted."""
        try:
            while True:
                while self._messages and self._error is None:
                    message = self._messages.popleft()
                    self._num_bytes -= message.ByteSize()
                    self._changed.set()
                    yield message
                if self._error is not None:
                    raise self._error
                if self._has_ended:
                    return
                self._changed.clear()
                await self._changed.wait()
        finally:
            self.fail("its client has stopped reading")


class Readings(decode_pb2_grpc.DirectServicer):
    """Those of the attempts that are open here, or have ended and may still be read, by attempt id."""

    def __init__(self) -> None:
        self._readings: dict[str, Reading] = {}
        self._waiting: dict[str, list[asyncio.Event]] = {}  # one for each reader
        self._num_waiting = 0

    @contextmanager
    def opened(self, attempt_id: str, permit: bytes) -> Iterator[Reading]:
        """While the attempt runs. One that ends well may be read for a while after. Raises InvalidArgument."""
        if not MIN_PERMIT_BYTES <= len(permit) <= MAX_PERMIT_BYTES:
            limit = f"{MIN_PERMIT_BYTES} to {MAX_PERMIT_BYTES}"
            raise InvalidArgument(f"permit has {len(permit)} bytes; it must have {limit}", field="permit")
        if attempt_id in self._readings:
            raise AlreadyExists(f"attempt_id {attempt_id!r} is read here already", field="attempt_id")
        self._readings[attempt_id] = reading = Reading(permit)
        for has_come in self._waiting.get(attempt_id, ()):
            has_come.set()
        try:
            yield reading
            reading.end()
        finally:
            reading.fail("the attempt has ended")
            if reading.is_claimed:
                del self._readings[attempt_id]
            else:
                asyncio.get_running_loop().call_later(reading.claim_s, self._readings.pop, attempt_id, None)

    async def Read(self, request: decode_pb2.ReadRequest, context: Context) -> Answer:
        reading = await self._claimed(request.attempt_id, request.permit)
        async with aclosing(reading.messages()) as messages:
            async for message in messages:
                yield message

    async def _claimed(self, attempt_id: str, permit: bytes) -> Reading:
        """Who does not know the permit learns nothing, nor whether there is such an attempt."""
        if not 1 <= len(attempt_id.encode()) <= _MAX_ID_BYTES:
            raise InvalidArgument(f"attempt_id must have 1 to {_MAX_ID_BYTES} bytes", field="attempt_id")
        reading = self._readings.get(attempt_id) or await self._awaited(attempt_id)
        if reading is None or not hmac.compare_digest(reading.permit, permit):
            raise PermissionDenied("no attempt here has this attempt_id and permit")
        if reading.is_claimed:
            raise AlreadyExists("this answer is being read, or has been: a permit is good for once", field="permit")
        reading.is_claimed = True
        return reading

    async def _awaited(self, attempt_id: str) -> Reading | None:
        """Strangers wait here too, and each holds one of the calls that a server bears."""
        if self._num_waiting >= MAX_WAITING:
            raise ResourceExhausted(f"{MAX_WAITING} readers wait for their attempts already; come again")
        has_come, waiting = asyncio.Event(), self._waiting.setdefault(attempt_id, [])
        waiting.append(has_come)
        self._num_waiting += 1
        try:
            async with asyncio.timeout(_WAIT_S):
                await has_come.wait()
        except TimeoutError:
            return None
        finally:
            self._num_waiting -= 1
            waiting.remove(has_come)
            if not waiting:
                del self._waiting[attempt_id]
        return self._readings.get(attempt_id)


class DirectDecode:
    """A Decode service whose answers are read here where a request has a permit; all else is `inner`'s."""

    def __init__(self, inner: decode_pb2_grpc.DecodeServicer, readings: Readings) -> None:
        self._inner = inner
        self._readings = readings

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    async def Decode(self, request: decode_pb2.DecodeRequest, context: Context) -> Answer:
        async with aclosing(cast("Answer", self._inner.Decode(request, context))) as answer:
            told = self._told(request, answer) if request.permit else answer
            async with aclosing(told):
                async for message in told:
                    yield message

    async def _told(
        self, request: decode_pb2.DecodeRequest, answer: AsyncIterator[inference_pb2.GenerateResponse]
    ) -> Answer:
        """To the router."""
        num_due = 1 if request.prefill_here else _RECORD_TOKENS
        record = inference_pb2.GenerateResponse()
        with self._readings.opened(request.attempt_id, request.permit) as reading:
            async for message in answer:
                await reading.say(message)
                _add(record, message)
                if len(record.token_ids) >= num_due and not record.finish_reason:
                    yield record
                    record, num_due = inference_pb2.GenerateResponse(), _RECORD_TOKENS
        if record.token_ids or record.finish_reason:
            yield record


def _add(record: inference_pb2.GenerateResponse, message: inference_pb2.GenerateResponse) -> None:
    if not record.token_ids:
        record.output_index = message.output_index
    record.token_ids.extend(message.token_ids)
    record.finish_reason = message.finish_reason
    if message.HasField("decode_stats"):
        record.decode_stats.CopyFrom(message.decode_stats)
