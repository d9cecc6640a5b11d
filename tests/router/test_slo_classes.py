"""Classes of SLOs: how they are written, and what ratios are worth where there are several."""

from __future__ import annotations

import random
from fractions import Fraction

import pytest

from router.class_weights import ClassWeights
from router.config import RouterConfig, SloPolicy
from router.outcomes import Slo
from router.replay import Expected
from router.server import planner_for
from router.slo_classes import MAX_CLASSES, check_classes, parse_classes

DEFAULT = SloPolicy(1.0, 0.1, 0.9)
FAST, SLOW = Slo(0.5, 0.05, 0.9), Slo(30.0, 0.5, 0.5)


def test_what_is_left_out_is_the_default_class_s() -> None:
    classes = parse_classes(["interactive=ttft:0.5,tpot:0.05,share:0.95", "batch=ttft:30"], DEFAULT)
    assert classes == {"interactive": SloPolicy(0.5, 0.05, 0.95), "batch": SloPolicy(30.0, 0.1, 0.9)}
    assert list(classes) == ["interactive", "batch"]
    assert parse_classes([], DEFAULT) == {}


@pytest.mark.parametrize(
    ("texts", "problem"),
    [
        (["fast"], "'fast' is not of the form NAME=ttft:SECONDS"),
        (["fast="], "is not of the form"),
        (["fast=ttft:0"], "class 'fast': ttft is 0; it must be a number of seconds above 0"),
        (["fast=tpot:-1"], "class 'fast': tpot is -1; it must be a number of seconds above 0"),
        (["fast=ttft:nan"], "class 'fast': ttft is nan; it must be"),
        (["fast=ttft:inf"], "class 'fast': ttft is inf; it must be"),
        (["fast=ttft:soon"], "class 'fast': ttft is 'soon'; it must be a number"),
        (["fast=ttft"], "class 'fast': ttft is ''; it must be a number"),
        (["fast=share:1"], "class 'fast': share is 1; it must be above 0 and below 1"),
        (["fast=share:0"], "class 'fast': share is 0; it must be above 0 and below 1"),
        (["fast=speed:3"], "class 'fast': 'speed' is no field; there are ttft, tpot, share"),
        (["fast=ttft:1,ttft:2"], "class 'fast': ttft is given twice"),
        (["fast=ttft:1", "fast=ttft:2"], "the class 'fast' is given twice"),
        (["default=ttft:1"], "'default' is the class of --slo-ttft"),
        (["two words=ttft:1"], "class 'two words': a name is 1 to 64 letters"),
        (["=ttft:1"], "class '': a name is 1 to 64 letters"),
        ([f"c{number}=ttft:1" for number in range(MAX_CLASSES + 1)], "there are 17 classes; at most 16"),
    ],
)
def test_what_cannot_be_meant_is_refused(texts: list[str], problem: str) -> None:
    with pytest.raises(ValueError, match="^.*" + problem.replace("(", r"\(")):
        parse_classes(texts, DEFAULT)


def test_as_many_as_there_may_be() -> None:
    check_classes({f"c{number}": DEFAULT for number in range(MAX_CLASSES)})


def test_the_planner_of_a_router_has_them_all() -> None:
    config = RouterConfig("m", slo=DEFAULT, slo_classes={"batch": SloPolicy(30.0, 0.5, 0.5)})
    policy = planner_for(config)._policy  # type: ignore[attr-defined]
    assert (policy.slo, policy.classes) == (Slo(1.0, 0.1, 0.9), {"batch": SLOW})


def weights(num_fast: int, num_slow: int) -> ClassWeights:
    """Of so many requests that are promised 90 % of the fast times, which is the default, and 50 % of the slow ones."""
    classes = [""] * num_fast + ["slow"] * num_slow
    return ClassWeights(FAST, {"slow": SLOW}, [Expected(0.0, 10, 0, 5, name) for name in classes])


def scores(num_fast: int, num_slow: int, num_fast_met: int, num_slow_met: int) -> list[float]:
    """Of those that miss their SLOs, all by far."""
    fast = [1.0] * num_fast_met + [0.0] * (num_fast - num_fast_met)
    return fast + [1.0] * num_slow_met + [0.0] * (num_slow - num_slow_met)


def test_each_is_judged_by_its_own() -> None:
    expected = [Expected(0.0, 10, 0, 5, name) for name in ("", "slow", "gone")]
    assert ClassWeights(FAST, {"slow": SLOW}, expected).slos == [FAST, SLOW, FAST]


def test_what_a_ratio_is_worth() -> None:
    """Of 150 requests (90 + 36) / 150 meet theirs. Fast ones lack nothing at 90 of 100; slow ones have 0.72, and count
    as 0.5: 0.84 + 4 x (0.9 + 0.5) / 2 = 3.64. With 60 fast ones it is 0.64 + 4 x (0.6 + 0.5) / 2 = 2.84."""
    of = weights(100, 50)
    assert of.worth(scores(100, 50, 90, 36)) == pytest.approx(3.64)
    assert of.worth(scores(100, 50, 60, 36)) == pytest.approx(2.84)
    assert of.attainments(scores(100, 50, 60, 36)) == {"": 0.6, "slow": 0.72}


def test_a_promise_to_few_outweighs_what_is_beyond_that_to_many() -> None:
    """20 of 200 fast ones: either 12 of them and all 180 slow ones, 192 in all, or 18 of them and 110 slow ones, 128 in
    all, but each class has its share. Without classes the first would be the better one."""
    of = weights(20, 180)
    more, kept = scores(20, 180, 12, 180), scores(20, 180, 18, 110)
    assert sum(more) > sum(kept)
    assert of.worth(kept) == pytest.approx(0.64 + 4 * (0.9 + 0.5) / 2)
    assert of.worth(more) == pytest.approx(0.96 + 4 * (0.6 + 0.5) / 2)
    assert of.worth(kept) > of.worth(more)


def test_where_every_class_has_its_share_requests_count_alike() -> None:
    of = weights(50, 50)
    before, after = scores(50, 50, 46, 30), scores(50, 50, 45, 40)
    assert of.worth(after) - of.worth(before) == pytest.approx(9 / 100)
    assert of.scale(before) == 1.0


def test_where_all_fall_short_gains_are_as_large_as_with_one_class() -> None:
    """Both lack: 10 of 50 fast ones more, 10 of 50 slow ones more are 20 of 100 requests."""
    of = weights(50, 50)
    before, after = scores(50, 50, 20, 10), scores(50, 50, 30, 20)
    assert of.scale(before) == 5.0
    assert (of.worth(after) - of.worth(before)) / of.scale(before) == pytest.approx(0.2)


def test_one_class_or_one_of_hardly_any_requests_changes_nothing() -> None:
    for of, number in ((weights(100, 0), 100), (weights(100, 19), 119), (weights(0, 50), 50)):
        before, after = ([random.Random(seed).choice([0.0, 0.1, 1.0]) for _ in range(number)] for seed in (1, 2))
        assert of.worth(before) == float(sum(map(Fraction, before)) / number)
        assert (of.scale(before), of.kept(before)) == (1.0, 0.0)
        assert of.gains(before, after) == [new - old for old, new in zip(before, after, strict=True)]
    assert weights(100, 20).kept([1.0] * 120) > 0


@pytest.mark.parametrize("seed", range(20))
def test_gains_of_requests_are_the_gain_in_worth(seed: int) -> None:
    rng = random.Random(seed)
    expected = [Expected(0.0, 10, 0, 5, rng.choice(["", "slow", "other"])) for _ in range(200)]
    of = ClassWeights(FAST, {"slow": SLOW, "other": Slo(1.0, 0.1, 0.7)}, expected)
    met = rng.random(), rng.random()
    before, after = ([1.0 if rng.random() < share else 0.2 * rng.random() for _ in expected] for share in met)
    gain = sum(of.gains(before, after)) / len(expected)
    assert gain == pytest.approx(of.worth(after) - of.worth(before), abs=1e-12)
