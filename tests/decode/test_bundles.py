"""Many answers in one stream: what gathers, who waits, and what an end of either does to the other."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing, asynccontextmanager
from typing import Any

import grpc.aio
import pytest

import decode.bundles
from decode.bundles import Bundle
from kvtransfer.loopback_agent import LoopbackNetwork
from protos import decode_pb2, decode_pb2_grpc
from protos import inference_pb2 as pb
from protos.channel import service_errors
from protos.errors import AlreadyExists, InvalidArgument, Unavailable
from tests.timed_calls import answer_to, decode_request, failure_of, prompt_of, tokens_of
from tests.timed_worker import TimedWorker, running

PROMPT = prompt_of(6)


class Said:
    """An answer by hand. It gathers, as a sequence's outbox does."""

    def __init__(self) -> None:
        self.num_tokens = self.num_taken = 0
        self.has_ended = self.has_moved = False
        self.changed = asyncio.Event()

    def token(self, *, last: bool = False) -> None:
        self.num_tokens += 1
        self.has_ended = last
        self.changed.set()

    def move(self) -> None:
        self.has_moved = True
        self.changed.set()

    async def answer(self) -> AsyncGenerator[pb.GenerateResponse, None]:
        while self.num_tokens > self.num_taken or not (self.has_ended or self.has_moved):
            await self.changed.wait()
            self.changed.clear()
            if self.num_tokens > self.num_taken:
                reason = pb.FINISH_REASON_LENGTH if self.has_ended else pb.FINISH_REASON_UNSPECIFIED
                token_ids = range(self.num_taken, self.num_tokens)
                message = pb.GenerateResponse(output_index=self.num_taken, token_ids=token_ids, finish_reason=reason)
                self.num_taken = self.num_tokens
                yield message


@asynccontextmanager
async def sending(bundle: Bundle, *numbers: int) -> AsyncIterator[tuple[list[Said], list[asyncio.Task[None]]]]:
    said = [Said() for _ in numbers]
    tasks = [
        asyncio.create_task(bundle.send_all(number, one.answer())) for number, one in zip(numbers, said, strict=True)
    ]
    try:
        yield said, tasks
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)


async def quiet() -> None:
    """All tasks have done what they could."""
    for _ in range(10):
        await asyncio.sleep(0)


def told(parts: decode_pb2.TokenBundle) -> list[tuple[int, list[int], bool]]:
    return [
        (part.stream, list(pb.GenerateResponse.FromString(part.message).token_ids), part.last) for part in parts.parts
    ]


async def test_what_several_answers_say_is_one_message_and_each_waits_until_it_is_written() -> None:
    bundle = Bundle()
    async with aclosing(bundle.messages()) as messages, sending(bundle, 1, 2) as ((first, second), tasks):
        assert not (await anext(messages)).parts  # it is open
        first.token()
        second.token()
        await quiet()
        assert told(await anext(messages)) == [(1, [0], False), (2, [0], False)]
        for _ in range(3):  # not written yet: nobody has asked for the next message
            first.token()
        second.token(last=True)
        await quiet()
        assert (first.num_taken, second.num_taken) == (1, 1)
        assert told(await anext(messages)) == [(1, [1, 2, 3], False), (2, [1], True)]
        assert not tasks[1].done()
        first.move()
        assert told(await anext(messages)) == [(1, [], True)]
        await tasks[1]


async def test_paused_answer_waits_alone() -> None:
    bundle = Bundle()
    async with aclosing(bundle.messages()) as messages, sending(bundle, 1, 2) as ((first, second), _):
        await anext(messages)
        await quiet()
        bundle.pause(1, True)
        bundle.pause(3, True)  # there is no such answer
        first.token()
        second.token()
        assert told(await anext(messages)) == [(2, [0], False)]
        bundle.pause(1, False)
        assert told(await anext(messages)) == [(1, [0], False)]


async def test_message_is_no_larger_than_it_may_be(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode.bundles, "_FULL_BYTES", 12)  # each of these messages has a few
    bundle = Bundle()
    async with aclosing(bundle.messages()) as messages, sending(bundle, *range(5)) as (said, _):
        await anext(messages)
        await quiet()
        for one in said:
            one.token(last=True)
        seen = list[int]()
        while len(seen) < 5:
            parts = (await anext(messages)).parts
            assert len(parts) == 1 or sum(len(part.message) for part in parts) <= 12
            seen += [part.stream for part in parts]
        assert seen == [0, 1, 2, 3, 4]


async def test_answers_fail_with_their_bundle() -> None:
    bundle = Bundle()
    async with sending(bundle, 1, 2, 3) as ((first, second, _), tasks):
        messages = bundle.messages()
        await anext(messages)
        await quiet()
        bundle.pause(2, True)
        first.token()
        second.token()
        await quiet()
        await messages.aclose()
        for task in tasks[:2]:
            with pytest.raises(Unavailable):
                await task
    with pytest.raises(Unavailable):
        late = Said()
        late.token()
        await bundle.send_all(4, late.answer())


async def test_stream_numbers_are_not_shared() -> None:
    bundle = Bundle()
    async with sending(bundle, 1):
        await quiet()
        with pytest.raises(AlreadyExists):
            await bundle.send_all(1, Said().answer())


class Reader:
    """A router's end of a bundle, over gRPC."""

    def __init__(self, worker: TimedWorker, bundle_id: str) -> None:
        self._commands: asyncio.Queue[decode_pb2.BundleCommand] = asyncio.Queue()
        self.say(bundle_id=bundle_id)
        self.call: Any = decode_pb2_grpc.BundlesStub(worker.channel).Open(self._said())

    def say(self, **fields: Any) -> None:
        self._commands.put_nowait(decode_pb2.BundleCommand(**fields))

    async def tokens_of(self, stream: int) -> list[int]:
        tokens = list[int]()
        while True:
            with service_errors():
                message = await self.call.read()
            assert message is not grpc.aio.EOF
            for part in message.parts:
                assert part.stream == stream
                tokens += pb.GenerateResponse.FromString(part.message).token_ids
                if part.last:
                    return tokens

    async def _said(self) -> AsyncIterator[decode_pb2.BundleCommand]:
        while True:
            yield await self._commands.get()


async def test_worker_answers_in_the_bundle_that_is_named_and_else_in_the_call() -> None:
    worker = TimedWorker(LoopbackNetwork(), "decode-0")
    async with running(worker):
        reader = Reader(worker, "b1")
        assert not (await reader.call.read()).parts
        asked = decode_request("a", PROMPT, max_tokens=9, prefill_here=True)
        asked.bundle_id, asked.stream = "b1", 7
        call = worker.decode_stub.Decode(asked)
        assert await reader.tokens_of(7) == answer_to(PROMPT, 9)
        assert await call.read() is grpc.aio.EOF and await call.code() is grpc.StatusCode.OK
        asked.attempt_id, asked.bundle_id = "b", "never opened"
        assert await tokens_of(worker.decode_stub.Decode(asked)) == answer_to(PROMPT, 9)
        reader.call.cancel()


async def test_refusals_of_a_bundled_answer_come_in_its_call() -> None:
    worker = TimedWorker(LoopbackNetwork(), "decode-0")
    async with running(worker):
        reader = Reader(worker, "b1")
        await reader.call.read()
        asked = decode_request("a", [], max_tokens=9, prefill_here=True)
        asked.bundle_id, asked.stream = "b1", 1
        assert isinstance(await failure_of(worker.decode_stub.Decode(asked)), InvalidArgument)
        reader.call.cancel()


@pytest.mark.parametrize(("bundle_id", "kind"), [("", InvalidArgument), ("x" * 129, InvalidArgument)])
async def test_bundle_needs_an_id(bundle_id: str, kind: type[Exception]) -> None:
    worker = TimedWorker(LoopbackNetwork(), "decode-0")
    async with running(worker):
        error = await failure_of(Reader(worker, bundle_id).call)
        assert isinstance(error, kind) and error.field == "bundle_id"


async def test_bundle_is_opened_once() -> None:
    worker = TimedWorker(LoopbackNetwork(), "decode-0")
    async with running(worker):
        reader = Reader(worker, "b1")
        await reader.call.read()
        assert isinstance(await failure_of(Reader(worker, "b1").call), AlreadyExists)
        reader.call.cancel()
