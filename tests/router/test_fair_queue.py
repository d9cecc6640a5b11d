"""Who goes next: tables of orders, and properties against counts made here."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from router.fair_queue import NUM_LEVELS, FairQueue, QueueLimits, Waiting

AGE_S, PATIENCE_S = 4.0, 20.0
TOP = NUM_LEVELS - 1


def waiting(
    tenant: str = "a",
    priority: int = 5,
    num_tokens: int = 10,
    entered_at: float = 0.0,
    deadline_at: float | None = None,
) -> Waiting:
    return Waiting(tenant, priority, num_tokens, entered_at, deadline_at)


def order_of(entries: dict[str, Waiting], now: float = 0.0) -> str:
    """The names of the entries, pushed as listed, in the order in which they go if one goes after the other."""
    queue: FairQueue[Waiting] = FairQueue(QueueLimits())
    for entry in entries.values():
        queue.push(entry, entry.entered_at)
    names = {entry: name for name, entry in entries.items()}
    expected = "".join(names[entry] for entry in queue.in_order(now))
    gone = ""
    while queue:
        first = next(queue.in_order(now))
        gone += names[first]
        queue.serve(first)
    assert gone == expected  # what in_order foretells is what happens
    return gone


@pytest.mark.parametrize(
    "entries, order",
    [
        pytest.param({"x": waiting(), "y": waiting(), "z": waiting()}, "xyz", id="first come, first served"),
        pytest.param({"x": waiting(priority=0), "y": waiting(priority=9), "z": waiting()}, "yzx", id="by priority"),
        pytest.param(
            {"x": waiting(), "y": waiting(deadline_at=9.0), "z": waiting(deadline_at=3.0)}, "zyx", id="by deadline"
        ),
        pytest.param(
            {"x": waiting(), "y": waiting(deadline_at=1000.0)}, "xy", id="a deadline beyond patience is as none"
        ),
        pytest.param(
            {"x": waiting(deadline_at=15.0), "y": waiting("b", deadline_at=1.0), "z": waiting(deadline_at=9.0)},
            "yzx",
            id="of equal shares what is due first",
        ),
        pytest.param(
            {"x": waiting(), "y": waiting(), "z": waiting(), "b": waiting("b"), "c": waiting("c")},
            "xbcyz",
            id="tenants take turns",
        ),
        pytest.param(
            {"x": waiting(num_tokens=30), "y": waiting(num_tokens=30), **{n: waiting("b") for n in "1234567"}},
            "x123y4567",  # at 30 tokens each, x came first
            id="turns of as many tokens",
        ),
        pytest.param(
            {"x": waiting("a", 9), "y": waiting("a", 9), "1": waiting("b", 3, deadline_at=1.0)},
            "xy1",
            id="neither share nor deadline beats a priority",
        ),
    ],
)
def test_order(entries: dict[str, Waiting], order: str) -> None:
    assert order_of(entries) == order


@pytest.mark.parametrize(
    "now, order",
    [(3.99, "yx"), (4.0, "yx"), (15.9, "yx"), (16.0, "xy"), (40.0, "xy")],  # 0 against 4: 16 s; it was due before
)
def test_priority_rises_with_time(now: float, order: str) -> None:
    late = waiting(priority=4, entered_at=now)
    assert order_of({"x": waiting(priority=0), "y": late}, now) == order


def test_one_that_comes_back_has_its_old_place() -> None:
    queue: FairQueue[Waiting] = FairQueue(QueueLimits())
    first, second = waiting(priority=2), waiting(priority=5, entered_at=11.0)
    queue.push(first, 0.0)
    queue.push(second, 11.0)
    queue.remove(first)
    queue.push(first, 12.0)  # three levels in 12 s
    assert list(queue.in_order(12.0)) == [first, second]
    assert first.level == 5


def test_who_comes_late_neither_catches_up_nor_is_behind() -> None:
    queue: FairQueue[Waiting] = FairQueue(QueueLimits())
    for _ in range(20):
        queue.push(waiting("a"), 0.0)
    for _ in range(10):
        queue.serve(next(queue.in_order(0.0)))
    for _ in range(5):
        queue.push(waiting("b"), 1.0)
    served = ""
    for _ in range(10):
        first = next(queue.in_order(1.0))
        served += first.tenant
        queue.serve(first)
    assert served in ("ba" * 5, "ab" * 5)


def test_what_an_answer_took_in_the_end_counts() -> None:
    """Tenant a was charged 10 for its first, which took 40: then b has three more before a is on."""
    queue: FairQueue[Waiting] = FairQueue(QueueLimits())
    first = waiting("a")
    for entry in (first, *(waiting("a") for _ in range(3)), *(waiting("b") for _ in range(6))):
        queue.push(entry, 0.0)
    queue.correct(queue.serve(first), 40)
    assert "".join(entry.tenant for entry in queue.in_order(0.0)) == "bbbbababa"


@pytest.mark.parametrize(
    "held, asked, fits",
    [
        ([], ("a", 5, 999), True),  # larger than all, but alone
        ([("a", 5, 1)], ("a", 5, 100), False),
        ([("a", 5, 1)], ("a", 5, 99), True),
        ([("a", 5, 1)] * 8, ("a", 5, 1), False),  # of 10 places a flow has at most 8: four times the two left
        ([("a", 5, 1)] * 8, ("b", 5, 1), True),
        ([("a", 5, 1)] * 8, ("a", 6, 1), True),
        ([("a", 5, 1)] * 8 + [("b", 5, 1)] * 2, ("c", 5, 1), False),
        ([("a", 5, 80)], ("a", 5, 1), False),  # tokens likewise: 80 of 100
        ([("a", 5, 80)], ("b", 5, 20), True),
        ([("a", 5, 80)], ("b", 5, 21), False),
    ],
)
def test_room(held: list[tuple[str, int, int]], asked: tuple[str, int, int], fits: bool) -> None:
    queue: FairQueue[Waiting] = FairQueue(QueueLimits(max_requests=10, max_tokens=100))
    for tenant, priority, num_tokens in held:
        queue.push(waiting(tenant, priority, num_tokens), 0.0)
    assert queue.has_room(*asked) is fits


sizes = st.integers(1, 500)


@settings(max_examples=30, deadline=None)
@given(st.lists(st.lists(sizes, min_size=60, max_size=60), min_size=2, max_size=4), st.lists(sizes, max_size=30))
def test_shares_are_equal_within_a_request_of_each(tenants: list[list[int]], before: list[int]) -> None:
    """While all of them wait; whatever one of them was served before that."""
    queue: FairQueue[Waiting] = FairQueue(QueueLimits())
    for num_tokens in before:
        queue.push(early := waiting("0", num_tokens=num_tokens), 0.0)
        queue.serve(early)
    left = Counter({str(index): len(costs) for index, costs in enumerate(tenants)})
    for index, costs in enumerate(tenants):
        for num_tokens in costs:
            queue.push(waiting(str(index), num_tokens=num_tokens), 0.0)
    served = Counter[str]()
    while min(left.values()) > 0:
        first = next(queue.in_order(0.0))
        queue.serve(first)
        served[first.tenant] += first.num_tokens
        left[first.tenant] -= 1
        shares = [served[tenant] for tenant in left]
        assert max(shares) - min(shares) <= 2 * max(max(costs) for costs in tenants)


@settings(max_examples=25, deadline=None)
@given(st.integers(0, TOP), st.integers(1, 5), st.lists(sizes, min_size=1, max_size=7), st.booleans())
def test_nobody_starves(priority: int, num_rivals: int, costs: list[int], is_same_tenant: bool) -> None:
    """Against rivals of the highest priority, always there, with deadlines that are always close."""
    queue: FairQueue[Waiting] = FairQueue(QueueLimits(age_s=AGE_S, patience_s=PATIENCE_S))
    queue.push(poor := waiting("0", priority, 500), 0.0)
    now, tick = 0.0, 0
    risen_at = (TOP - priority) * AGE_S
    while poor in queue:
        while len(queue) < 20:
            tenant = "0" if is_same_tenant else str(tick % num_rivals + 1)
            queue.push(waiting(tenant, TOP, costs[tick % len(costs)], now, now + 0.5), now)
            tick += 1
        queue.serve(next(queue.in_order(now)))
        now += 0.25
        # Those that waited before it rose, at most, and one of each rival; none that came after it was due.
        assert now <= max(risen_at, PATIENCE_S) + 0.25 * (20 + num_rivals + 1)


@settings(max_examples=30, deadline=None)
@given(st.lists(st.tuples(st.sampled_from("abc"), sizes, st.none() | st.floats(0.5, 60)), min_size=1, max_size=40))
def test_tokens_before_are_those_that_go_before(entries: list[tuple[str, int, float | None]]) -> None:
    queue: FairQueue[Waiting] = FairQueue(QueueLimits())
    for tenant, num_tokens, deadline_at in entries:
        queue.push(last := waiting(tenant, num_tokens=num_tokens, deadline_at=deadline_at), 0.0)
    told = queue.tokens_before(last, 0.0)
    before = 0
    for entry in queue.in_order(0.0):
        if entry is last:
            break
        before += entry.num_tokens
    assert abs(told - before) <= 2 * max(num_tokens for _, num_tokens, _ in entries)


@dataclass
class Entry:
    waiting: Waiting
    number: int


class Events(RuleBasedStateMachine):
    """Any sequence of events against a plain list."""

    def __init__(self) -> None:
        super().__init__()
        self.queue: FairQueue[Waiting] = FairQueue(QueueLimits(max_requests=12, max_tokens=2000))
        self.now = 0.0
        self.entries: list[Entry] = []
        self.number = 0

    @rule(
        tenant=st.sampled_from("abc"),
        priority=st.integers(0, TOP),
        num_tokens=sizes,
        slack=st.none() | st.floats(0, 90),
    )
    def come(self, tenant: str, priority: int, num_tokens: int, slack: float | None) -> None:
        if self.queue.has_room(tenant, priority, num_tokens):
            deadline_at = None if slack is None else self.now + slack
            entry = waiting(tenant, priority, num_tokens, self.now, deadline_at)
            self.queue.push(entry, self.now)
            self.entries.append(Entry(entry, self.number))
            self.number += 1

    @precondition(lambda self: self.entries)
    @rule(pick=st.integers(0, 99), is_served=st.booleans(), num_tokens=sizes)
    def leave(self, pick: int, is_served: bool, num_tokens: int) -> None:
        entry = self.entries.pop(pick % len(self.entries)).waiting
        if is_served:
            self.queue.correct(self.queue.serve(entry), num_tokens)
        else:
            self.queue.remove(entry)

    @rule(elapsed_s=st.sampled_from([0.5, 2.0, 5.0, 30.0]))
    def wait(self, elapsed_s: float) -> None:
        self.now += elapsed_s

    @invariant()
    def holds_what_came_and_has_not_left(self) -> None:
        queue, entries = self.queue, [entry.waiting for entry in self.entries]
        assert len(queue) == len(entries) <= 12
        assert queue.num_tokens == sum(entry.num_tokens for entry in entries)
        assert queue.num_tokens <= 2000 or len(entries) == 1
        for priority, counted in enumerate(queue.counts()):
            own = [entry.num_tokens for entry in entries if entry.priority == priority]
            assert counted == (len(own), sum(own))

    @invariant()
    def order_is_by_level_and_within_a_tenant_by_what_is_due(self) -> None:
        def level(entry: Waiting) -> int:
            return min(TOP, entry.priority + int((self.now - entry.entered_at) / AGE_S))

        def due_at(entry: Waiting) -> float:
            latest = entry.entered_at + PATIENCE_S
            return latest if entry.deadline_at is None else min(latest, entry.deadline_at)

        order = list(self.queue.in_order(self.now))
        assert Counter(order) == Counter(entry.waiting for entry in self.entries)
        levels = [level(entry) for entry in order]
        assert levels == sorted(levels, reverse=True)
        numbers = {entry.waiting: entry.number for entry in self.entries}
        for tenant in "abc":
            for each in range(NUM_LEVELS):
                ranks = [
                    (due_at(entry), numbers[entry])
                    for entry in order
                    if entry.tenant == tenant and level(entry) == each
                ]
                assert ranks == sorted(ranks)


Events.TestCase.settings = settings(max_examples=40, stateful_step_count=25, deadline=None)
test_any_sequence_of_events = Events.TestCase
