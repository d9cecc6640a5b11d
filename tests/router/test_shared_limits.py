"""Limits of keys at several routers over one store: together what one allows, and what they cannot know yet."""

from __future__ import annotations

import asyncio
import json
from contextlib import ExitStack
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from protos.caller import Caller, Limits
from protos.errors import LimitExceeded
from router.rate_limits import Allowance
from router.shared_records import KeyUse, KeyUses, LimitedKey, RouterRecord
from tests.router.test_sharing import Routers

SIX = Caller("k1", "acme", limits=Limits(requests_per_minute=6))
TOKENS = Caller("k1", "acme", limits=Limits(tokens_per_minute=600))
TWO_AT_ONCE = Caller("k1", "acme", limits=Limits(num_concurrent=2))


class Asked(Routers):
    def ask(self, index: int, who: Caller, prompt: int = 1, most: int = 1, used: int = 2) -> None:
        with self.limits[index].claimed(who) as allowance:
            allowance.take_tokens(prompt, most)
            allowance.used(used)

    def granted(self, index: int, who: Caller) -> int:
        """How many requests there may be now, made at once."""
        for number in range(10_000):
            try:
                self.ask(index, who)
            except LimitExceeded:
                return number
        raise AssertionError("there is no limit")

    def refused(self, index: int, who: Caller, prompt: int = 1, most: int = 1) -> LimitExceeded:
        with pytest.raises(LimitExceeded) as caught:
            self.ask(index, who, prompt, most)
        return caught.value

    async def pass_time(self, elapsed_s: float, *indices: int) -> None:
        """The routers exchange as they do while they run; with indices only those."""
        for _ in range(round(elapsed_s * 10)):
            self.clock.now += 0.1
            for index in indices or range(len(self.sharing)):
                await self.sharing[index].exchange()


async def test_requests_count_at_all_routers() -> None:
    routers = Asked(3)
    await routers.exchange(2)
    for index in (0, 1, 1):
        routers.ask(index, SIX)
    await routers.exchange(2)
    assert [routers.granted(index, SIX) for index in (2, 0, 1)] == [3, 3, 3]  # six more than there are, at once
    await routers.exchange(2)
    await routers.pass_time(59.5)  # what was too many has to fill up too
    assert [routers.granted(index, SIX) for index in (0, 1, 2)] == [0, 0, 0]
    assert routers.refused(0, SIX).retry_after_s == pytest.approx(10.5)
    await routers.pass_time(10.6)
    assert routers.granted(1, SIX) == 1
    await routers.exchange(2)
    assert [routers.granted(index, SIX) for index in (0, 1, 2)] == [0, 0, 0]


async def test_what_was_used_is_counted_once_however_often_it_is_told() -> None:
    routers = Asked(2)
    await routers.exchange(2)
    routers.ask(0, SIX)
    for _ in range(3):
        await routers.sharing[1].exchange()
        await routers.sharing[0].exchange()
    routers.clock.now += 2.0  # its record is put again
    await routers.exchange(3)
    routers.clock.now -= 2.0
    assert routers.granted(1, SIX) == 5


async def test_a_key_that_another_router_alone_has_seen_is_no_new_one() -> None:
    routers = Asked(2)
    await routers.exchange(2)
    assert routers.granted(0, SIX) == 6
    await routers.pass_time(20.5)
    assert routers.granted(1, SIX) == 2


async def test_tokens_count_at_all_routers_and_come_back_at_all() -> None:
    routers = Asked(2)
    await routers.exchange(2)
    routers.ask(1, TOKENS, 1, 1, used=0)  # it is known there
    await routers.exchange(2)
    with routers.limits[0].claimed(TOKENS) as allowance:
        allowance.take_tokens(100, 400)
        await routers.exchange(2)
        error = routers.refused(1, TOKENS, 50, 100)
        assert "may take 600 tokens per minute: 500 of them are used, and this request may take 150" in str(error)
        assert error.retry_after_s == pytest.approx(5.0)
        allowance.used(120)
    await routers.exchange(2)
    assert routers.refused(1, TOKENS, 100, 381).retry_after_s == pytest.approx(0.1)
    routers.ask(1, TOKENS, 100, 380, used=480)


async def test_an_answer_longer_than_was_foreseen_is_a_debt_at_all_routers() -> None:
    routers = Asked(2)
    await routers.exchange(2)
    routers.ask(1, TOKENS, 1, 1, used=0)
    routers.ask(0, TOKENS, 100, 100_000, used=700)
    await routers.exchange(2)
    assert routers.refused(1, TOKENS).retry_after_s == pytest.approx(10.2)


async def test_requests_at_once_count_at_all_routers() -> None:
    routers = Asked(3)
    await routers.exchange(2)
    with routers.limits[0].claimed(TWO_AT_ONCE), ExitStack() as elsewhere:
        elsewhere.enter_context(routers.limits[1].claimed(TWO_AT_ONCE))
        await routers.exchange(2)
        assert str(routers.refused(2, TWO_AT_ONCE)) == "the key 'k1' may have 2 requests at once, and has 2"
        routers.refused(0, TWO_AT_ONCE)
        elsewhere.close()
        await routers.exchange(2)
        routers.ask(2, TWO_AT_ONCE)
        routers.ask(0, TWO_AT_ONCE)


async def test_a_lone_router_allows_all_there_is() -> None:
    routers = Asked(1)
    granted = 0
    for _ in range(600):
        granted += routers.granted(0, SIX)
        await routers.pass_time(0.1)
    assert granted == 6 + 5  # one each ten seconds; the sixth is due just now
    await routers.pass_time(60.0)
    assert routers.granted(0, SIX) == 6


async def test_another_router_that_does_nothing_takes_nothing() -> None:
    routers = Asked(2)
    await routers.exchange(2)
    for _ in range(10):
        assert routers.granted(0, SIX) == 6
        await routers.pass_time(60.5)


async def test_a_router_that_restarts_has_no_new_minute_and_takes_none() -> None:
    routers = Asked(2)
    await routers.exchange(2)
    for _ in range(2):
        routers.ask(0, SIX)
        routers.ask(1, SIX)
    await routers.pass_time(1.1)  # by then each has told what all have used
    for _ in range(5):
        await routers.restart(0)
        await routers.exchange(2)
    assert routers.granted(0, SIX) == 2
    await routers.exchange(2)
    assert routers.granted(1, SIX) == 0
    await routers.pass_time(60.5)
    assert routers.granted(1, SIX) == 6  # nothing was counted twice


async def test_what_ran_at_a_router_that_died_counts_no_more_once_it_is_gone_and_its_tokens_are_not_given_back() -> (
    None
):
    routers = Asked(2)
    both = Caller("k1", limits=Limits(tokens_per_minute=600, num_concurrent=1))
    await routers.exchange(2)
    with routers.limits[0].claimed(both) as allowance:
        allowance.take_tokens(100, 300)
        await routers.exchange(2)
        await routers.pass_time(1.0, 1)  # the first one says nothing any more
        assert "requests at once" in str(routers.refused(1, both))
        await routers.pass_time(5.0, 1)
        assert "340 of them are used" in str(routers.refused(1, both, 100, 300))
        routers.ask(1, both, 100, 100)


async def test_the_same_after_an_orderly_end() -> None:
    routers = Asked(2)
    await routers.exchange(2)
    with routers.limits[0].claimed(TWO_AT_ONCE), routers.limits[0].claimed(TWO_AT_ONCE):
        await routers.exchange(2)
        routers.refused(1, TWO_AT_ONCE)
        await routers.sharing[0].leave()
        await routers.sharing[1].exchange()
        routers.ask(1, TWO_AT_ONCE)


async def test_tokens_come_back_only_as_far_as_they_were_counted_here() -> None:
    """The second router comes when the request runs already, and has used something itself before it heard of it."""
    routers = Asked(2)
    with routers.limits[0].claimed(TOKENS) as allowance:
        allowance.take_tokens(100, 200)
        routers.ask(1, TOKENS, 100, 200, used=300)
        await routers.exchange(2)
        allowance.used(0)
    await routers.exchange(2)
    assert "300 of them are used" in str(routers.refused(1, TOKENS, 100, 300))


async def test_without_the_store_each_router_goes_by_what_it_sees_and_pays_for_a_minute_at_most_after() -> None:
    routers = Asked(2)
    await routers.exchange(2)
    with routers.limits[0].claimed(TWO_AT_ONCE), routers.limits[0].claimed(TWO_AT_ONCE):
        await routers.exchange(2)
        routers.store.is_away = True
        await routers.pass_time(1.0)
        routers.refused(1, TWO_AT_ONCE)  # it is likely true still
        await routers.pass_time(5.0)
        routers.ask(1, TWO_AT_ONCE)
        for _ in range(10):
            assert [routers.granted(0, SIX), routers.granted(1, SIX)] == [6, 6]
            await routers.pass_time(60.5)
        routers.ask(0, SIX)
        routers.ask(0, SIX)
        routers.ask(1, SIX)
        routers.store.is_away = False
        routers.store.lose_all()
        await routers.exchange(3)
        routers.refused(1, TWO_AT_ONCE)  # the others are seen again
        routers.refused(0, TWO_AT_ONCE)
    assert routers.granted(1, SIX) == 4  # as many as the one of the two that has fewer
    await routers.exchange(2)
    assert routers.granted(0, SIX) == 0
    await routers.pass_time(60.5)
    routers.ask(0, SIX)
    await routers.exchange(2)
    assert routers.granted(1, SIX) == 5


async def test_a_put_that_failed_is_made_up_for_with_the_next_exchange() -> None:
    routers = Asked(2)
    await routers.exchange(2)
    routers.store.is_away = True
    routers.ask(0, SIX)
    await routers.exchange()
    routers.store.is_away = False
    await routers.exchange()
    assert routers.granted(1, SIX) == 5


async def test_a_router_that_stood_still_does_not_pay_for_what_others_used_meanwhile() -> None:
    routers = Asked(2)
    await routers.exchange(2)
    routers.ask(0, SIX)
    await routers.exchange(2)
    for _ in range(10):
        assert routers.granted(1, SIX) > 0
        await routers.pass_time(60.5, 1)
    assert routers.granted(1, SIX) == 6
    await routers.exchange(2)
    assert routers.granted(0, SIX) == 0
    await routers.pass_time(60.5)
    assert routers.granted(0, SIX) == 6


async def test_a_key_whose_limits_change_begins_anew_everywhere() -> None:
    routers = Asked(2)
    await routers.exchange(2)
    assert routers.granted(0, SIX) == 6
    await routers.exchange(2)
    more = replace(SIX, limits=Limits(requests_per_minute=7))
    assert routers.granted(1, more) == 7
    await routers.exchange(2)
    assert routers.granted(0, more) == 0


async def test_ten_thousand_keys_count_at_all_routers_and_no_record_is_large() -> None:
    routers = Asked(2)
    await routers.exchange(2)
    keys = [replace(SIX, key=f"{index:064}") for index in range(10_000)]
    largest = 0
    for begin in range(0, len(keys), 200):
        for who in keys[begin : begin + 200]:
            for _ in range(4):
                routers.ask(0, who)
        await routers.exchange()
        largest = max(largest, *map(len, (await routers.store.records("routers")).values()))
    assert largest < 40_000
    assert {routers.granted(1, who) for who in keys} == {2}


async def test_nothing_runs_for_ever_though_its_end_was_not_heard_of() -> None:
    routers = Asked(2)
    await routers.exchange(2)
    with routers.limits[0].claimed(TWO_AT_ONCE), routers.limits[0].claimed(TWO_AT_ONCE):
        await routers.exchange(2)
        routers.refused(1, TWO_AT_ONCE)
    for index in range(1000):  # more than a record holds, before the other one looks again
        routers.ask(0, replace(SIX, key=f"other {index}"))
    await routers.exchange(2)
    routers.ask(1, TWO_AT_ONCE)


async def test_memory_for_keys_of_others_is_bounded() -> None:
    routers = Asked(2)
    await routers.exchange(2)
    for index in range(6000):
        routers.ask(0, Caller(f"k{index}", limits=Limits(requests_per_minute=600)))
        if index % 20 == 0:
            await routers.pass_time(0.1)
    (heard,) = routers.limits[1]._elsewhere._routers.values()
    assert len(heard.told) <= 2500  # a thousand are told of within five seconds


def record(**keys: object) -> bytes:
    return json.dumps({"address": "x", "beat": 1, "loads": [], "keys": keys}).encode()


ROW = ["k1", 6, None, None, 1, 5, 0, 0, 0, 5.0, 0.0]


@pytest.mark.parametrize(
    "raw",
    [
        record(),
        record(number=1, left_out=0, rows=[ROW[:-1]]),
        record(number=1, left_out=0, rows=[[*ROW[:-1], -1.0]]),
        record(number=1, left_out=0, rows=[[*ROW[:-1], float("nan")]]),
        record(number=1, left_out=0, rows=[[*ROW[:-1], float("inf")]]),
        record(number=1, left_out=0, rows=[[*ROW[:5], -3, *ROW[6:]]]),
        record(number=1, left_out=0, rows=[[*ROW[:5], True, *ROW[6:]]]),
        record(number=1, left_out=0, rows=[["k1", -6, *ROW[2:]]]),
        record(number="x", left_out=0, rows=[ROW]),
        record(number=1, left_out=0, rows=7),
    ],
)
async def test_what_cannot_be_read_counts_nothing(raw: bytes) -> None:
    routers = Asked(1)
    await routers.store.put("routers", "strange", raw, 60)
    await routers.exchange(2)
    assert routers.granted(0, SIX) == 6
    assert routers.sharing[0].addresses == ["10.0.0.0:8500"]


async def test_what_can_be_read_counts_and_older_routers_tell_of_no_keys() -> None:
    routers = Asked(1)
    await routers.store.put("routers", "other", record(number=1, left_out=0, rows=[ROW]), 60)
    await routers.store.put("routers", "older", b'{"address": "y", "beat": 1, "loads": []}', 60)
    await routers.exchange()
    assert routers.granted(0, SIX) == 1
    assert routers.sharing[0].addresses == ["10.0.0.0:8500", "x", "y"]


def test_records_come_back_as_they_were() -> None:
    keys = {
        LimitedKey("ü", Limits(1, None, 3)): KeyUse(4, 5, 6, 7, 8, 0.5, 0.25),
        LimitedKey("ü", Limits(None, 2, None)): KeyUse(9),
    }
    sent = RouterRecord("[::1]:8500", 7, {}, KeyUses(keys, 12, 3))
    assert RouterRecord.from_bytes(sent.to_bytes()) == sent


PER_MINUTE = 60  # one a second
UNSEEN_S = 0.2 + 1e-6  # from a request until all have heard of it: told within one interval, read within another
STEPS = st.lists(
    st.tuples(
        st.sampled_from(["ask", "ask", "ask", "wait", "restart"]),
        st.integers(0, 2),
        st.integers(1, 50),
        st.floats(0, 1),
    ),
    max_size=40,
)


class Together:
    """What one bucket would hold from which all requests of all routers were taken. Below zero: they overshot."""

    def __init__(self) -> None:
        self.level, self.at = float(PER_MINUTE), 0.0
        self.taken = list[tuple[float, int, float]]()  # when, where, how much

    def take(self, at: float, index: int, amount: float) -> None:
        self.give(at, -amount)
        self.taken.append((at, index, amount))

    def give(self, at: float, amount: float) -> None:
        self.level = min(PER_MINUTE, self.fill(at) + amount)

    def fill(self, at: float) -> float:
        self.level = min(PER_MINUTE, self.level + (at - self.at) * PER_MINUTE / 60)
        self.at = at
        return self.level

    def lose(self, now: float, since: float, index: int) -> None:
        """Nobody will ever have heard of it."""
        self.give(now, self.taken_since(since, index))
        self.taken = [each for each in self.taken if each[0] < since or each[1] != index]

    def taken_since(self, at: float, *indices: int) -> float:
        return sum(amount for when, index, amount in self.taken if when >= at and index in indices)


@given(STEPS)
@settings(max_examples=80, deadline=None)
def test_together_they_overshoot_by_what_the_others_took_in_the_last_moment_and_no_request_waits_in_vain(
    steps: list[tuple[str, int, int, float]],
) -> None:
    who = Caller("k1", limits=Limits(requests_per_minute=PER_MINUTE))

    async def play() -> None:
        routers, together, forgiven, late_s = Asked(3), Together(), 0.0, UNSEEN_S
        unknown_until = 0.0
        together.at = routers.clock.now
        await routers.exchange(2)
        put_at = routers.clock.now
        for what, index, number, share in steps:
            now = routers.clock.now
            if what == "wait":
                await routers.pass_time(round(number * share / 10, 1))
                put_at = routers.clock.now
            elif what == "restart":  # what it has not told before is lost; the others may have more news than they told
                together.lose(now, put_at, index)
                forgiven += together.taken_since(now - 2 * UNSEEN_S, 0, 1, 2)
                unknown_until = now + 0.1
                await routers.restart(index)
                await routers.sharing[index].exchange()
                late_s = UNSEEN_S + 1  # it goes by records of the last second
            for _ in range(number if what == "ask" else 0):
                try:
                    routers.ask(index, who)
                except LimitExceeded:
                    assert together.fill(now) < 1 + late_s + 1e-6
                    break
                together.take(now, index, 1)
                forgiven += now < unknown_until  # nobody has seen it yet, and may then find it used already
                others = {0, 1, 2} - {index}
                assert together.level > -1e-6 - together.taken_since(now - UNSEEN_S, *others) - forgiven

    asyncio.run(play())


@given(STEPS)
@settings(max_examples=80, deadline=None)
def test_the_same_holds_for_tokens_which_come_back(steps: list[tuple[str, int, int, float]]) -> None:
    who = Caller("k1", limits=Limits(tokens_per_minute=PER_MINUTE))

    async def play() -> None:
        routers, together = Asked(3), Together()
        together.at = routers.clock.now
        await routers.exchange(2)
        with ExitStack() as stack:
            running = list[tuple[ExitStack, Allowance, int, int]]()
            for what, index, amount, share in steps:
                now = routers.clock.now
                if what == "wait":
                    await routers.pass_time(round(amount * share / 10, 1))
                elif what == "restart" and running:  # here: the oldest ends
                    one, allowance, taken, used = running.pop(0)
                    allowance.used(used)
                    one.close()
                    together.give(now, taken - used)
                elif what == "ask":
                    one = stack.enter_context(ExitStack())
                    allowance = one.enter_context(routers.limits[index].claimed(who))
                    try:
                        allowance.take_tokens(1, amount)
                    except LimitExceeded:
                        one.close()
                        continue
                    running.append((one, allowance, 1 + amount, 1 + round(share * amount)))
                    together.take(now, index, 1 + amount)
                    others = {0, 1, 2} - {index}
                    overshoot = together.taken_since(now - UNSEEN_S, *others) + UNSEEN_S * PER_MINUTE / 60
                    assert together.level > -1e-6 - overshoot

    asyncio.run(play())


async def test_what_fills_up_again_at_once_counts_at_all_routers_too() -> None:
    """Each uses no more than its own bucket regains until it tells of it."""
    routers, who = Asked(2), Caller("k1", limits=Limits(requests_per_minute=6000))
    await routers.exchange(2)
    granted = 0
    for _ in range(3000):
        for index in (0, 1):
            for _ in range(10):
                try:
                    routers.ask(index, who)
                except LimitExceeded:
                    continue
                granted += 1
        await routers.pass_time(0.1)
    assert 30_000 <= granted <= 30_000 + 6000 + 20


@pytest.mark.parametrize("number", [2, 3])
async def test_greedy_callers_get_the_limit_in_the_long_run(number: int) -> None:
    """As many as a lone router allows, but for what was there at the beginning, which each had."""
    routers, who = Asked(number), Caller("k1", limits=Limits(requests_per_minute=PER_MINUTE))
    await routers.exchange(2)
    granted = 0
    for _ in range(3000):
        granted += sum(routers.granted(index, who) for index in range(number))
        await routers.pass_time(0.1)
    assert 300 <= granted <= 300 + number * PER_MINUTE
