"""Several routers over one store: each other's load, the same assignments, and no store at all for a while."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence

from hypothesis import given, settings
from hypothesis import strategies as st

from router.candidate import Role, WorkerId
from router.decisions import Decisions
from router.rate_limits import RateLimits
from router.shared_records import Assignment, RouterRecord, SentLoad, VersionedAssignment
from router.sharing import Sharing
from router.store import MemoryStore, StoreAway

A, B = WorkerId("a", "epoch of a"), WorkerId("b", "epoch of b")
STARTED = Assignment(Role.DECODE, is_drained=False)


class Table:
    """A router's workers, as far as `Sharing` sees them."""

    def __init__(self) -> None:
        self.sent: dict[WorkerId, SentLoad] = {}
        self.elsewhere: Mapping[WorkerId, SentLoad] = {}
        self.assigned: dict[WorkerId, Assignment] = {A: STARTED, B: STARTED}
        self.told: list[list[str]] = []

    def sent_loads(self) -> Mapping[WorkerId, SentLoad]:
        return dict(self.sent)

    def set_sent_elsewhere(self, loads: Mapping[WorkerId, SentLoad]) -> None:
        self.elsewhere = loads

    def started_as(self, worker_id: WorkerId) -> Assignment:
        return STARTED

    def assignments(self) -> Mapping[WorkerId, Assignment]:
        return dict(self.assigned)

    def assign(self, worker_id: WorkerId, assignment: Assignment) -> None:
        self.assigned[worker_id] = assignment

    def tell_routers(self, addresses: Sequence[str]) -> None:
        self.told.append(list(addresses))


class MovableStore(MemoryStore):
    """Can be away, and can lose all it had."""

    def __init__(self, clock: Clock) -> None:
        super().__init__(clock)
        self.is_away = False

    async def records(self, kind: str) -> Mapping[str, bytes]:
        self._refuse()
        return await super().records(kind)

    async def put(self, kind: str, name: str, value: bytes, ttl_s: float) -> None:
        self._refuse()
        await super().put(kind, name, value, ttl_s)

    async def append(self, log: str, value: bytes, max_length: int) -> None:
        self._refuse()
        await super().append(log, value, max_length)

    async def remove(self, kind: str, name: str) -> None:
        self._refuse()
        await super().remove(kind, name)

    def lose_all(self) -> None:
        self._records.clear()
        self._logs.clear()

    def _refuse(self) -> None:
        if self.is_away:
            raise StoreAway("gone for a test")


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class Routers:
    """`number` of them over one store, whose exchanges a test makes itself."""

    def __init__(self, number: int) -> None:
        self.clock = Clock()
        self.store = MovableStore(self.clock)
        self.tables = [Table() for _ in range(number)]
        self.limits = [RateLimits(self.clock) for _ in range(number)]
        self.decisions = [Decisions(self.store, f"10.0.0.{index}:8500".format) for index in range(number)]
        self.num_restarts = 0
        self.sharing = [self._sharing(index, f"router {index}") for index in range(number)]

    async def exchange(self, times: int = 1) -> None:
        for _ in range(times):
            for sharing in self.sharing:
                await sharing.exchange()

    async def restart(self, index: int) -> None:
        """As a new process: it knows nothing, and its workers have registered as they started."""
        self.tables[index], self.limits[index] = Table(), RateLimits(self.clock)
        self.num_restarts += 1
        self.sharing[index] = self._sharing(index, f"router {index} again {self.num_restarts}")

    def _sharing(self, index: int, router_id: str) -> Sharing:
        table, limits, decisions = self.tables[index], self.limits[index], self.decisions[index]
        return Sharing(self.store, router_id, f"10.0.0.{index}:8500", table, limits, decisions, self.clock)


async def test_each_sees_what_the_others_have_sent() -> None:
    routers = Routers(3)
    routers.tables[0].sent = {A: SentLoad(3, 40, 500)}
    routers.tables[1].sent = {A: SentLoad(1, 2, 3), B: SentLoad(7, 0, 0)}
    await routers.exchange(2)
    assert routers.tables[0].elsewhere == {A: SentLoad(1, 2, 3), B: SentLoad(7, 0, 0)}
    assert routers.tables[1].elsewhere == {A: SentLoad(3, 40, 500)}
    assert routers.tables[2].elsewhere == {A: SentLoad(4, 42, 503), B: SentLoad(7, 0, 0)}
    assert routers.sharing[1].addresses == ["10.0.0.1:8500", "10.0.0.0:8500", "10.0.0.2:8500"]
    routers.tables[1].sent = {}
    await routers.exchange(2)
    assert routers.tables[2].elsewhere == {A: SentLoad(3, 40, 500)}


async def test_one_that_is_killed_no_longer_counts_after_a_while() -> None:
    routers = Routers(2)
    routers.tables[0].sent = {A: SentLoad(3, 40, 500)}
    await routers.exchange(2)
    for _ in range(10):  # the first one says nothing any more
        routers.clock.now += 1
        await routers.sharing[1].exchange()
    assert routers.tables[1].elsewhere == {}
    assert routers.sharing[1].addresses == ["10.0.0.1:8500"]


async def test_one_that_lives_counts_although_nothing_changes() -> None:
    routers = Routers(2)
    routers.tables[0].sent = {A: SentLoad(3, 40, 500)}
    for _ in range(30):
        routers.clock.now += 1
        await routers.exchange()
    assert routers.tables[1].elsewhere == {A: SentLoad(3, 40, 500)}


async def test_one_that_leaves_in_order_is_gone_at_once() -> None:
    routers = Routers(2)
    await routers.exchange(2)
    await routers.sharing[0].leave()
    await routers.sharing[1].exchange()
    assert routers.sharing[1].addresses == ["10.0.0.1:8500"]
    assert routers.tables[1].told == [["10.0.0.1:8500", "10.0.0.0:8500"], ["10.0.0.1:8500"]]  # once each


async def test_an_assignment_reaches_all_and_those_who_come_later() -> None:
    routers = Routers(3)
    await routers.exchange()
    routers.tables[1].assigned[A] = Assignment(Role.PREFILL, is_drained=False)
    routers.tables[2].assigned[B] = Assignment(Role.DECODE, is_drained=True)
    await routers.exchange(2)
    wanted = {A: Assignment(Role.PREFILL, is_drained=False), B: Assignment(Role.DECODE, is_drained=True)}
    assert [table.assigned for table in routers.tables] == [wanted] * 3
    await routers.restart(0)
    await routers.exchange()
    assert routers.tables[0].assigned == wanted


async def test_what_was_assigned_last_holds_whoever_did_it() -> None:
    routers = Routers(2)
    for index, role in ((0, Role.PREFILL), (1, Role.BOTH), (1, Role.PREFILL), (0, Role.DECODE), (1, Role.BOTH)):
        routers.tables[index].assigned[A] = Assignment(role, is_drained=False)
        await routers.exchange(2)
        assert [table.assigned[A].role for table in routers.tables] == [role, role]


async def test_a_change_made_during_an_exchange_is_not_undone_by_it() -> None:
    routers = Routers(2)
    await routers.exchange()
    routers.tables[0].assigned[A] = Assignment(Role.PREFILL, is_drained=False)
    await routers.sharing[0].exchange()
    records = routers.store.records

    async def records_during_which_an_operator_comes(kind: str) -> Mapping[str, bytes]:
        if kind == "assignments":
            routers.tables[1].assigned[A] = Assignment(Role.BOTH, is_drained=True)
        return await records(kind)

    routers.store.records = records_during_which_an_operator_comes  # type: ignore[method-assign]
    await routers.sharing[1].exchange()
    routers.store.records = records  # type: ignore[method-assign]
    await routers.exchange(2)
    assert [table.assigned[A] for table in routers.tables] == [Assignment(Role.BOTH, is_drained=True)] * 2


async def test_without_the_store_each_goes_on_by_itself_and_all_heals_after() -> None:
    routers = Routers(2)
    routers.tables[0].sent = {A: SentLoad(3, 40, 500)}
    routers.tables[0].assigned[A] = Assignment(Role.PREFILL, is_drained=False)
    await routers.exchange(2)
    routers.store.is_away = True
    await routers.exchange()
    assert routers.tables[1].elsewhere == {A: SentLoad(3, 40, 500)}  # for some seconds it is likely true still
    for _ in range(60):
        routers.clock.now += 1
        await routers.exchange()
    assert routers.tables[1].elsewhere == {}
    assert routers.tables[1].assigned[A].role is Role.PREFILL
    routers.tables[1].assigned[B] = Assignment(Role.DECODE, is_drained=True)  # an operator, meanwhile
    routers.decisions[1].add("drain", "b")
    routers.store.is_away = False
    routers.store.lose_all()
    await routers.exchange(3)
    assert routers.tables[1].elsewhere == {A: SentLoad(3, 40, 500)}
    wanted = {A: Assignment(Role.PREFILL, is_drained=False), B: Assignment(Role.DECODE, is_drained=True)}
    assert [table.assigned for table in routers.tables] == [wanted] * 2
    await routers.restart(0)
    await routers.exchange()
    assert routers.tables[0].assigned == wanted
    (decision,) = await routers.decisions[0].newest(10)
    assert (decision.what, decision.worker, decision.router) == ("drain", "b", "10.0.0.1:8500")


async def test_records_that_cannot_be_read_are_left_alone() -> None:
    routers = Routers(2)
    raws = [
        b"\xff",
        b"[]",
        b"null",
        b"{}",
        b'{"address": "x", "beat": "y", "loads": [1]}',
        b'{"role": 77}',
        b"[" * 10**5,
    ]
    infinite = b'"address": "x", "beat": Infinity, "loads": []'
    raws.append(b'{"role": "decode", "drained": false, "version": Infinity, "writer": "x", ' + infinite + b"}")
    for raw in raws:
        await routers.store.put("routers", "strange", raw, 60)
        await routers.store.put("assignments", "a@epoch of a", raw, 60)
        routers.tables[0].sent = {A: SentLoad(len(raw), 0, 0)}
        await routers.exchange(2)
        assert routers.tables[1].elsewhere == {A: SentLoad(len(raw), 0, 0)}
    assert routers.tables[1].assigned == {A: STARTED, B: STARTED}


def test_records_come_back_as_they_were() -> None:
    record = RouterRecord("[::1]:8500", 7, {A: SentLoad(1, 2, 3, 1), WorkerId("ü:@ ", "e"): SentLoad()})
    assert RouterRecord.from_bytes(record.to_bytes()) == record
    versioned = VersionedAssignment(Assignment(Role.BOTH, is_drained=True), 9, "writer")
    assert VersionedAssignment.from_bytes(versioned.to_bytes()) == versioned


Step = tuple[str, int, Role, bool]
STEPS = st.lists(
    st.tuples(
        st.sampled_from(["assign", "exchange", "away", "back", "lose", "restart"]),
        st.integers(0, 2),
        st.sampled_from([Role.PREFILL, Role.DECODE, Role.BOTH]),
        st.booleans(),
    ),
    max_size=40,
)


@given(STEPS)
@settings(max_examples=300, deadline=None)
def test_whatever_happens_all_come_to_the_same_and_to_what_was_assigned_last_by_one_who_knew(steps: list[Step]) -> None:
    async def play() -> None:
        routers = Routers(3)
        for what, index, role, is_drained in steps:
            routers.clock.now += 0.1
            match what:
                case "assign":
                    routers.tables[index].assigned[A] = Assignment(role, is_drained)
                case "exchange":
                    await routers.sharing[index].exchange()
                case "away" | "back":
                    routers.store.is_away = what == "away"
                case "lose":
                    routers.store.lose_all()
                case "restart":
                    await routers.restart(index)
        routers.store.is_away = False
        await routers.exchange(3)
        first, *others = (table.assigned[A] for table in routers.tables)
        assert others == [first, first]
        last = Assignment(Role.BOTH, is_drained=not first.is_drained)  # one who has seen all decides anew
        routers.tables[1].assigned[A] = last
        await routers.exchange(2)
        assert [table.assigned[A] for table in routers.tables] == [last] * 3

    asyncio.run(play())
