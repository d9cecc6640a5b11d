"""Circuit breakers and the retry budget: tables over time, and bounds under any sequence of events."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from protos.errors import AttemptsExhausted, Unavailable
from router.breaker import BreakerPolicy, Breakers, BreakerState
from router.candidate import WorkerId
from router.config import RelayPolicy
from router.leg import AttemptFailed
from router.retries import Retries
from router.retry_budget import RetryBudget, RetryPolicy

W, V = WorkerId("w", "e1"), WorkerId("v", "e1")
POLICY = BreakerPolicy(window=10, window_s=30.0, min_failures=3, open_s=2.0, max_open_s=7.0)


def breakers(outcomes: str, worker: WorkerId = W, every_s: float = 0.0) -> Breakers:
    """`x` failed, `.` went well."""
    made = Breakers(POLICY)
    for index, outcome in enumerate(outcomes):
        (made.failed if outcome == "x" else made.succeeded)(worker, index * every_s)
    return made


@pytest.mark.parametrize(
    "outcomes, every_s, is_open",
    [
        ("xx", 0.0, False),
        ("xxx", 0.0, True),
        ("...x.x.x", 0.0, True),  # what went well before anything failed is not remembered
        ("x...x.x", 0.0, False),  # fewer than half
        ("x..x.x", 0.0, True),
        ("x.........xxx", 0.0, False),  # three of the last ten
        ("x.........xxxxx", 0.0, True),
        ("xxx", 16.0, False),  # in 32 s
        ("xxx", 15.0, True),
    ],
)
def test_opens_for_who_fails_often(outcomes: str, every_s: float, is_open: bool) -> None:
    made, now = breakers(outcomes, every_s=every_s), every_s * (len(outcomes) - 1)
    assert made.avoided(now) == ({W} if is_open else set())
    assert made.state(W, now) is (BreakerState.OPEN if is_open else BreakerState.CLOSED)
    assert made.state(V, now) is BreakerState.CLOSED


def test_one_try_at_a_time_and_closes_when_it_goes_well() -> None:
    made = breakers("xxx")
    assert (made.avoided(1.99), made.avoided(2.0)) == ({W}, set())
    assert made.state(W, 2.0) is BreakerState.HALF_OPEN
    made.placed(W, 2.5)
    assert made.avoided(2.5) == {W}  # until it is known how it went
    made.succeeded(W, 3.0)
    assert made.avoided(3.0) == set() and made.state(W, 3.0) is BreakerState.CLOSED
    made.failed(W, 3.1)
    made.failed(W, 3.2)
    assert made.avoided(3.2) == set()  # it starts anew


def test_is_open_twice_as_long_after_each_try_that_fails_up_to_the_longest() -> None:
    made, now, open_s = breakers("xxx"), 0.0, 2.0
    for expected in (4.0, 7.0, 7.0):
        now += open_s
        assert made.avoided(now) == set()
        made.placed(W, now)
        made.failed(W, now)
        open_s = expected
        assert (made.avoided(now + open_s - 0.01), made.avoided(now + open_s)) == ({W}, set())


def test_try_of_which_nothing_is_heard_is_followed_by_another() -> None:
    """A client may leave before it is known."""
    made = breakers("xxx")
    made.placed(W, 2.0)
    assert (made.avoided(3.9), made.avoided(4.0)) == ({W}, set())


def test_what_was_under_way_when_it_opened_says_nothing() -> None:
    made = breakers("xxx")
    made.succeeded(W, 0.5)
    made.failed(W, 0.6)
    assert (made.avoided(1.9), made.avoided(2.0)) == ({W}, set())


def test_nothing_placed_there_while_it_is_open_is_a_try() -> None:
    """There may have been no other."""
    made = breakers("xxx")
    made.placed(W, 1.0)
    made.succeeded(W, 1.5)
    assert made.avoided(1.5) == {W}


def test_restarted_worker_is_another() -> None:
    assert breakers("xxx").state(WorkerId("w", "e2"), 0.0) is BreakerState.CLOSED


def test_workers_of_long_ago_are_forgotten() -> None:
    made = breakers("xxx")
    made.failed(V, 37.0)
    assert set(made._breakers) == {W, V}
    made.failed(WorkerId("u", "e1"), 37.1)
    assert set(made._breakers) == {V, WorkerId("u", "e1")} and made.avoided(37.1) == set()


def test_budget_has_a_floor_a_share_and_one_for_each_that_runs() -> None:
    policy = RetryPolicy(window_s=10.0, share=0.2, floor=3)
    budget = RetryBudget(policy)
    assert [budget.take(0, 0.0) for _ in range(4)] == [True] * 3 + [False]
    for _ in range(20):
        budget.requested(1.0)
    assert [budget.take(0, 1.0) for _ in range(5)] == [True] * 4 + [False]
    assert [budget.take(2, 1.0) for _ in range(3)] == [True] * 2 + [False]
    assert not budget.take(2, 9.0)
    assert [budget.take(0, 12.5) for _ in range(4)] == [True] * 3 + [False]  # nothing of it is left


def test_death_of_a_worker_that_all_run_on_is_within_the_budget() -> None:
    budget = RetryBudget()
    for _ in range(500):
        budget.requested(0.0)
    assert all(budget.take(500, 60.0) for _ in range(500))  # long after they came


def test_several_deaths_within_seconds_are_within_the_budget() -> None:
    """Of eight workers six die, one a second: all that runs on each goes on elsewhere, some of it more than once."""
    budget, workers = RetryBudget(), [WorkerId(f"w{number}", "e1") for number in range(8)]
    running = dict.fromkeys(workers, 100)
    for number, dead in enumerate(workers[:6]):
        num_lost = running.pop(dead)
        assert all(budget.take(800, 60.0 + number, dead) for _ in range(num_lost))
        running = dict.fromkeys(running, round(800 / len(running)))
    restarted = WorkerId("w0", "e2")
    assert all(budget.take(800, 66.0, restarted) for _ in range(100))


@pytest.mark.parametrize("is_connection", [True, False])
def test_what_lost_its_worker_is_told_apart(is_connection: bool) -> None:
    """60 retries of 30 that run: 10, a fifth of 30 and 30 are the one allowance."""
    retries = Retries(RelayPolicy(), random.Random(0))
    for _ in range(30):
        retries.begin()

    def retry(worker: WorkerId) -> None:
        retries.delay_s(AttemptFailed(Unavailable("gone"), worker, is_connection=is_connection), 1, 0, None)

    for worker in (W, V):
        for _ in range(30 if is_connection else 23):
            retry(worker)
    if not is_connection:
        with pytest.raises(AttemptsExhausted, match="too many requests"):
            retry(W)


def test_what_fails_without_a_death_shares_one_allowance() -> None:
    """A sick cluster is asked no more than before, however many deaths there were."""
    budget = RetryBudget(RetryPolicy(window_s=10.0, share=0.2, floor=3))
    assert all(budget.take(50, 0.0, worker) for worker in (W, V) for _ in range(50))
    assert [budget.take(50, 1.0) for _ in range(54)] == [True] * 53 + [False]


def test_connections_that_break_again_and_again_are_bounded() -> None:
    """A process dies once: what breaks once more than requests run is no death, and comes out of the one allowance."""
    budget = RetryBudget(RetryPolicy(window_s=10.0, share=0.2, floor=3))
    assert [budget.take(20, 0.1 * step, W) for step in range(44)] == [True] * 43 + [False]
    assert budget.take(20, 4.5, V)
    assert budget.take(20, 15.0, W)
    assert set(budget._broken) == {W, V}
    assert budget.take(20, 100.0, WorkerId("u", "e1"))
    assert set(budget._broken) == {WorkerId("u", "e1")}  # workers of before are forgotten


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(st.sampled_from([0.0, 0.1, 1.0, 4.0]), st.booleans()), max_size=200), st.randoms())
def test_budget_is_never_exceeded(events: list[tuple[float, bool]], rng: random.Random) -> None:
    """In any ten seconds, for a window that is exact to a tenth."""
    budget, now = RetryBudget(RetryPolicy(window_s=10.0, share=0.2, floor=3)), 0.0
    requests, retries = list[float](), list[float]()
    for elapsed_s, is_request in events:
        now += elapsed_s
        if is_request:
            budget.requested(now)
            requests.append(now)
        elif budget.take(2, now):
            retries.append(now)
            recent = sum(at > now - 9 for at in retries)
            assert recent <= 3 + 2 + 0.2 * sum(at > now - 11 for at in requests)
    assert Counter(requests).total() == sum(is_request for _, is_request in events)
