"""The prefix index against brute force: real block pools, whose messages are lost, doubled and mixed up."""

from __future__ import annotations

import random
import tracemalloc
from dataclasses import dataclass, field

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from deploy.cache_feed import CacheFeed
from model.block_pool import BlockPool, hash_blocks
from router.cache_changes import CacheChanges
from router.candidate import WorkerId
from router.prefix_index import PrefixIndex, PrefixMatches

NUM_BLOCKS = 6
NAMES = ("a", "b", "c")
PROMPTS = [hash_blocks(prompt, 2) for prompt in ([1] * 8, [1] * 4 + [2] * 4, [1, 1, 3, 3, 3, 3], [4] * 8)]


class Heard:
    """What an index may know of one process, by the plainest rule: all that was said up to the last message heard, if
    every message since the beginning of some dump was heard in its turn."""

    def __init__(self) -> None:
        self.last = 0
        self.is_unbroken = False

    def hear(self, changes: CacheChanges) -> None:
        if changes.number > self.last:
            is_next = changes.number == self.last + 1
            self.is_unbroken = changes.begins_dump or (self.is_unbroken and is_next)
            self.last = changes.number


@dataclass
class Process:
    """A worker's process: its pool, what it sent and nobody has heard yet, and what its cache was each time."""

    id: WorkerId
    pool: BlockPool = field(default_factory=lambda: BlockPool(NUM_BLOCKS))
    under_way: list[CacheChanges] = field(default_factory=list)
    said: dict[int, frozenset[bytes] | None] = field(default_factory=dict)  # None: a dump is not complete
    heard: Heard = field(default_factory=Heard)

    def __post_init__(self) -> None:
        self.feed = CacheFeed(self.pool, max_hashes=2, max_pending=4)
        self.feed.dump()
        self.told: set[bytes] = set()
        self.is_dumping = False

    def send(self) -> bool:
        news = self.feed.next()
        if news is None:
            return False
        self.under_way.append(
            CacheChanges(news.number, news.stored, news.removed, news.begins_dump, news.ends_dump),
        )
        if news.begins_dump:
            self.told, self.is_dumping = set(), True
        self.told = (self.told | set(news.stored)) - set(news.removed)
        self.is_dumping = self.is_dumping and not news.ends_dump
        self.said[news.number] = None if self.is_dumping else frozenset(self.told)
        return True


class Streams(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.index = PrefixIndex()
        self.processes: dict[str, Process] = {}
        self.present: set[str] = set()  # registered
        self.old: list[tuple[WorkerId, CacheChanges]] = []  # heard already, or of processes that have ended
        for name in NAMES:
            self._start(name, "e0")

    def _start(self, name: str, epoch: str) -> None:
        self.processes[name] = Process(WorkerId(name, epoch))
        self._join(name)

    def _join(self, name: str) -> None:
        process = self.processes[name]
        process.heard.is_unbroken = False
        self.index.join(process.id, NUM_BLOCKS)
        self.present.add(name)

    def _deliver(self, name: str, at: int) -> None:
        process = self.processes[name]
        changes = process.under_way.pop(at)
        if name in self.present:
            self.old.append((process.id, changes))
            process.heard.hear(changes)
        if self.index.apply(process.id, changes):
            process.feed.dump()

    @rule(name=st.sampled_from(NAMES), prompt=st.sampled_from(PROMPTS), num=st.integers(1, 4))
    def serve(self, name: str, prompt: list[bytes], num: int) -> None:
        """Takes what is cached of a prompt and computes the rest, evicting what it must."""
        pool = self.processes[name].pool
        found = pool.match_prefix(prompt[:num])
        new = pool.allocate(min(num, len(prompt)) - len(found))
        for block_id, block_hash in zip(new, prompt[len(found) :], strict=False):
            pool.publish(block_id, block_hash)
        pool.release([*found, *new])

    @rule(
        name=st.sampled_from(NAMES),
        prompt=st.sampled_from(PROMPTS),
        num=st.integers(1, 4),
        fate=st.sampled_from(["arrives", "arrives", "is lost", "is late"]),
    )
    def serve_and_tell(self, name: str, prompt: list[bytes], num: int, fate: str) -> None:
        self.serve(name, prompt, num)
        process = self.processes[name]
        while process.send():
            if fate == "arrives":
                self._deliver(name, len(process.under_way) - 1)
            elif fate == "is lost":
                process.under_way.pop()

    @rule(name=st.sampled_from(NAMES))
    def send(self, name: str) -> None:
        self.processes[name].send()

    @precondition(lambda self: any(process.under_way for process in self.processes.values()))
    @rule(data=st.data())
    def deliver(self, data: st.DataObject) -> None:
        """Often the oldest, but any may come first."""
        name = data.draw(st.sampled_from([name for name in NAMES if self.processes[name].under_way]))
        self._deliver(name, data.draw(st.just(0) | st.integers(0, len(self.processes[name].under_way) - 1)))

    @precondition(lambda self: any(process.under_way for process in self.processes.values()))
    @rule(data=st.data())
    def lose(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from([name for name in NAMES if self.processes[name].under_way]))
        self.processes[name].under_way.pop(0)

    @precondition(lambda self: self.old)
    @rule(data=st.data())
    def repeat(self, data: st.DataObject) -> None:
        """A message once more, perhaps of a process that is no more."""
        worker, changes = data.draw(st.sampled_from(self.old))
        assert not self.index.apply(worker, changes)

    @rule(name=st.sampled_from(NAMES))
    def restart(self, name: str) -> None:
        before = self.processes[name]
        self.old += [(before.id, changes) for changes in before.under_way]
        self._start(name, f"e{int(before.id.epoch[1:]) + 1}")

    @rule(name=st.sampled_from(NAMES))
    def register_anew(self, name: str) -> None:
        """The same process, on another stream: what was under way on the first is lost, and it begins with a dump."""
        self.processes[name].under_way.clear()
        self.processes[name].feed.dump()
        self._join(name)

    @rule(name=st.sampled_from(NAMES))
    def leave(self, name: str) -> None:
        self.present.discard(name)
        self.index.leave(self.processes[name].id)

    @rule()
    def settle(self) -> None:
        """Whatever happened before: once all that is said arrives, everybody's whole cache is known."""
        for name in self.present:
            process = self.processes[name]
            while process.send() or process.under_way:
                while process.under_way:
                    self._deliver(name, 0)
            if process.heard.last < max(process.said, default=0):  # the last message was lost: the next one tells
                (block_id,) = process.pool.allocate(1)
                process.pool.publish(block_id, random.randbytes(16))
                process.pool.release([block_id])
                while process.send() or process.under_way:
                    while process.under_way:
                        self._deliver(name, 0)
            assert self.index.num_blocks(process.id) == len(process.pool.findable())
            for prompt in PROMPTS:
                found = process.pool.match_prefix(prompt)
                process.pool.release(found)
                assert self.index.match(prompt).of(process.id) == len(found)

    @invariant()
    def is_what_was_said(self) -> None:
        for prompt in PROMPTS:
            matches = self.index.match(prompt)
            expected: dict[WorkerId, int] = {}
            for name, process in self.processes.items():
                is_known = name in self.present and process.heard.is_unbroken
                known = process.said.get(process.heard.last) if is_known else None
                length = 0
                while known is not None and length < len(prompt) and prompt[length] in known:
                    length += 1
                assert matches.of(process.id) == length
                if length:
                    expected[process.id] = length
            longest = matches.longest(random.Random(0), 100)
            assert dict(longest) == expected and len(longest) == len(expected)
            assert [num for _, num in longest] == sorted(expected.values(), reverse=True)

    def teardown(self) -> None:
        """Of workers that have gone nothing stays."""
        for process in self.processes.values():
            self.index.leave(process.id)
        keeper = WorkerId("keeper", "e0")
        self.index.join(keeper, NUM_BLOCKS)
        for number in range(1, 50):
            self.index.apply(keeper, CacheChanges(number, begins_dump=True, ends_dump=True))
        assert len(self.index) == 0
        assert len(self.index.match([]).slots.workers) <= 3 * len(NAMES)  # bits are used again
        assert self.index.match(PROMPTS[0]) == PrefixMatches([], self.index.match([]).slots)


Streams.TestCase.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
test_index_equals_brute_force = Streams.TestCase


def blocks(num: int, seed: int = 0) -> list[bytes]:
    rng = random.Random(seed)
    return [rng.randbytes(16) for _ in range(num)]


def dumped(index: PrefixIndex, name: str, hashes: list[bytes], max_blocks: int = 10**6) -> WorkerId:
    worker = WorkerId(name, "e1")
    index.join(worker, max_blocks)
    assert not index.apply(worker, CacheChanges(1, hashes, begins_dump=True, ends_dump=True))
    return worker


def test_who_holds_how_much_of_a_prompt() -> None:
    index, prompt = PrefixIndex(), blocks(5)
    short, long = dumped(index, "short", prompt[:2]), dumped(index, "long", prompt)
    gap, stranger = dumped(index, "gap", [prompt[0], prompt[2]]), dumped(index, "stranger", blocks(5, seed=1))
    matches = index.match(prompt)
    assert [matches.of(worker) for worker in (short, long, gap, stranger)] == [2, 5, 1, 0]
    assert matches.of(WorkerId("short", "e2")) == 0
    assert matches.longest(random.Random(0), 2) == [(long, 5), (short, 2)]
    assert index.match([]).longest(random.Random(0), 2) == []


def test_equals_are_named_from_a_random_one_on() -> None:
    index, prompt = PrefixIndex(), blocks(3)
    for number in range(40):
        dumped(index, f"w{number}", prompt)
    first = {index.match(prompt).longest(random.Random(seed), 1)[0][0].name for seed in range(200)}
    assert len(first) > 30


def test_worker_that_claims_more_than_its_cache_holds_is_not_believed() -> None:
    index, prompt = PrefixIndex(), blocks(3)
    worker = dumped(index, "w", prompt[:2], max_blocks=2)
    assert index.apply(worker, CacheChanges(2, prompt[2:]))
    assert index.match(prompt).of(worker) == 0
    assert index.num_blocks(worker) is None


def test_after_a_gap_nothing_is_claimed_until_a_dump_is_complete() -> None:
    index, prompt = PrefixIndex(), blocks(4)
    worker = dumped(index, "w", prompt[:2])
    assert index.apply(worker, CacheChanges(3, prompt[2:3]))  # perhaps 2 took the first one out
    assert (index.match(prompt).of(worker), index.num_blocks(worker)) == (0, None)
    assert not index.apply(worker, CacheChanges(4, prompt[3:]))  # it has been asked for
    assert not index.apply(worker, CacheChanges(5, prompt[:1], begins_dump=True))
    assert (index.match(prompt).of(worker), index.num_blocks(worker)) == (0, None)
    assert index.apply(worker, CacheChanges(7, prompt[2:3], ends_dump=True))  # a part of the dump is missing
    assert index.match(prompt).of(worker) == 0
    assert not index.apply(worker, CacheChanges(8, prompt[:1], begins_dump=True))
    assert not index.apply(worker, CacheChanges(9, prompt[1:3], ends_dump=True))
    assert (index.match(prompt).of(worker), index.num_blocks(worker)) == (3, 3)


def test_what_comes_twice_or_late_changes_nothing() -> None:
    index, prompt = PrefixIndex(), blocks(3)
    dump = CacheChanges(1, prompt[:1], begins_dump=True, ends_dump=True)
    worker = dumped(index, "w", prompt[:1])
    more, less = CacheChanges(2, prompt[1:]), CacheChanges(3, (), prompt[1:])
    for changes in (dump, more, more, dump, less, less, more, dump):
        assert not index.apply(worker, changes)
    assert index.match(prompt).of(worker) == 1
    index.leave(worker)
    index.join(worker, 3)
    for changes in (dump, more, less):
        assert not index.apply(worker, changes)
    assert index.match(prompt).of(worker) == 0
    assert not index.apply(worker, CacheChanges(4, prompt, begins_dump=True, ends_dump=True))
    assert index.match(prompt).of(worker) == 3


def test_matches_stay_what_they_were_when_workers_come_and_go() -> None:
    index, prompt = PrefixIndex(), blocks(3)
    worker = dumped(index, "w", prompt)
    matches = index.match(prompt)
    index.leave(worker)
    other = dumped(index, "other", [])
    for number in range(2, 5):
        index.apply(other, CacheChanges(number))
    third = dumped(index, "third", prompt[:1])
    assert (matches.of(worker), matches.of(other), matches.of(third)) == (3, 0, 0)
    assert index.match(prompt).longest(random.Random(0), 9) == [(third, 1)]


@pytest.mark.parametrize("num_workers, most_bytes", [(3, 125), (1000, 275)])
def test_what_a_block_costs(num_workers: int, most_bytes: int) -> None:
    """As the index says of itself: for all who hold it together. In a large fleet it has many bits."""
    index, num, costs = PrefixIndex(), 50000, []
    for number in range(num_workers - 3):
        index.join(WorkerId(f"other{number}", "e1"), 1)
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        for number in range(3):
            dumped(index, f"w{number}", blocks(num))
            costs.append((tracemalloc.get_traced_memory()[0] - before) / num)
    finally:
        tracemalloc.stop()
    assert len(index) == num
    assert costs[0] < most_bytes and costs[2] < costs[0] + 1, costs
