"""The gate: who goes at once, who waits and in which order, who is refused, and that each leaves once."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from protos.errors import DeadlineExceeded, NoWorker, Overloaded
from router.config import AdmissionPolicy
from router.dispatch import Dispatch
from router.placement import Placement
from tests.router.crowd import POLICY, Asked, Crowd, refusal

MakeCrowd = Callable[..., Crowd]


@pytest.fixture
def crowd() -> Iterator[MakeCrowd]:
    made: list[Crowd] = []

    def make(policy: AdmissionPolicy = POLICY, **workers: int) -> Crowd:
        made.append(Crowd(policy, **workers))
        return made[-1]

    yield make
    for each in made:
        each.close()


def test_goes_at_once_while_there_is_room_and_then_as_room_comes(crowd: MakeCrowd) -> None:
    people = crowd(w=2)
    first, second, third, fourth = (people.ask(name) for name in "abcd")
    assert people.went == ["a", "b"]
    assert first.task.result().wait_s == second.task.result().wait_s == 0.0
    assert (third.is_waiting, people.gate.num_waiting) == (True, 2)
    people.pass_time(2.0)
    assert people.went == ["a", "b"]
    people.end(second)
    assert people.went == ["a", "b", "c"]
    assert third.task.result().wait_s == 2.0
    assert people.gate.counts()[5] == (1, 100)
    people.end(first)
    assert people.went == ["a", "b", "c", "d"] and people.gate.num_waiting == 0
    assert fourth.is_running


def test_order_is_that_of_the_queue(crowd: MakeCrowd) -> None:
    people = crowd(w=1)
    running = people.ask("first")
    people.ask("x")
    people.ask("low", priority=1)
    people.ask("y", tenant="b")
    people.ask("z")
    people.ask("high", priority=9)
    people.ask("soon", within_s=9.0)
    while people.gate.num_waiting:
        people.end(running)
        running = next(each for each in people.asked if each.is_running)
    # soon is due before x and z; the tenant without a name was served before the queue formed, which is forgotten
    assert people.went[1:4] == ["high", "soon", "y"] and people.went[4:] == ["x", "z", "low"]


def test_one_that_leaves_the_queue_is_not_served(crowd: MakeCrowd) -> None:
    people = crowd(w=1)
    running, leaving, staying = (people.ask(name) for name in "abc")
    people.leave(leaving)
    assert leaving.task.cancelled() and people.gate.num_waiting == 1
    people.end(running)
    assert people.went == ["a", "c"] and staying.is_running


def test_one_that_leaves_as_its_turn_comes_takes_no_place(crowd: MakeCrowd) -> None:
    """It is told and cancelled before it runs again: its load has to be given back, and the next one goes."""
    people = crowd(w=1)
    running, leaving, staying = (people.ask(name) for name in "abc")
    admitted = running.task.result()
    people.loop.call_soon(admitted.dispatches[0].end)  # and with it, a look
    people.loop.call_soon(lambda: people.loop.call_soon(lambda: people.loop.call_soon(leaving.task.cancel)))
    people.loop.settle()
    assert people.went == ["a", "b", "c"]
    assert leaving.task.cancelled() and (leaving.num_dispatched, leaving.num_ended) == (1, 1)
    assert staying.is_running and people.taken["w"] == 1


def test_newcomer_does_not_take_the_place_of_one_that_waits(crowd: MakeCrowd) -> None:
    people = crowd(w=1)
    running = people.ask("a")
    people.ask("b")
    people.loop.call_soon(running.task.result().dispatches[0].end)  # the look is due, and has not been yet
    people.ask("c")
    assert people.went == ["a", "b"]


def test_small_ones_pass_a_large_one_until_workers_are_held_for_it(crowd: MakeCrowd) -> None:
    people = crowd(w=4, v=4)
    running = [people.ask(f"r{index}") for index in range(8)]
    people.ask("large", 4)
    num_small = 0
    while "large" not in people.went:
        assert num_small < 30
        people.ask(f"s{num_small}")
        num_small += 1
        running = [each for each in people.asked if each.is_running]
        people.end(running[0])  # the oldest: on both workers in turn
    passed = people.went[8 : people.went.index("large")]
    assert len(passed) >= 8  # before that nothing is held
    assert len(passed) <= 8 + 8  # then one worker takes none until it is empty, and the other goes on


def test_one_that_is_no_smaller_than_what_does_not_fit_is_not_tried(crowd: MakeCrowd) -> None:
    """Each try is a placement among all workers."""
    people = crowd(w=2)
    running = people.ask("r", 2)
    for index in range(6):
        people.ask(f"large{index}", 2)
    people.ask("small")
    people.num_found = 0
    people.end(running)
    assert people.num_found == 3 and people.went == ["r", "large0"]  # it, the next large one, and the small one


def test_workers_are_given_free_when_who_they_were_held_for_leaves(crowd: MakeCrowd) -> None:
    people = crowd(w=2)
    first = people.ask("r0")
    second = people.ask("r1")
    large = people.ask("large", 2)
    for index in range(8):
        people.ask(f"s{index}")
        people.end(first)
        first = people.asked[-1]
    people.ask("s8")
    people.end(first)
    assert people.asked[-1].is_waiting  # one of two places is free, and held
    people.leave(large)
    assert people.asked[-1].is_running and second.is_running


def test_deadline_ends_the_wait_by_itself(crowd: MakeCrowd) -> None:
    people = crowd(w=1)
    people.ask("a")
    waiting = people.ask("b", within_s=3.0)
    people.pass_time(2.5)
    assert waiting.is_waiting
    people.pass_time(0.5)
    error = refusal(waiting)
    assert isinstance(error, DeadlineExceeded) and "the deadline passed after 3.00 s in the queue" in str(error)
    assert people.gate.num_waiting == 0


def test_deadline_that_has_passed(crowd: MakeCrowd) -> None:
    assert isinstance(refusal(crowd(w=1).ask("a", within_s=0.0)), DeadlineExceeded)


def drained(people: Crowd, seconds: int) -> None:
    """One request of 100 tokens each half second, with a queue all the time."""
    while people.gate.num_waiting < 3:
        people.ask("")
    for _ in range(2 * seconds):
        people.pass_time(0.5)
        people.end(next(each for each in people.asked if each.is_running))
        people.ask("")


def test_deadline_that_the_queue_will_not_meet_is_refused_at_once(crowd: MakeCrowd) -> None:
    people = crowd(w=1)
    people.ttft_s = 1.0
    drained(people, 20)  # 200 tokens a second; three wait
    hopeless = people.ask("x", within_s=2.5, priority=4)  # (3 + itself) / 2 = 2 s, and 1 s
    error = refusal(hopeless)
    assert isinstance(error, Overloaded) and error.retryable
    assert "the deadline is in 2.50 s, and the first token would come in about" in str(error)
    assert error.retry_after_s is not None and 1.0 <= error.retry_after_s <= 1.5
    assert people.ask("y", within_s=4.0, priority=4).is_waiting
    assert people.ask("z", within_s=1.8).is_waiting  # due before the three: 0.5 s, and 1 s


def test_deadline_that_the_workers_will_not_meet_is_refused_at_once(crowd: MakeCrowd) -> None:
    people = crowd(w=1)
    people.ttft_s = 2.0
    assert isinstance(refusal(people.ask("x", within_s=1.9)), Overloaded)
    assert people.ask("y", within_s=2.1).is_running
    assert people.taken["w"] == 1


def test_wait_beyond_the_longest_is_refused_at_once(crowd: MakeCrowd) -> None:
    people = crowd(AdmissionPolicy(max_queue_s=5.0), w=1)
    drained(people, 20)
    waiting = [people.ask("") for _ in range(12)]
    refused = [each for each in waiting if not each.is_waiting]
    assert 5 <= len(refused) <= 7  # ten in 5 s, of which three waited
    error = refusal(refused[0])
    assert isinstance(error, Overloaded) and "5 s is the longest that any may" in str(error)
    assert people.ask("other", tenant="b").is_waiting  # whose share is due sooner
    assert people.ask("high", priority=6).is_waiting


def test_nobody_is_refused_by_prediction_before_anything_is_known(crowd: MakeCrowd) -> None:
    people = crowd(AdmissionPolicy(max_queue_s=5.0), w=1)
    assert all(people.ask("", tokens=10_000).error is None for _ in range(20))


def test_one_let_in_wrongly_is_kept_for_twice_as_long(crowd: MakeCrowd) -> None:
    people = crowd(AdmissionPolicy(max_queue_s=5.0), w=1)
    people.ask("a")
    waiting = people.ask("b")
    people.pass_time(9.5)
    assert waiting.is_waiting
    people.pass_time(0.5)
    error = refusal(waiting)
    assert isinstance(error, Overloaded) and "no worker had room in 10.0 s" in str(error)
    assert error.retry_after_s is not None and error.retry_after_s >= 5.0


def test_full_queue_refuses_at_once_and_says_when_to_come_again(crowd: MakeCrowd) -> None:
    people = crowd(AdmissionPolicy(max_queued=10), w=1)
    people.ask("running")
    waiting = [people.ask("") for _ in range(9)]
    assert [each.is_waiting for each in waiting] == [True] * 8 + [False]
    error = refusal(waiting[-1])
    assert isinstance(error, Overloaded) and "8 requests wait already, with 800 tokens" in str(error)
    assert error.retry_after_s is not None and 1.0 <= error.retry_after_s <= 1.5
    with pytest.raises(Overloaded):
        people.gate.refuse_if_full("", 5)
    people.gate.refuse_if_full("b", 5)
    assert people.ask("", tenant="b").is_waiting


def test_who_fits_no_worker_waits_a_little_for_one(crowd: MakeCrowd) -> None:
    people = crowd()
    first, second = people.ask("a"), people.ask("b")
    people.pass_time(4.0)
    third = people.ask("c")
    assert people.gate.num_waiting == 3
    people.pass_time(1.0)
    assert isinstance(refusal(first), NoWorker) and isinstance(refusal(second), NoWorker)
    people.come("w", 1)
    assert third.is_running and people.went == ["c"]


def test_workers_that_come_serve_in_order(crowd: MakeCrowd) -> None:
    people = crowd()
    for name, priority in (("a", 1), ("b", 9), ("c", 5)):
        people.ask(name, priority=priority)
    people.come("w", 2)
    assert people.went == ["b", "c"]
    people.go("w")
    people.come("v", 1)
    assert people.went == ["b", "c", "a"]


def test_those_without_a_worker_are_bounded_too(crowd: MakeCrowd) -> None:
    people = crowd(AdmissionPolicy(max_queued=5))
    asked = [people.ask("") for _ in range(7)]
    assert [each.is_waiting for each in asked] == [True] * 5 + [False] * 2
    assert isinstance(refusal(asked[-1]), Overloaded)


def test_defect_of_one_request_is_its_own(crowd: MakeCrowd, monkeypatch: pytest.MonkeyPatch) -> None:
    """It must neither stay nor keep those behind it."""
    people = crowd(w=1)
    running, broken, waiting = (people.ask(name) for name in "abc")
    dispatch = people._dispatch

    def breaking(asked: Asked, placement: Placement) -> tuple[Dispatch, ...]:
        if asked is broken:
            raise KeyError("w")
        return dispatch(asked, placement)

    monkeypatch.setattr(people, "_dispatch", breaking)
    people.end(running)
    assert isinstance(broken.error, KeyError)
    assert waiting.is_running and people.gate.num_waiting == 0


def test_what_was_admitted_is_freed_by_its_end_alone(crowd: MakeCrowd) -> None:
    """A cycle would keep a whole answer until the next collection."""
    people = crowd(w=1)
    running, asked = people.ask("a"), people.ask("b")
    gc.collect()
    gc.disable()
    try:
        people.end(running)  # so that b goes
        people.end(asked)
        people.asked.clear()
        request = weakref.ref(asked)  # its ask knows it, as a real one knows its answer
        del running, asked.task, asked
        assert request() is None
    finally:
        gc.enable()


class Comings(RuleBasedStateMachine):
    """Any sequence of events: each request leaves once, bounds hold, and nothing waits that could go."""

    def __init__(self) -> None:
        super().__init__()
        self.people = Crowd(AdmissionPolicy(max_queued=12, max_queue_s=20.0), w=3, v=2)

    def teardown(self) -> None:
        people = self.people
        for each in people.asked:
            people.leave(each)
        for each in self._running():
            people.end(each)
        left = people.gate.num_waiting, max(people.taken.values())
        counts = [(each.num_dispatched, each.num_ended) for each in people.asked]
        people.close()
        assert left == (0, 0)
        assert set(counts) <= {(0, 0), (1, 1)}

    @rule(
        size=st.sampled_from([1, 1, 1, 2, 4]),
        tenant=st.sampled_from("abc"),
        priority=st.sampled_from([0, 5, 9]),
        within_s=st.none() | st.sampled_from([0.5, 3.0, 30.0]),
        ttft_s=st.sampled_from([None, 0.1, 1.0]),
    )
    def come(self, size: int, tenant: str, priority: int, within_s: float | None, ttft_s: float | None) -> None:
        self.people.ttft_s = ttft_s
        self.people.ask("", size, tenant=tenant, priority=priority, within_s=within_s)

    @precondition(lambda self: self._waiting())
    @rule(pick=st.integers(0, 99))
    def leave(self, pick: int) -> None:
        self.people.leave(self._waiting()[pick % len(self._waiting())])

    @precondition(lambda self: self._running())
    @rule(pick=st.integers(0, 99), leaver=st.none() | st.integers(0, 99))
    def end(self, pick: int, leaver: int | None) -> None:
        """And maybe someone leaves in the same moment."""
        if leaver is not None and self._waiting():
            self._waiting()[leaver % len(self._waiting())].task.cancel()
        self.people.end(self._running()[pick % len(self._running())])

    @rule(seconds=st.sampled_from([0.5, 2.0, 10.0]))
    def wait(self, seconds: float) -> None:
        self.people.pass_time(seconds)

    @rule()
    def worker_goes_and_comes(self) -> None:
        places = self.people.places["v"]
        if self.people.taken["v"] == 0:
            self.people.go("v")
            self.people.come("v", places)

    @invariant()
    def bounds_hold(self) -> None:
        people = self.people
        assert people.gate.num_waiting == len(self._waiting()) <= 12
        for name, places in people.places.items():
            sizes = [each.size for each in self._running()]
            assert people.taken[name] <= max(places, max(sizes, default=0))

    @invariant()
    def nothing_waits_that_could_go(self) -> None:
        """But behind one that workers are held for."""
        gate = self.people.gate
        for each in self._waiting():
            if gate.num_waiting <= 8:  # further than that nobody looks
                assert gate._held or not self.people.fits(each.size)

    def _waiting(self) -> list[Asked]:
        return [each for each in self.people.asked if each.is_waiting]

    def _running(self) -> list[Asked]:
        return [each for each in self.people.asked if each.is_running]


Comings.TestCase.settings = settings(max_examples=100, stateful_step_count=30, deadline=None)
test_any_sequence_of_events = Comings.TestCase
