"""A model for each kind of worker, fed by all of them, in which an unequal one is told apart from the others."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import pytest

from model.kv_layout import KVLayout
from router.candidate import Role, WorkerId
from router.fleet_models import FleetModels
from router.measured_steps import DecodeSteps, PrefillSteps, Steps
from router.profile import WorkerProfile
from router.step_costs import Experts, StepCosts
from router.step_models import UNKNOWN

TRUE = StepCosts(0.02, 6e-4, 1e-7, 0.022, 1e-3, 1e-6)
LAYOUT = KVLayout("m", "float32", num_layers=1, num_kv_heads=1, head_dim=8)
BATCHES = [(1, 200), (8, 4000), (8, 24000), (40, 20000)]
CHUNKS = [(64, 64), (500, 500), (300, 4000)]


def profile(name: str, *, hardware: str = "cpu", calibration: Sequence[Steps] = ()) -> WorkerProfile:
    return WorkerProfile(
        WorkerId(name, "1"),
        "a:1",
        Role.BOTH,
        True,
        "m",
        "",
        LAYOUT,
        100,
        runner="torch",
        kernels="avx2",
        drafter="none",
        hardware=hardware,
        calibration=tuple(calibration),
    )


def some_steps(rng: random.Random, costs: StepCosts, noise: float = 0.03) -> list[Steps]:
    """A second's worth, of a load that varies."""
    tokens = rng.randint(16, 512)
    context = tokens + rng.randint(0, 4000)
    number = rng.randint(1, 64)
    of_all = number * rng.randint(100, 3000)
    return [
        PrefillSteps(tokens, tokens * context, costs.prefill_s([(tokens, context)]) * rng.gauss(1, noise)),
        DecodeSteps(number, of_all, costs.decode_s(number, of_all) * rng.gauss(1, noise)),
    ]


@dataclass
class Played:
    """Workers that measure steps once a second, on a clock of its own."""

    truths: dict[str, StepCosts]
    experts: Experts | None = None
    now: float = 100.0
    models: FleetModels = field(init=False)
    rng: random.Random = field(default_factory=lambda: random.Random(5))

    def __post_init__(self) -> None:
        self.models = FleetModels(self.experts, lambda: self.now)
        for name in self.truths:
            self.models.join(profile(name))

    def play(self, seconds: int, *, only: Sequence[str] = ()) -> None:
        for _ in range(seconds):
            self.now += 1.0
            for name in only or self.truths:
                self.models.observe(WorkerId(name, "1"), some_steps(self.rng, self.truths[name]))

    def worst_error(self, name: str) -> float:
        costs, true = self.models.costs_of(WorkerId(name, "1")), self.truths[name]
        errors = [costs.decode_s(*batch) / true.decode_s(*batch) - 1 for batch in BATCHES]
        errors += [costs.prefill_s([chunk]) / true.prefill_s([chunk]) - 1 for chunk in CHUNKS]
        return max(map(abs, errors))


def test_nothing_is_claimed_before_anything_was_measured() -> None:
    models = FleetModels()
    models.join(profile("w"))
    for name in ("w", "nobody"):
        assert models.confidences_of(WorkerId(name, "1")) == (0.0, 0.0)
        assert models.costs_of(WorkerId(name, "1")) == UNKNOWN


def test_all_of_a_kind_teach_one_model() -> None:
    """A worker that only ever prefilled is known to decode as the others."""
    played = Played({"a": TRUE, "b": TRUE})
    for _ in range(120):
        played.now += 1.0
        steps = some_steps(played.rng, TRUE)
        played.models.observe(WorkerId("a", "1"), steps[:1])
        played.models.observe(WorkerId("b", "1"), steps[1:])
    assert max(played.worst_error(name) for name in "ab") < 0.06
    assert min(played.models.confidences_of(WorkerId("a", "1"))) > 0.6
    (kind,) = played.models.kinds()
    assert (kind.kind, kind.num_workers) == (f"torch avx2 on cpu [{LAYOUT.fingerprint[:8]}]", 2)
    assert 0.0 < kind.decode_error < 0.1


def test_a_slower_one_of_a_kind_is_seen_and_spoils_nothing() -> None:
    """30 % slower at prefill alone; the others are within 3 % of what they would be without it."""
    slow = replace(TRUE, prefill_base_s=0.026, prefill_token_s=7.8e-4, prefill_pair_s=1.3e-7)
    played = Played({"a": TRUE, "b": TRUE, "c": TRUE, "slow": slow})
    played.play(150)
    prefill, decode = played.models.slowness_of(WorkerId("slow", "1"))
    assert prefill == pytest.approx(1.3, rel=0.06)
    assert decode == pytest.approx(1.0, rel=0.06)
    assert played.models.slowness_of(WorkerId("a", "1")) == pytest.approx((1.0, 1.0), rel=0.06)
    assert max(map(played.worst_error, played.truths)) < 0.09


def test_a_slower_one_with_a_load_of_its_own_does_not_bend_the_model() -> None:
    """It takes twice as long, and has the large batches more often than the others: to them these would seem slow."""
    played = Played({"a": TRUE, "b": TRUE, "c": TRUE, "slow": TRUE.scaled(2.0)})
    for _ in range(150):
        played.play(1, only="abc")
        for _ in range(2):
            batch = played.rng.randint(40, 64), 60000
            step_s = 2.0 * TRUE.decode_s(*batch) * played.rng.gauss(1, 0.03)
            played.models.observe(WorkerId("slow", "1"), [DecodeSteps(*batch, step_s)])
    (kind,) = played.models.kinds()
    for context in (20000, 60000):
        assert kind.costs.decode_s(50, context) == pytest.approx(TRUE.decode_s(50, context), rel=0.08)
    assert played.models.slowness_of(WorkerId("slow", "1"))[1] == pytest.approx(2.0, rel=0.08)


def test_when_all_become_slower_the_model_does() -> None:
    """And none of them is said to be slower than its kind."""
    played = Played(dict.fromkeys("abc", TRUE))
    played.play(60)
    played.truths = dict.fromkeys("abc", TRUE.scaled(1.6))
    played.play(60)
    (kind,) = played.models.kinds()
    assert kind.costs.decode_s(8, 4000) == pytest.approx(1.6 * TRUE.decode_s(8, 4000), rel=0.08)
    for name in "abc":
        assert played.models.slowness_of(WorkerId(name, "1")) == pytest.approx((1.0, 1.0), rel=0.08)


def test_one_that_is_alone_of_its_kind_is_its_kind() -> None:
    played = Played({"a": TRUE, "b": TRUE.scaled(1.4)})
    played.play(80)
    played.models.leave(WorkerId("a", "1"))
    played.play(40, only="b")
    (kind,) = played.models.kinds()
    assert kind.num_workers == 1
    assert played.models.slowness_of(WorkerId("b", "1")) == (1.0, 1.0)
    assert played.worst_error("b") < 0.08


def test_kinds_are_told_apart() -> None:
    models, rng = FleetModels(clock=lambda: 0.0), random.Random(1)
    for name, hardware, factor in (("a", "cpu", 1.0), ("b", "gpu", 0.1)):
        models.join(profile(name, hardware=hardware))
        for _ in range(50):
            models.observe(WorkerId(name, "1"), some_steps(rng, TRUE.scaled(factor)))
    a, b = (models.costs_of(WorkerId(name, "1")).decode_s(8, 4000) for name in "ab")
    assert a / b == pytest.approx(10, rel=0.05)
    assert [kind.num_workers for kind in models.kinds()] == [1, 1]


def test_a_calibration_is_learnt_once_and_a_kind_outlives_its_workers() -> None:
    models = FleetModels(clock=lambda: 0.0)
    steps = some_steps(random.Random(2), TRUE, noise=0.0)
    for _ in range(3):  # it registers again: the router was away
        models.join(profile("a", calibration=steps))
        once = models.confidences_of(WorkerId("a", "1"))
        models.leave(WorkerId("a", "1"))
    first = FleetModels(clock=lambda: 0.0)
    first.join(profile("a", calibration=steps))
    assert once == first.confidences_of(WorkerId("a", "1"))
    assert min(once) > 0.0
    assert models.kinds() == []
    models.join(profile("b"))  # another worker, not calibrated
    assert models.confidences_of(WorkerId("b", "1")) == once


def test_of_a_large_fleet_only_so_many_are_learnt_from() -> None:
    """A hundred a second of each sort; how slow each one is needs all."""
    names = [f"w{number}" for number in range(300)]
    played = Played(dict.fromkeys(names, TRUE))
    learnt: list[Steps] = []
    model = next(iter(played.models._kinds.values())).model
    model.observe = learnt.append  # type: ignore[method-assign, assignment]
    played.play(10)
    assert 2 * 900 <= len(learnt) <= 2 * 1100


def test_experts_of_the_model_are_part_of_what_is_learnt() -> None:
    true = replace(TRUE, experts=Experts(64, 4), decode_expert_s=4e-4)
    played = Played({"a": true}, experts=Experts(64, 4))
    played.play(300)
    assert played.worst_error("a") < 0.06
    assert played.models.costs_of(WorkerId("a", "1")).decode_expert_s == pytest.approx(4e-4, rel=0.25)
