"""What the dashboard asks as long as somebody listens, and for whom."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator
from contextlib import aclosing

import pytest

from protos.errors import Overloaded, Unauthenticated, Unavailable
from router.dashboard import feed as feed_module
from router.dashboard.feed import Feed, Topic
from router.dashboard.spelling import Plain
from router.dashboard.visitors import MAX_VISITORS, RouterAccess, Visitors

OFTEN_S = 0.001


class Source:
    """Answers what it is set to, or fails with that."""

    def __init__(self) -> None:
        self.says: object = 0
        self.num_asked = 0
        self.asked = asyncio.Event()

    async def ask(self) -> Plain:
        self.num_asked += 1
        self.asked.set()
        if isinstance(self.says, Exception):
            raise self.says
        return {"says": self.says}

    async def asked_again(self) -> None:
        """Twice: the first may have been under way already."""
        for _ in range(2):
            self.asked.clear()
            async with asyncio.timeout(20):
                await self.asked.wait()


def feed_of(source: Source, every_s: float = OFTEN_S) -> Feed:
    return Feed({"news": Topic("news", source.ask, every_s)})


async def told(events: AsyncGenerator[bytes, None], name: str = "news") -> Plain:
    async with asyncio.timeout(20):
        async for event in events:
            head, data = event.decode().removesuffix("\n\n").split("\n")
            if head == f"event: {name}":
                content: Plain = json.loads(data.removeprefix("data: "))
                return content
    raise AssertionError("the feed has ended")


async def test_nobody_is_asked_until_somebody_listens_and_once_for_all_who_do() -> None:
    source = Source()
    feed = feed_of(source, every_s=3600)
    assert source.num_asked == 0
    async with aclosing(feed.events()) as one, aclosing(feed.events()) as other:
        assert await told(one) == await told(other) == {"data": {"says": 0}, "error": None}
        assert source.num_asked == 1 and feed.is_heard
    assert not feed.is_heard


async def test_asking_ends_with_the_last_listener() -> None:
    source = Source()
    feed = feed_of(source)
    async with aclosing(feed.events()) as one:
        async with aclosing(feed.events()) as other:
            await told(one)
            await told(other)
        await source.asked_again()
    num_asked = source.num_asked
    await asyncio.sleep(20 * OFTEN_S)
    assert source.num_asked == num_asked
    async with aclosing(feed.events()) as again:
        assert await told(again) == {"data": {"says": 0}, "error": None}


async def test_what_is_as_before_is_not_told_again() -> None:
    source = Source()
    async with aclosing(feed_of(source).events()) as events:
        assert (await told(events))["data"] == {"says": 0}
        await source.asked_again()
        source.says = 1
        assert (await told(events))["data"] == {"says": 1}


async def test_one_who_is_slow_gets_the_newest_alone() -> None:
    source = Source()
    async with aclosing(feed_of(source).events()) as events:
        await told(events)
        for source.says in range(1, 5):
            await source.asked_again()
        assert (await told(events))["data"] == {"says": 4}


async def test_failures_are_told_and_what_is_good_again_too() -> None:
    source = Source()
    async with aclosing(feed_of(source).events()) as events:
        await told(events)
        source.says = Unavailable("gone fishing")
        failure = await told(events)
        assert failure["data"] is None
        assert (failure["error"]["code"], failure["error"]["message"]) == ("UNAVAILABLE", "gone fishing")
        source.says = 0
        assert await told(events) == {"data": {"says": 0}, "error": None}


async def test_a_defect_says_nothing_of_the_inside(caplog: pytest.LogCaptureFixture) -> None:
    source = Source()
    source.says = KeyError("a secret")
    async with aclosing(feed_of(source, every_s=3600).events()) as events:
        failure = await told(events)
    assert failure["error"]["code"] == "INTERNAL" and "secret" not in failure["error"]["message"]
    assert "a secret" in caplog.text


async def test_beats_tell_the_age_of_what_was_heard(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feed_module, "BEAT_S", 0.01)
    source = Source()
    async with aclosing(feed_of(source).events()) as events:
        assert await told(events, "beat") == {"ages_s": {"news": None}}
        await told(events)
        source.says = Unavailable("away")
        await told(events)
        ages = [(await told(events, "beat"))["ages_s"]["news"] for _ in range(5)]
    assert ages == sorted(ages) and ages[-1] >= 0.03  # it grows while nobody answers


async def test_end_ends_what_is_listened_to() -> None:
    feed = feed_of(Source(), every_s=3600)
    async with aclosing(feed.events()) as events:
        await told(events)
        waiting = asyncio.create_task(anext(events, b"over"))
        await feed.end()
        while (last := await waiting) != b"over":
            assert last.startswith(b"event: beat")
            waiting = asyncio.create_task(anext(events, b"over"))


async def test_each_key_has_connections_of_its_own_and_those_that_left_make_room() -> None:
    now = 0.0
    visitors = Visitors(RouterAccess(("127.0.0.1:1",)), clock=lambda: now)
    here = await visitors.of("here")
    here.num_calls += 1
    for number in range(MAX_VISITORS - 1):
        now += 1
        await visitors.of(f"key-{number}")
    first, second = await visitors.of("key-0"), await visitors.of("key-1")
    assert first is not second and await visitors.of("here") is here
    now += 1
    await visitors.of("key-0")
    await visitors.of("one-more")  # key-2 was seen longest ago of those who are away
    assert await visitors.of("here") is here and await visitors.of("key-0") is first
    assert await visitors.of("key-1") is second
    await visitors.close()


async def test_no_more_keys_are_taken_than_there_is_room_for() -> None:
    visitors = Visitors(RouterAccess(("127.0.0.1:1",)))
    for number in range(MAX_VISITORS):
        (await visitors.of(f"key-{number}")).num_calls += 1
    with pytest.raises(Overloaded, match=str(MAX_VISITORS)):
        await visitors.of("one-more")
    await visitors.close()


async def test_what_cannot_be_a_key_is_refused_unsaid() -> None:
    visitors = Visitors(RouterAccess(("127.0.0.1:1",)))
    with pytest.raises(Unauthenticated) as refusal:
        await visitors.of("a key")
    assert "a key\x00" not in str(refusal.value) and "spaces" in str(refusal.value)
    await visitors.end()
    with pytest.raises(Unavailable):
        await visitors.of("")
