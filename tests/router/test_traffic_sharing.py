"""What comes to routers that do not plan reaches the one that does, once, and with the times that it had."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from router.observation import Answered, Arrival, Running
from router.observing import Observing
from router.store import MemoryStore
from router.traffic_sharing import TrafficRecord, TrafficSharing
from tests.router.test_sharing import Clock

ANSWERED = Answered(3.0, 1.5, 100, 20, 30, 0.25, 0.02)
SHORT = Answered(5.0, 4.0, 7, 0, 1, 0.1, None)
CLASSED = (
    [Arrival(0.5, 10, 20), Arrival(0.4, 11, 20, "chat")],
    [ANSWERED, replace(SHORT, slo_class="chat")],
    [Running(1.0, 2, 3), Running(1.0, 2, 3, "chat")],
)


class Side:
    """A router whose monotonic clock began at another moment."""

    def __init__(self, store: MemoryStore, wall: Clock, behind_s: float, *, plans_here: bool) -> None:
        self._wall = wall
        self._behind_s = behind_s
        self.plans_here = plans_here
        self.num_waiting = 0
        self.requests: list[Running] = []
        self.observing = Observing(self.clock)
        self.sharing = TrafficSharing(store, self.observing, self, self, self, self.clock, wall)

    def running(self) -> list[Running]:
        return self.requests

    def clock(self) -> float:
        return self._wall.now - self._behind_s


@pytest.fixture
def wall() -> Clock:
    return Clock()


@pytest.fixture
def store(wall: Clock) -> MemoryStore:
    return MemoryStore(wall)


async def test_it_is_told_once_with_its_times(store: MemoryStore, wall: Clock) -> None:
    planning, one, two = (
        Side(store, wall, behind_s, plans_here=plans_here)
        for behind_s, plans_here in ((900.0, True), (0.0, False), (500.0, False))
    )
    sides = (one, two, planning)
    for side, num_tokens in ((two, 5), (one, 6), (planning, 7)):
        side.observing.arrived(Arrival(side.clock(), num_tokens, 50))
        wall.now += 1
    one.observing.answered(ANSWERED)
    two.observing.answered(replace(SHORT, arrived_at_s=two.clock() - 2.0, ended_at_s=two.clock() - 0.5))
    two.requests = [Running(two.clock() - 4.0, 30, 12)]
    one.num_waiting, two.num_waiting, planning.num_waiting = 3, 4, 50
    for _ in range(40):
        for side in sides:
            await side.sharing.exchange()
        wall.now += 0.1
    arrived, answered = planning.observing.take()
    assert [each.num_prompt_tokens for each in arrived] == [5, 6, 7]
    assert [each.at_s for each in arrived] == pytest.approx([100.0, 101.0, 102.0])  # by the clock of who plans
    short, answer = sorted(answered, key=lambda each: each.ttft_s)
    assert (short.num_prompt_tokens, short.tpot_s) == (7, None)
    assert (short.arrived_at_s, short.ended_at_s) == pytest.approx((101.0, 102.5))
    assert answer == replace(ANSWERED, arrived_at_s=answer.arrived_at_s, ended_at_s=answer.ended_at_s)
    (running,) = planning.sharing.running_elsewhere
    assert running == Running(pytest.approx(99.0), 30, 12)  # type: ignore[arg-type]
    assert planning.sharing.num_waiting_elsewhere == 7
    two.observing.arrived(Arrival(two.clock(), 8, 50))
    two.requests = []
    for _ in range(40):
        for side in sides:
            await side.sharing.exchange()
        wall.now += 0.1
    assert [each.num_prompt_tokens for each in planning.observing.take()[0]] == [8]
    assert one.observing.take() == ([], [])
    await two.sharing.leave()
    for _ in range(6):
        await planning.sharing.exchange()
        wall.now += 0.1
    assert planning.sharing.num_waiting_elsewhere == 3
    assert not planning.sharing.running_elsewhere


def test_of_very_many_some_stand_for_all() -> None:
    arrived = [Arrival(index / 1000, index, 9) for index in range(5000)]
    read = TrafficRecord.from_bytes(TrafficRecord(1, 5.0, 0, arrived, [], []).to_bytes())
    assert len(read.arrived) == 5000
    assert len(set(read.arrived)) == 2000
    assert sum(each.num_prompt_tokens for each in read.arrived) == pytest.approx(5000 * 2499.5, rel=0.01)


def test_records_come_back_as_they_were() -> None:
    for record in (
        TrafficRecord(3, 5.5, 2, [Arrival(0.5, 10, 20)], [ANSWERED, SHORT], [Running(1.0, 2, 3)]),
        TrafficRecord(1, 0.0, 0, [], [], []),
        TrafficRecord(4, 5.5, 0, CLASSED[0], CLASSED[1], CLASSED[2]),
    ):
        assert TrafficRecord.from_bytes(record.to_bytes()) == record


def test_who_has_no_class_is_told_as_before_there_were_any() -> None:
    """A router of an older version takes rows apart by their length."""
    record = json.loads(TrafficRecord(4, 5.5, 0, CLASSED[0], CLASSED[1], CLASSED[2]).to_bytes())
    assert record["arrived"] == [[0.5, 10, 20], [0.4, 11, 20, "chat"]]
    assert record["answered"] == [[3.0, 1.5, 100, 20, 30, 0.25, 0.02], [5.0, 4.0, 7, 0, 1, 0.1, None, "chat"]]
    assert record["running"] == [[1.0, 2, 3], [1.0, 2, 3, "chat"]]


@pytest.mark.parametrize("named", ['["a", "b"]', "[5]", '["' + "c" * 65 + '"]'])
def test_what_is_no_class_is_not_taken_for_one(named: str) -> None:
    arrived = f"[[0.5, 10, 20, {named[1:-1]}]]"
    record = f'{{"number": 1, "at": 1, "num_waiting": 0, "num_arrived": 1, "arrived": {arrived}, '
    rest = '"num_answered": 0, "answered": [], "num_running": 0, "running": []}'
    with pytest.raises(ValueError, match="not the traffic of a router"):
        TrafficRecord.from_bytes((record + rest).encode())


async def test_classes_reach_the_router_that_plans(store: MemoryStore, wall: Clock) -> None:
    planning, other = (Side(store, wall, 0.0, plans_here=plans_here) for plans_here in (True, False))
    other.observing.arrived(Arrival(other.clock(), 9, 50, "chat"))
    other.observing.refused(had_arrived=False, slo_class="batch")
    other.observing.answered(replace(SHORT, slo_class="chat"))
    other.requests = [Running(other.clock() - 4.0, 30, 12, "batch")]
    for _ in range(30):
        for side in (other, planning):
            await side.sharing.exchange()
        wall.now += 0.1
    arrived, answered = planning.observing.take()
    assert [each.slo_class for each in arrived] == ["chat", "batch"]
    assert [each.slo_class for each in answered] == ["chat"]
    assert [each.slo_class for each in planning.sharing.running_elsewhere] == ["batch"]


@pytest.mark.parametrize(
    "raw",
    [
        *(b"\xff", b"[]", b"{}", b"[" * 10**5),
        b'{"number": 1, "at": 1, "num_waiting": 0, "num_arrived": 9, "arrived": [], "num_answered": 0, "answered": [], '
        b'"num_running": 0, "running": []}',
        b'{"number": 1, "at": 1, "num_waiting": 0, "num_arrived": 1e12, "arrived": [[1,2,3]], "num_answered": 0, '
        b'"answered": [], "num_running": 0, "running": []}',
    ],
)
async def test_records_that_cannot_be_read_are_left_alone(store: MemoryStore, wall: Clock, raw: bytes) -> None:
    with pytest.raises(ValueError, match="not the traffic of a router"):
        TrafficRecord.from_bytes(raw)
    await store.put("traffic", "strange", raw, 60)
    planning = Side(store, wall, 0.0, plans_here=True)
    await planning.sharing.exchange()
    assert planning.observing.take() == ([], [])
