"""What has come and is not yet read: as it came while the reader keeps up, together when it does not, and bounded."""

from __future__ import annotations

import asyncio

import pytest

from protos import inference_pb2 as pb
from protos.errors import Unavailable
from router.inbox import MAX_BYTES, Inbox

pytestmark = pytest.mark.gathers


def message(index: int, text: str = "") -> bytes:
    return pb.GenerateResponse(output_index=index, token_ids=[index], text=text).SerializeToString()


def tokens_of(raw: bytes | None) -> list[int]:
    assert raw is not None
    return list(pb.GenerateResponse.FromString(raw).token_ids)


async def test_reader_that_waits_gets_each_message_as_it_came() -> None:
    inbox = Inbox(lambda pause: None)
    for index in range(3):
        reading = asyncio.create_task(inbox.read())
        await asyncio.sleep(0)
        inbox.put(message(index))
        assert await reading == message(index)


async def test_what_came_meanwhile_is_one_message() -> None:
    inbox = Inbox(lambda pause: None)
    for index in range(4):
        inbox.put(message(index))
    assert tokens_of(await inbox.read()) == [0, 1, 2, 3]
    inbox.put(message(4))
    assert await inbox.read() == message(4)


async def test_prompt_comes_before_the_tokens_and_nothing_is_left_behind() -> None:
    inbox = Inbox(lambda pause: None)
    prompt = pb.GenerateResponse(prompt=pb.PromptChunk(text="p")).SerializeToString()
    for raw in (prompt, message(0), message(1)):
        inbox.put(raw)
    inbox.end()
    assert await inbox.read() == prompt
    assert tokens_of(await inbox.read()) == [0, 1]
    assert await inbox.read() is None and inbox.is_read_out


async def test_worker_waits_while_too_much_is_unread() -> None:
    said: list[bool] = []
    inbox = Inbox(said.append)
    inbox.put(message(0, "x" * (MAX_BYTES - 100)))
    assert said == [] and inbox.has_room.is_set()
    inbox.put(message(1, "x" * 100))
    inbox.put(message(2))
    assert said == [True] and not inbox.has_room.is_set()
    assert tokens_of(await inbox.read()) == [0, 1, 2]
    assert said == [True, False] and inbox.has_room.is_set()


async def test_end_is_told_after_what_came_before_it_and_only_once() -> None:
    inbox = Inbox(lambda pause: None)
    reading = asyncio.create_task(inbox.read())
    await asyncio.sleep(0)
    inbox.put(message(0))
    inbox.end(Unavailable("gone"))
    inbox.end()
    assert await reading == message(0)
    for _ in range(2):
        with pytest.raises(Unavailable, match="gone"):
            await inbox.read()
    assert not inbox.is_read_out


async def test_reader_wakes_for_the_end_too() -> None:
    inbox = Inbox(lambda pause: None)
    reading = asyncio.create_task(inbox.read())
    await asyncio.sleep(0)
    inbox.end()
    assert await reading is None
