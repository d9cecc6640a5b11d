"""How many sequences a decode worker is given that runs so many at once: those that will be there when one comes."""

from __future__ import annotations

import heapq
import itertools
import random
from collections import deque
from dataclasses import replace

import pytest

from router.candidate import Candidate
from router.config import PlacementPolicy
from router.dispatch import Dispatch, Dispatches
from router.placement import place
from router.prediction import num_active_at
from router.worker import WorkerLoad, WorkerState
from router.workers import WorkerTable
from tests.router.test_placement import D, P
from tests.router.test_predicted_placement import LAYOUT, demand, measured
from tests.router.test_workers import Clock, profile

MOST = 16
NUM_PREFILL = 24


@pytest.mark.parametrize(
    "active, coming, stay_s, in_s, expected",
    [
        (8, 0, 2.0, 0.0, 8.0),  # now
        (8, 3, 0.0, 5.0, 8.0),  # nothing is known of how long they stay
        (8, 0, 2.0, 2.0, 8 * 0.36788),  # of those that run 1/e is there after a mean stay
        (8, 8, 2.0, 2.0, 8 * 0.63212),  # those that come evenly within it: 1 - 1/e
        (8, 4, 2.0, 4.0, 4 * 0.13534 + 4 * 0.43233),
        (8, 4, 2.0, 400.0, 4 * 0.13534 + 4 * 0.43233),  # no farther ahead than two stays
        (6, 8, 2.0, 2.0, 6 * 0.63212),  # the worker and the router need not agree
        (60, 0, 2.0, 3.0, 60 - 16 * 1.5),  # 16 run at once, and no more than these end in a mean stay
    ],
)
def test_those_that_will_be_there(active: int, coming: int, stay_s: float, in_s: float, expected: float) -> None:
    worker = measured("d", D, num_active=active, num_coming=coming, stay_s=stay_s)
    assert num_active_at(worker, 0.0, in_s, MOST) == pytest.approx(expected, rel=1e-4)


def test_those_that_reach_their_last_token_until_then_will_not_be_there() -> None:
    worker: Candidate = measured("d", D, num_active=5, max_running=5)
    ending = replace(worker, releases=((10.5, 3), (11.0, 3), (13.0, 3)))
    assert [num_active_at(ending, 10.0, in_s, 5) for in_s in (0.4, 0.6, 2.0)] == [5, 4, 3]


def test_how_long_sequences_stay_is_known_once_enough_have_ended() -> None:
    clock, dispatches = Clock(), Dispatches()

    def end(stay_s: float, num_prefill_s: float = 5.0) -> None:
        dispatch = Dispatch(clock.now, 1, 1, None, dispatches, clock=clock)
        dispatch.begin()
        clock.now += num_prefill_s
        dispatch.prefilled()
        clock.now += stay_s
        dispatch.end()

    never = Dispatch(clock.now, 1, 1, None, dispatches, clock=clock)
    never.begin()
    never.end()  # it failed before its first token
    for stay_s in [1.0, 3.0] * 9 + [2.0]:
        end(stay_s)
    assert dispatches.stay_s == 0.0
    end(2.0)
    assert dispatches.stay_s == pytest.approx(2.0)
    end(42.0)
    assert dispatches.stay_s == pytest.approx(4.0)  # a twentieth of it


class Cluster:
    """One decode worker that runs `MOST` at once, 2 s each, and more prefill workers than it needs; requests without
    end before a gate that lets go whatever is within limits."""

    def __init__(self, prefill_s: float, seed: int) -> None:
        self.clock, self.rng, self.prefill_s = Clock(), random.Random(seed), prefill_s
        self.table = WorkerTable("t1", self.clock)
        load = WorkerLoad(WorkerState.READY, num_free_blocks=10**6, prefill_tokens_per_s=1000 / prefill_s)
        self.prefill = [
            self.table.register(profile(f"p{number}", P, layout=LAYOUT, num_blocks=10**6), load)
            for number in range(NUM_PREFILL)
        ]
        load = replace(load, prefill_tokens_per_s=0.0, decode_step_s=0.02, decode_batch=MOST, tokens_per_step=1.0)
        self.decode = self.table.register(profile("d", D, layout=LAYOUT, num_blocks=10**6, max_running=MOST), load)
        self.reported_at = 0.0
        self.idle_at: dict[str, float] = {}
        self.events: list[tuple[float, int, str, Dispatch]] = []
        self.numbers = itertools.count()
        self.waiting: deque[Dispatch] = deque()
        self.num_running = self.num_served = self.most_waiting = 0

    def run(self, seconds: float) -> None:
        end_at = self.clock.now + seconds
        while self.clock.now < end_at:
            self.report()
            self.let_go()
            at, _, what, dispatch = heapq.heappop(self.events)
            self.clock.now = max(self.clock.now, at)
            if what == "prefilled":
                dispatch.prefilled()
                self.waiting.append(dispatch)
            else:
                dispatch.end()
                self.num_running -= 1
                self.num_served += 1
            while self.waiting and self.num_running < MOST:
                self.num_running += 1
                self.after(self.rng.expovariate(0.5), "ended", self.waiting.popleft())
            self.most_waiting = max(self.most_waiting, len(self.waiting))

    def report(self) -> None:
        if self.clock.now - self.reported_at < 0.5:
            return
        self.reported_at = self.clock.now
        for worker in self.prefill:
            backlog_s = max(0.0, self.idle_at.get(worker.profile.id.name, 0.0) - self.clock.now)
            queued = round(1000 * backlog_s / self.prefill_s)
            self.table.report(worker, replace(worker.load, queued_prefill_tokens=queued))
        running, waiting = self.num_running, len(self.waiting)
        self.table.report(self.decode, replace(self.decode.load, num_running=running, num_waiting=waiting))

    def let_go(self) -> None:
        while True:
            found = place(self.table.snapshot(), demand(), (), self.rng, PlacementPolicy())
            if not found.is_within_limits:
                return
            assert found.prefill is not None
            name = found.prefill.id.name
            self.idle_at[name] = max(self.clock.now, self.idle_at.get(name, 0.0)) + self.prefill_s
            dispatch = self.table.dispatch(found, 1000, 63)
            self.after(self.idle_at[name] - self.clock.now, "prefilled", dispatch)

    def after(self, seconds: float, what: str, dispatch: Dispatch) -> None:
        heapq.heappush(self.events, (self.clock.now + seconds, next(self.numbers), what, dispatch))


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("prefill_s", [0.1, 1.0, 2.0])
def test_a_decode_worker_is_kept_busy_though_prompts_take_long(prefill_s: float, seed: int) -> None:
    """It can serve 8 requests a second. With prompts of 2 s, 16 in all would be 8 that are prefilled and 8 that run."""
    cluster = Cluster(prefill_s, seed)
    cluster.run(60.0)  # until it is known how long they stay
    before = cluster.num_served
    cluster.most_waiting = 0
    cluster.run(200.0)
    assert (cluster.num_served - before) / 200 > 0.85 * 8
    assert cluster.most_waiting <= 2 * MOST
