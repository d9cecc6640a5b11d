"""What is known of the speed of a link: worked out by hand on a clock that is set."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtransfer.transfer_meter import TransferMeter, Transferred


class Metered:
    def __init__(self) -> None:
        self.now = 100.0
        self.meter = TransferMeter(lambda: self.now)

    def began(self, peer: str, num_bytes: int = 1000) -> None:
        self.meter.began(peer, num_bytes, self.now)

    def ended(self, peer: str, num_bytes: int = 1000, *, well: bool = True) -> None:
        self.meter.ended(peer, num_bytes, well=well)

    @property
    def found(self) -> tuple[float, float]:
        return self.meter.transferred.num_bytes, self.meter.transferred.seconds


@pytest.fixture
def metered() -> Metered:
    return Metered()


def near(num_bytes: float, seconds: float) -> object:
    """Less what a second or so of ageing takes."""
    return pytest.approx((num_bytes, seconds), rel=0.05)


def test_nothing_is_known_before_something_arrived(metered: Metered) -> None:
    assert metered.meter.transferred == Transferred(0.0, 0.0)
    metered.began("d", 700)
    metered.now += 1.0
    assert metered.found == (0.0, 0.0)
    assert metered.meter.moving_bytes("d") == 700


def test_the_time_between_writes_is_no_part_of_it(metered: Metered) -> None:
    """Layers are written as they are computed: the link rests in between."""
    for _ in range(3):
        metered.began("d")
        metered.now += 0.1
        metered.ended("d")
        metered.now += 0.5
    assert metered.found == near(3000, 0.3)
    assert metered.meter.moving_bytes("d") == 0


def test_the_time_of_writes_that_overlap_counts_once(metered: Metered) -> None:
    metered.began("d")
    metered.now += 0.1
    metered.began("d")
    assert metered.meter.moving_bytes("d") == 2000
    metered.now += 0.1
    metered.ended("d")
    metered.now += 0.1
    metered.ended("d")
    assert metered.found == near(2000, 0.3)


def test_each_peer_has_its_own_time(metered: Metered) -> None:
    """Two that share the link get half of it each, and so would a third: 10,000 bytes a second."""
    metered.began("d0")
    metered.began("d1")
    metered.now += 0.1
    metered.ended("d0")
    metered.ended("d1")
    assert metered.found == near(2000, 0.2)


def test_a_peer_that_has_stopped_says_nothing_of_others(metered: Metered) -> None:
    metered.began("stopped")
    for _ in range(3):
        metered.now += 0.5
        metered.began("d")
        metered.now += 0.1
        metered.ended("d")
    metered.ended("stopped", well=False)
    assert metered.found == near(3000, 0.3)
    metered.began("stopped")  # it is back
    metered.now += 0.1
    metered.ended("stopped")
    assert metered.found == near(4000, 0.4)


def test_what_was_measured_a_while_ago_counts_less(metered: Metered) -> None:
    metered.began("d")
    metered.now += 0.1
    metered.ended("d")
    metered.now += 30.0
    assert metered.found == pytest.approx((500, 0.05))
    metered.now += 3600.0
    assert metered.found == pytest.approx((0, 0))


@given(st.lists(st.tuples(st.sampled_from("abc"), st.floats(0.001, 0.1)), min_size=1, max_size=30), st.randoms())
def test_time_is_that_in_which_something_was_under_way(steps: list[tuple[str, float]], rng: random.Random) -> None:
    """Against a timeline in small pieces, each marked with who moves then."""
    metered, moving, marked = Metered(), dict.fromkeys("abc", 0), 0.0
    num_ended = 0
    for peer, seconds in steps:
        if moving[peer] and rng.random() < 0.5:
            metered.ended(peer)
            moving[peer] -= 1
            num_ended += 1
        else:
            metered.began(peer)
            moving[peer] += 1
        metered.now += seconds
        marked += seconds * sum(count > 0 for count in moving.values())
    for peer, count in moving.items():
        for _ in range(count):
            metered.ended(peer)
            num_ended += 1
    assert metered.found == pytest.approx((1000 * num_ended, marked), rel=0.1)
