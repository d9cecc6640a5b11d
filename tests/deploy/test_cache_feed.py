"""What a worker tells of its prefix cache, played back, is what its block pool would find."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from deploy.cache_feed import CacheFeed, CacheNews
from model.block_pool import BlockPool

NUM_BLOCKS = 8
MAX_HASHES = 2
MAX_PENDING = 5


def name(number: int) -> bytes:
    return number.to_bytes(16, "big")


class Listener:
    """Knows the cache from messages alone; nothing until a dump has ended."""

    def __init__(self) -> None:
        self.known: set[bytes] | None = None
        self._dumped: set[bytes] | None = None
        self.last_number = 0

    def hear(self, news: CacheNews) -> None:
        assert news.number == self.last_number + 1
        self.last_number = news.number
        assert len(news.stored) + len(news.removed) <= MAX_HASHES
        if news.begins_dump:
            self.known, self._dumped = None, set()
        target = self.known if self._dumped is None else self._dumped
        assert target is not None, "the first message begins a dump"
        assert not set(news.stored) & set(news.removed)
        target |= set(news.stored)
        target -= set(news.removed)
        if news.ends_dump:
            self.known, self._dumped = self._dumped, None


class Feeding(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(NUM_BLOCKS)
        self.feed = CacheFeed(self.pool, max_hashes=MAX_HASHES, max_pending=MAX_PENDING)
        self.feed.dump()
        self.listener = Listener()

    @rule(number=st.integers(0, 15))
    def cache(self, number: int) -> None:
        """A sequence of one block comes and goes; another one may be evicted for it."""
        (block_id,) = self.pool.allocate(1)
        self.pool.publish(block_id, name(number))
        self.pool.release([block_id])

    @rule(number=st.integers(0, 15))
    def doubt(self, number: int) -> None:
        found = self.pool.match_prefix([name(number)])
        self.pool.withdraw(found)
        self.pool.release(found)

    @rule()
    def ask_for_a_dump(self) -> None:
        self.feed.dump()

    @rule(num=st.integers(1, 3))
    def fetch(self, num: int) -> None:
        for _ in range(num):
            if (news := self.feed.next()) is not None:
                self.listener.hear(news)

    @rule()
    def fetch_all(self) -> None:
        while (news := self.feed.next()) is not None:
            self.listener.hear(news)
        assert self.listener.known == set(self.pool.findable())

    @invariant()
    def is_bounded(self) -> None:
        assert len(self.feed._pending) <= MAX_PENDING


Feeding.TestCase.settings = settings(max_examples=50, stateful_step_count=30, deadline=None)
test_what_is_told_is_what_is_findable = Feeding.TestCase


def test_nothing_is_recorded_until_somebody_listens() -> None:
    pool = BlockPool(4)
    feed = CacheFeed(pool)
    assert not pool.on_change and feed.next() is None
    feed.dump()
    assert not pool.on_change
    assert feed.next() == CacheNews(1, [], begins_dump=True, ends_dump=True)
    assert feed.next() is None
    (block_id,) = pool.allocate(1)
    pool.publish(block_id, name(1))
    assert feed.next() == CacheNews(2, [name(1)], [])


def test_where_too_much_piles_up_a_dump_takes_its_place() -> None:
    pool = BlockPool(NUM_BLOCKS)
    feed = CacheFeed(pool, max_pending=3)
    feed.dump()
    feed.next()
    for number, block_id in enumerate(pool.allocate(4)):
        pool.publish(block_id, name(number))
    assert not pool.on_change  # what comes until the dump begins is in it
    news = feed.next()
    assert news is not None and (news.number, news.begins_dump, news.ends_dump) == (2, True, True)
    assert set(news.stored) == {name(number) for number in range(4)}
