"""What a router hears of a worker's steps: pure ones, a few about once a second, from when it is there."""

from __future__ import annotations

from deploy.step_feed import StepFeed
from deploy.step_meter import StepMeter
from model.runner import Chunk, SampledToken, StepOutput, VerifiedDraft
from router.measured_steps import DecodeSteps, PrefillSteps


class Fed:
    def __init__(self) -> None:
        self.now = 50.0
        self.meter = StepMeter(lambda: self.now)
        self.feed = StepFeed(self.meter, lambda: self.now)

    def step(self, *chunks: tuple[int, int], step_s: float = 0.1, num_tokens: int = 1) -> None:
        """Each: tokens, and where they start."""
        outcomes = [
            SampledToken(1) if num_tokens == 1 else VerifiedDraft((SampledToken(1),) * num_tokens, num_tokens)
            for _ in chunks
        ]
        self.meter.observe([Chunk([1] * n, start, [0]) for n, start in chunks], StepOutput(tuple(outcomes), step_s))


def test_steps_of_one_sort_are_told_and_mixed_ones_are_not() -> None:
    fed = Fed()
    fed.feed.begin()
    fed.step((100, 0), (50, 200), step_s=0.3)
    fed.step((1, 10), (1, 30), step_s=0.25, num_tokens=3)
    fed.step((100, 0), (1, 30), step_s=5.0)  # mixed
    fed.step((5, 0), (1, 30), step_s=5.0)
    fed.now += 1.0
    assert fed.feed.next() == [
        PrefillSteps(150, 100 * 100 + 50 * 250, 0.3),
        DecodeSteps(2, 11 + 31, 0.25, 3.0),
    ]


def test_once_a_second_and_only_while_it_listens() -> None:
    fed = Fed()
    fed.step((100, 0))  # nobody listens yet
    fed.feed.begin()
    fed.now += 0.9
    fed.step((100, 0))
    assert not fed.feed.next()
    fed.now += 0.2
    assert len(fed.feed.next()) == 1
    fed.step((100, 0))
    fed.now += 0.5
    assert not fed.feed.next()
    fed.now += 0.5
    assert len(fed.feed.next()) == 1
    fed.step((100, 0))
    fed.feed.begin()  # another stream: what was measured long ago is of no use
    fed.now += 1.0
    assert not fed.feed.next()
    fed.feed.close()
    fed.step((100, 0))
    assert not fed.feed.next()
    assert fed.meter.tallies == []


def test_two_routers_hear_the_same() -> None:
    fed = Fed()
    other = StepFeed(fed.meter, lambda: fed.now)
    fed.feed.begin()
    other.begin()
    fed.step((100, 0))
    fed.now += 1.0
    assert fed.feed.next() == other.next() != []
