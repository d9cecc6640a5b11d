"""What a key allows: tables over time, and a bound under any sequence of requests."""

from __future__ import annotations

from contextlib import ExitStack

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from protos.caller import ANYONE, Caller, Limits
from protos.errors import LimitExceeded
from router.rate_limits import RateLimits
from tests.router.test_workers import Clock


def caller(**limits: int) -> Caller:
    return Caller("k1", "acme", limits=Limits(**limits))


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def limits(clock: Clock) -> RateLimits:
    return RateLimits(clock)


def use(limits: RateLimits, who: Caller, prompt: int = 1, most: int = 1, used: int | None = None) -> None:
    with limits.claimed(who) as allowance:
        allowance.take_tokens(prompt, most)
        if used is not None:
            allowance.used(used)


def refused(limits: RateLimits, who: Caller, prompt: int = 1, most: int = 1) -> LimitExceeded:
    with pytest.raises(LimitExceeded) as caught:
        use(limits, who, prompt, most)
    return caught.value


def test_no_limit_is_none(limits: RateLimits) -> None:
    with ExitStack() as stack:
        for _ in range(1000):
            stack.enter_context(limits.claimed(ANYONE)).take_tokens(10**6, 10**6)


def test_requests_of_a_minute_may_come_at_once_and_then_evenly(limits: RateLimits, clock: Clock) -> None:
    who = caller(requests_per_minute=6)
    for _ in range(6):
        use(limits, who)
    error = refused(limits, who)
    assert str(error) == "the key 'k1' may make 6 requests per minute, and has made them"
    assert error.retry_after_s == pytest.approx(10.0)
    clock.now += 10.0
    use(limits, who)
    assert refused(limits, who).retry_after_s == pytest.approx(10.0)
    clock.now += 3600.0
    for _ in range(6):
        use(limits, who)
    refused(limits, who)


def test_requests_at_once(limits: RateLimits) -> None:
    who = caller(num_concurrent=2)
    with limits.claimed(who), limits.claimed(who):
        error = refused(limits, who)
        assert str(error) == "the key 'k1' may have 2 requests at once, and has 2"
        assert error.retry_after_s == 1.0
        use(limits, Caller("k2", "acme", limits=who.limits))  # limits are those of a key
    use(limits, who)


def test_tokens_are_taken_as_if_all_came_and_those_that_did_not_are_given_back(
    limits: RateLimits, clock: Clock
) -> None:
    who = caller(tokens_per_minute=600)
    with limits.claimed(who) as allowance:
        allowance.take_tokens(100, 400)
        error = refused(limits, who, 50, 100)
        assert "may take 600 tokens per minute: 500 of them are used, and this request may take 150" in str(error)
        assert error.retry_after_s == pytest.approx(5.0)  # of 50 tokens, at 10 a second
        use(limits, who, 50, 50)  # the rest, of which nothing is used
        allowance.used(120)
    assert refused(limits, who, 100, 381).retry_after_s == pytest.approx(0.1)
    use(limits, who, 100, 380, used=480)
    assert refused(limits, who).retry_after_s == pytest.approx(0.2)
    clock.now += 60.0
    use(limits, who, 300, 300)


def test_request_that_was_refused_later_on_has_used_no_tokens(limits: RateLimits) -> None:
    who = caller(tokens_per_minute=600)
    with pytest.raises(ValueError, match="no room"), limits.claimed(who) as allowance:
        allowance.take_tokens(300, 300)
        raise ValueError("no room")
    use(limits, who, 300, 300)


def test_longest_answer_beyond_the_limit_is_served_when_there_is_a_minute_for_it(limits: RateLimits) -> None:
    """The default length is what the context leaves."""
    who = caller(tokens_per_minute=600)
    use(limits, who, 100, 100_000, used=700)
    assert refused(limits, who).retry_after_s == pytest.approx(10.2)  # 100 more than there were, and two for this one


def test_prompt_beyond_the_limit_is_never_served(limits: RateLimits) -> None:
    error = refused(limits, caller(tokens_per_minute=600), 600, 1)
    assert "may take 600 tokens per minute, and the prompt alone has 600" in str(error)
    assert not error.retryable and error.retry_after_s is None


def test_limit_of_none_at_all(limits: RateLimits) -> None:
    assert refused(limits, caller(requests_per_minute=0)).retry_after_s == 60.0
    refused(limits, caller(num_concurrent=0))
    assert not refused(limits, caller(tokens_per_minute=0)).retryable


def test_what_is_refused_counts_nowhere(limits: RateLimits) -> None:
    who = caller(requests_per_minute=10, num_concurrent=1)
    with limits.claimed(who):
        for _ in range(20):
            refused(limits, who)
    for _ in range(9):
        use(limits, who)
    refused(limits, who)


def test_keys_that_are_as_new_are_forgotten(limits: RateLimits, clock: Clock) -> None:
    for index in range(5000):
        use(limits, Caller(f"k{index}", limits=Limits(requests_per_minute=60)))
        clock.now += 0.1
    assert len(limits._keys) <= 1000
    limits.used_here()
    assert len(limits._keys) <= 61  # those of the last six seconds, which others may not have heard of yet


def test_keys_without_limits_are_not_kept(limits: RateLimits) -> None:
    with limits.claimed(ANYONE), limits.claimed(Caller("k1")):
        assert len(limits._keys) == 0
        assert limits.num_changes == 0


@settings(max_examples=50, deadline=None)
@given(
    st.lists(
        st.tuples(st.sampled_from([0.0, 0.5, 7.0, 30.0]), st.integers(1, 80), st.integers(1, 80), st.floats(0, 1)),
        max_size=80,
    )
)
def test_no_minute_has_more_than_twice_its_limit(requests: list[tuple[float, int, int, float]]) -> None:
    """A bucket that is full, and what flows in meanwhile."""
    clock = Clock()
    limits, who, used = RateLimits(clock), caller(tokens_per_minute=160), list[tuple[float, int]]()
    for elapsed_s, prompt, most, share in requests:
        clock.now += elapsed_s
        num_used = prompt + round(share * most)
        try:
            use(limits, who, prompt, most, num_used)
        except LimitExceeded:
            continue
        used.append((clock.now, num_used))
        assert sum(number for at, number in used if at > clock.now - 60.0) <= 2 * 160
