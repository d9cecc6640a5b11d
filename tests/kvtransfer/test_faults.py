"""The language of fault plans: what is read is what was written, and what cannot be read is named."""

from __future__ import annotations

import math

import pytest

from kvtransfer.fault_injection import FaultInjector
from kvtransfer.faults import Fault, FaultPlan, FaultPlanUnreadable, FaultRule, Occasions, Stage, Target


def test_every_kind_of_fault() -> None:
    plan = FaultPlan.parse(
        """drop commit 3; delay heartbeat 1-5 0.5s; duplicate reserve *; corrupt reserve answer 7
        fail write 2; stall write 4 30s; stall write 9;; seed 42; kill at record-accepted 5; delay write * 20ms
        drop release 10%; """
    )
    assert plan.seed == 42
    assert plan.rules == (
        FaultRule(Fault.DROP, Target.COMMIT, Occasions(3, 3)),
        FaultRule(Fault.DELAY, Target.HEARTBEAT, Occasions(1, 5), 0.5),
        FaultRule(Fault.DUPLICATE, Target.RESERVE, Occasions(1, math.inf)),
        FaultRule(Fault.CORRUPT, Target.RESERVE_ANSWER, Occasions(7, 7)),
        FaultRule(Fault.FAIL, Target.WRITE, Occasions(2, 2)),
        FaultRule(Fault.STALL, Target.WRITE, Occasions(4, 4), 30.0),
        FaultRule(Fault.STALL, Target.WRITE, Occasions(9, 9), math.inf),
        FaultRule(Fault.KILL, Stage.RECORD_ACCEPTED, Occasions(5, 5)),
        FaultRule(Fault.DELAY, Target.WRITE, Occasions(1, math.inf), 0.02),
        FaultRule(Fault.DROP, Target.RELEASE, Occasions(1, math.inf, share=0.1)),
    )


@pytest.mark.parametrize("text", ["none", "", " ; "])
def test_a_plan_without_faults(text: str) -> None:
    assert FaultPlan.parse(text) == FaultPlan(text=text.strip() or "none") and not FaultPlan.parse(text).rules


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("drop commit 1; dorp commit 3", "'dorp' in 'dorp commit 3': expected a fault: drop, delay, duplicate"),
        ("drop comit 3", "'comit' in 'drop comit 3': expected what can be hit by 'drop': describe, describe answer"),
        ("fail commit 3", "'commit' in 'fail commit 3': expected what can be hit by 'fail': write"),
        ("duplicate reserve answer 1", "'answer' in 'duplicate reserve answer 1': expected occasions"),
        ("drop commit", "after 'drop commit': expected occasions"),
        ("drop commit 0", "'0' in"),
        ("drop commit 5-3", "'5-3' in"),
        ("drop commit 3-", "'3-' in"),
        ("drop commit 101%", "'101%' in"),
        ("drop commit 0%", "'0%' in"),
        ("drop commit -1", "'-1' in"),
        ("drop commit 3 1s", "'1s' in 'drop commit 3 1s': expected the end of this fault"),
        ("delay commit 3", "after 'delay commit 3': expected a time: 0.5s or 20ms"),
        ("delay commit 3 5", "'5' in 'delay commit 3 5': expected a time"),
        ("kill reserved 1", "'reserved' in 'kill reserved 1': expected 'at'"),
        ("kill at lunch 1", "'lunch' in 'kill at lunch 1': expected a stage: reserving, reserved, first-write"),
        ("seed x", "'x' in 'seed x': expected a seed: a whole number"),
        ("none none", "'none' in 'none none': expected a fault"),
    ],
)
def test_the_word_that_is_wrong_is_named(text: str, complaint: str) -> None:
    with pytest.raises(FaultPlanUnreadable) as caught:
        FaultPlan.parse(text)
    assert complaint in str(caught.value)


def occasions_hit(injector: FaultInjector, target: Target, num_occasions: int) -> list[int]:
    return [number for number in range(1, num_occasions + 1) if injector.hits(target)]


def test_occasions_are_counted_by_target_and_anew_with_each_plan() -> None:
    injector = FaultInjector(FaultPlan.parse("drop commit 2-3; delay commit 3 1s"))
    assert injector.hits(Target.RESERVE) == injector.hits(Target.COMMIT) == {}
    assert injector.hits(Target.COMMIT) == {Fault.DROP: 0.0}
    assert injector.hits(Target.COMMIT) == {Fault.DROP: 0.0, Fault.DELAY: 1.0}
    assert injector.hits(Target.COMMIT) == {}
    injector.plan = FaultPlan.parse("drop commit 1")
    assert occasions_hit(injector, Target.COMMIT, 3) == [1]


def test_a_share_is_drawn_by_the_seed() -> None:
    text = "drop release 10%"
    hit = occasions_hit(FaultInjector(FaultPlan.parse(text)), Target.RELEASE, 1000)
    assert 60 < len(hit) < 140
    assert hit == occasions_hit(FaultInjector(FaultPlan.parse(text)), Target.RELEASE, 1000)
    assert hit != occasions_hit(FaultInjector(FaultPlan.parse(f"{text}; seed 1")), Target.RELEASE, 1000)


def test_the_process_is_killed_at_its_stage_and_not_before() -> None:
    killed: list[str] = []
    injector = FaultInjector(FaultPlan.parse("kill at first-write 2"), kill=lambda stage: killed.append(stage.value))
    injector.at(Stage.RESERVING)
    injector.at(Stage.RESERVED)
    for _ in range(3):
        injector.wrote()  # the first of them is the ticket's first
    assert not killed
    injector.at(Stage.RESERVED)
    injector.wrote()
    assert killed == ["first-write"]
