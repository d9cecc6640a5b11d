"""What waits at a worker for the client that has the permit: in order, bounded, and for that client alone."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any

import pytest

from decode import direct
from decode.direct import DirectDecode, Reading, Readings
from protos import decode_pb2
from protos import inference_pb2 as pb
from protos.errors import AlreadyExists, Interrupted, InvalidArgument, PermissionDenied, ResourceExhausted

PERMIT = b"p" * 32


def said(index: int, **fields: Any) -> pb.GenerateResponse:
    return pb.GenerateResponse(output_index=index, token_ids=[100 + index], text=f"<{index}>", **fields)


class Inner:
    """A Decode service that says what it was given, and then fails if it was given an error."""

    def __init__(self, *messages: pb.GenerateResponse, error: Exception | None = None) -> None:
        self.messages = messages
        self.error = error
        self.has_closed = False

    async def Decode(self, request: decode_pb2.DecodeRequest, context: Any) -> AsyncIterator[pb.GenerateResponse]:
        try:
            for message in self.messages:
                yield message
            if self.error is not None:
                raise self.error
        finally:
            self.has_closed = True


def decoding(inner: Inner, readings: Readings, **fields: Any) -> Any:
    request = decode_pb2.DecodeRequest(attempt_id="a", permit=PERMIT)
    request.MergeFrom(decode_pb2.DecodeRequest(**fields))
    return DirectDecode(inner, readings).Decode(request, None)  # type: ignore[arg-type]


def reading(readings: Readings, permit: bytes = PERMIT, attempt_id: str = "a") -> Any:
    return readings.Read(decode_pb2.ReadRequest(attempt_id=attempt_id, permit=permit), None)  # type: ignore[arg-type]


async def all_of(stream: Any) -> list[pb.GenerateResponse]:
    return [message async for message in stream]


FINISHED = said(4, finish_reason=pb.FINISH_REASON_LENGTH, decode_stats=pb.DecodeStats(num_steps=3))
ANSWER = (said(1), said(2), said(3), FINISHED)


async def test_client_has_every_message_and_the_router_one_without_text() -> None:
    readings = Readings()
    to_client = asyncio.create_task(all_of(reading(readings)))  # before the router is here
    (record,) = await all_of(decoding(Inner(*ANSWER), readings))
    assert await to_client == list(ANSWER)
    assert (record.output_index, list(record.token_ids), record.text) == (1, [101, 102, 103, 104], "")
    assert (record.finish_reason, record.decode_stats.num_steps) == (pb.FINISH_REASON_LENGTH, 3)


async def test_prefill_here_is_told_at_once() -> None:
    readings = Readings()
    to_client = asyncio.create_task(all_of(reading(readings)))
    first, record = await all_of(decoding(Inner(*ANSWER), readings, prefill_here=True))
    assert await to_client == list(ANSWER)
    assert (first.output_index, list(first.token_ids), first.text) == (1, [101], "")
    assert (record.output_index, list(record.token_ids)) == (2, [102, 103, 104])


async def test_router_is_told_many_at_once_so_that_a_client_cannot_hide_what_it_read() -> None:
    readings = Readings()
    to_client = asyncio.create_task(all_of(reading(readings)))
    messages = [said(index) for index in range(1, 150)]
    records = await all_of(decoding(Inner(*messages), readings))
    assert await to_client == messages
    assert [len(record.token_ids) for record in records] == [32, 32, 32, 32, 21]
    assert [record.output_index for record in records] == [1, 33, 65, 97, 129]
    told = [token for record in records for token in record.token_ids]
    assert told == [token for message in messages for token in message.token_ids]


async def test_sequence_that_goes_on_elsewhere_leaves_its_tokens_and_no_finish() -> None:
    readings = Readings()
    to_client = asyncio.create_task(all_of(reading(readings)))
    (record,) = await all_of(decoding(Inner(said(1), said(2)), readings))
    assert await to_client == [said(1), said(2)]
    assert list(record.token_ids) == [101, 102] and record.finish_reason == pb.FINISH_REASON_UNSPECIFIED


@pytest.mark.parametrize("prefill_here", [False, True])
async def test_router_hears_now_and_then_what_has_been_said(prefill_here: bool) -> None:
    """Else a client that leaves before the last token has had all the others for nothing."""
    last = said(99, finish_reason=pb.FINISH_REASON_LENGTH)
    whole = [*map(said, range(99)), last]
    readings = Readings()
    to_client, heard = reading(readings), list[int]()
    to_router = decoding(Inner(*whole), readings, prefill_here=prefill_here)
    reading_all = asyncio.create_task(all_of(to_client))
    async for record in to_router:
        assert record.output_index == len(heard) and not record.text
        assert len(record.token_ids) <= direct._RECORD_TOKENS
        heard += record.token_ids
    assert heard == [100 + index for index in range(100)]
    assert record.finish_reason == pb.FINISH_REASON_LENGTH
    assert await reading_all == whole


async def test_without_permit_all_is_as_ever() -> None:
    inner = Inner(*ANSWER)
    request = decode_pb2.DecodeRequest(attempt_id="a")
    assert await all_of(DirectDecode(inner, Readings()).Decode(request, None)) == list(ANSWER)  # type: ignore[arg-type]


async def test_answer_that_has_ended_may_be_fetched_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(direct, "_CLAIM_S", 0.2)
    monkeypatch.setattr(direct, "_WAIT_S", 0.0)
    readings = Readings()
    await all_of(decoding(Inner(*ANSWER), readings))
    assert await all_of(reading(readings)) == list(ANSWER)
    with pytest.raises(AlreadyExists, match="good for once"):
        await all_of(reading(readings))
    await asyncio.sleep(0.25)
    with pytest.raises(PermissionDenied):
        await all_of(reading(readings))


async def test_failure_reaches_both_sides() -> None:
    readings = Readings()
    to_client = asyncio.create_task(all_of(reading(readings)))
    await asyncio.sleep(0)
    with pytest.raises(ValueError, match="broken"):
        await all_of(decoding(Inner(said(1), error=ValueError("broken")), readings))
    with pytest.raises(Interrupted):
        await to_client


async def test_router_that_cancels_ends_the_reader_and_the_sequence() -> None:
    readings, inner = Readings(), Inner(*ANSWER)
    to_router = decoding(inner, readings, prefill_here=True)
    to_client = reading(readings)
    await anext(to_router)
    assert await anext(to_client) == said(1)
    await to_router.aclose()
    assert inner.has_closed
    with pytest.raises(Interrupted, match="the attempt has ended"):
        await anext(to_client)


async def test_client_that_leaves_ends_the_sequence() -> None:
    readings, inner = Readings(), Inner(*ANSWER)
    to_router = decoding(inner, readings, prefill_here=True)
    await anext(to_router)
    async with aclosing(reading(readings)) as to_client:
        await anext(to_client)
    with pytest.raises(Interrupted, match="has stopped reading"):
        await anext(to_router)
    assert inner.has_closed


async def test_sequence_waits_for_a_slow_reader_and_then_goes_on() -> None:
    part = "x" * (direct._MAX_BYTES // 2)
    messages = [pb.GenerateResponse(output_index=index, token_ids=[index], text=part) for index in range(6)]
    readings = Readings()
    to_client = reading(readings)
    to_router = asyncio.create_task(all_of(decoding(Inner(*messages), readings)))
    read = [await anext(to_client)]
    for _ in range(10):
        await asyncio.sleep(0)
    assert not to_router.done()
    waiting = readings._readings["a"]._num_bytes
    assert direct._MAX_BYTES < waiting < 2 * direct._MAX_BYTES
    read += await all_of(to_client)
    assert read == messages
    (record,) = await to_router
    assert list(record.token_ids) == list(range(6))
    assert not readings._readings  # nothing of it is kept


@pytest.mark.parametrize("has_room", [True, False])
async def test_what_nobody_reads_is_given_up(monkeypatch: pytest.MonkeyPatch, has_room: bool) -> None:
    monkeypatch.setattr(direct, "_CLAIM_S", 0.05)
    if not has_room:
        monkeypatch.setattr(direct, "_MAX_BYTES", 1)
    unread = Reading(PERMIT)
    async with asyncio.timeout(5):
        with pytest.raises(Interrupted, match="has not come to read it"):
            while True:
                await unread.say(said(1))
                await asyncio.sleep(0.01)


@pytest.mark.parametrize("permit", [b"", b"p" * 31, b"q" * 32, b"p" * 33])
async def test_who_has_no_permit_learns_nothing(permit: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(direct, "_WAIT_S", 0.0)
    readings = Readings()
    with readings.opened("a", PERMIT):
        with pytest.raises(PermissionDenied) as wrong:
            await all_of(reading(readings, permit))
        with pytest.raises(PermissionDenied) as unknown:
            await all_of(reading(readings, permit, "b"))
        assert str(wrong.value) == str(unknown.value)
        readings._readings["a"].end()
        assert await all_of(reading(readings)) == []  # it was not used up


async def test_those_who_wait_for_an_attempt_are_bounded_and_leave_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(direct, "MAX_WAITING", 2)
    monkeypatch.setattr(direct, "_WAIT_S", 0.2)
    readings = Readings()
    waiting = [asyncio.create_task(all_of(reading(readings, attempt_id=name))) for name in "xy"]
    await asyncio.sleep(0)
    with pytest.raises(ResourceExhausted, match="2 readers wait"):
        await all_of(reading(readings, attempt_id="z"))
    waiting[0].cancel()
    results = await asyncio.gather(*waiting, return_exceptions=True)
    assert isinstance(results[0], asyncio.CancelledError) and isinstance(results[1], PermissionDenied)
    assert not readings._waiting


async def test_those_who_wait_for_the_same_attempt_are_bounded_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes no key to wait, and who waits holds a call of the server."""
    monkeypatch.setattr(direct, "MAX_WAITING", 2)
    readings = Readings()
    waiting = [asyncio.create_task(all_of(reading(readings, attempt_id="x"))) for _ in range(2)]
    await asyncio.sleep(0)
    with pytest.raises(ResourceExhausted, match="2 readers wait"):
        await all_of(reading(readings, attempt_id="x"))
    for each in waiting:
        each.cancel()
    await asyncio.gather(*waiting, return_exceptions=True)
    assert not readings._waiting and readings._num_waiting == 0


async def test_who_waits_is_found_though_another_has_given_up_waiting_for_the_same() -> None:
    readings = Readings()
    stranger, client = (asyncio.create_task(all_of(reading(readings))) for _ in range(2))
    await asyncio.sleep(0)
    stranger.cancel()
    await asyncio.wait([stranger])
    await all_of(decoding(Inner(*ANSWER), readings))
    async with asyncio.timeout(5):
        assert await client == list(ANSWER)


async def test_attempt_of_an_id_that_is_taken_takes_nothing_from_the_first() -> None:
    readings = Readings()
    with readings.opened("a", PERMIT) as first:
        with pytest.raises(AlreadyExists, match="'a' is read here already"):
            await all_of(decoding(Inner(*ANSWER), readings, permit=b"q" * 32))
        await first.say(said(1))
        first.end()
        assert await all_of(reading(readings)) == [said(1)]


@pytest.mark.parametrize("permit", [b"p" * 15, b"p" * 65])
async def test_permits_that_are_none(permit: bytes) -> None:
    with pytest.raises(InvalidArgument, match=f"permit has {len(permit)} bytes; it must have 16 to 64"):
        await all_of(decoding(Inner(), Readings(), permit=permit))


@pytest.mark.parametrize("attempt_id", ["", "a" * 129])
async def test_ids_that_are_none(attempt_id: str) -> None:
    with pytest.raises(InvalidArgument, match="attempt_id must have 1 to 128 bytes"):
        await all_of(reading(Readings(), attempt_id=attempt_id))
