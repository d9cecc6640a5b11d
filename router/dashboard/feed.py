"""What the page is told as it happens: the router is asked for as long as somebody listens, once for all who do."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass

from protos.errors import Internal, ServiceError
from router.dashboard.failures import as_failure
from router.dashboard.spelling import Plain

logger = logging.getLogger(__name__)

BEAT_S = 1.0


@dataclass(frozen=True, slots=True)
class Topic:
    """Something that is asked for again and again, `every_s` from one question to the next."""

    name: str
    ask: Callable[[], Awaitable[Plain]]
    every_s: float


class _Latest:
    """Of one topic: what was heard last, as an event that is ready to be sent."""

    def __init__(self) -> None:
        self.version = 0
        self.event = b""
        self.heard_at: float | None = None  # when the router last answered

    def take(self, event: bytes) -> bool:
        """Whether it is news."""
        if event == self.event:
            return False
        self.event = event
        self.version += 1
        return True


class Feed:
    """Listeners get the newest of each topic: one that is slow misses what was between, and nothing piles up."""

    def __init__(self, topics: Mapping[str, Topic]) -> None:
        self._topics = topics
        self._latest = {name: _Latest() for name in topics}
        self._news = asyncio.Condition()
        self._asking: list[asyncio.Task[None]] = []
        self._num_listeners = 0
        self._has_ended = False

    @property
    def is_heard(self) -> bool:
        return self._num_listeners > 0

    async def events(self) -> AsyncGenerator[bytes, None]:
        """Server-sent events until `end`: topics as they change, and beats that tell how old each is."""
        self._num_listeners += 1
        if not self._asking:
            self._asking = [asyncio.create_task(self._ask(topic)) for topic in self._topics.values()]
        sent = dict.fromkeys(self._topics, 0)
        try:
            beat_at = time.monotonic()
            while not self._has_ended:
                if (now := time.monotonic()) >= beat_at:
                    beat_at = now + BEAT_S
                    yield self._beat(now)
                for name, latest in self._latest.items():
                    if latest.version != sent[name]:
                        sent[name] = latest.version
                        yield latest.event
                await self._wait(sent, beat_at - time.monotonic())
        finally:
            self._num_listeners -= 1
            if not self._num_listeners:
                await self._rest()

    async def end(self) -> None:
        """Listeners hear no more."""
        self._has_ended = True
        async with self._news:
            self._news.notify_all()

    async def _rest(self) -> None:
        asking, self._asking = self._asking, []
        self._latest = {name: _Latest() for name in self._topics}  # whoever listens next is not told of long ago
        for task in asking:
            task.cancel()
        if asking:
            await asyncio.wait(asking)

    async def _wait(self, sent: Mapping[str, int], for_s: float) -> None:
        def is_news() -> bool:
            return self._has_ended or any(latest.version != sent[name] for name, latest in self._latest.items())

        with suppress(TimeoutError):
            async with asyncio.timeout(max(0.0, for_s)), self._news:
                await self._news.wait_for(is_news)

    async def _ask(self, topic: Topic) -> None:
        latest = self._latest[topic.name]
        while True:
            started_at = time.monotonic()
            event = await _asked(topic)
            if event.is_answer:
                latest.heard_at = time.monotonic()
            if latest.take(event.sent):
                async with self._news:
                    self._news.notify_all()
            await asyncio.sleep(max(0.0, topic.every_s - (time.monotonic() - started_at)))

    def _beat(self, now: float) -> bytes:
        ages = {
            name: None if latest.heard_at is None else round(now - latest.heard_at, 3)
            for name, latest in self._latest.items()
        }
        return _event("beat", {"ages_s": ages})


@dataclass(frozen=True, slots=True)
class _Asked:
    sent: bytes
    is_answer: bool


async def _asked(topic: Topic) -> _Asked:
    try:
        return _Asked(_event(topic.name, {"data": await topic.ask(), "error": None}), is_answer=True)
    except ServiceError as error:
        failure = as_failure(error)
    except Exception:
        logger.exception("asking for %s failed", topic.name)
        failure = as_failure(Internal("the dashboard failed on this; its log says why"))
    return _Asked(_event(topic.name, {"data": None, "error": failure}), is_answer=False)


def _event(name: str, content: object) -> bytes:
    told = json.dumps(content, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    return f"event: {name}\ndata: {told}\n\n".encode()
