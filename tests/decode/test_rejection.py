"""Exactness by enumeration: every draft, every way the uniforms can fall, in rational numbers and in the real code."""

from __future__ import annotations

import itertools
import math
import random
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import pytest
import torch

from decode.draft import Draft
from decode.rejection import (
    Decision,
    block_chances,
    block_decisions,
    leftover,
    prefix_weights,
    token_chances,
    token_decisions,
)
from decode.verification import follow

Path = tuple[int, ...]
Law = list[Fraction]
SIZES = [(2, 1), (2, 2), (2, 3), (3, 1), (3, 2), (3, 3), (4, 2)]


@dataclass(frozen=True)
class World:
    """Laws of the next token behind a path, of the target and the drafter, with zeros in both."""

    vocab: int
    num_drafts: int
    seed: int

    def _law(self, name: str, path: Path) -> Law:
        numbers = random.Random(f"{self.seed} {name} {path}")
        weights = [numbers.choice((0, 0, *range(1, 20))) for _ in range(self.vocab)]
        weights[numbers.randrange(self.vocab)] += 1
        return [Fraction(weight, sum(weights)) for weight in weights]

    def target(self, path: Path) -> Law:
        return self._law("target", path)

    def drafter(self, path: Path) -> Law:
        return self._law("drafter", path)

    def drafts(self) -> Iterator[tuple[Path, Fraction]]:
        for path in itertools.product(range(self.vocab), repeat=self.num_drafts):
            chance = product(self.drafter(path[:i])[token] for i, token in enumerate(path))
            if chance:
                yield path, chance

    def outputs(self, length: int) -> dict[Path, Fraction]:
        paths = itertools.product(range(self.vocab), repeat=length)
        laws = {path: product(self.target(path[:i])[token] for i, token in enumerate(path)) for path in paths}
        return {path: mass for path, mass in laws.items() if mass}

    def go_on(self, path: Path, mass: Any, length: int) -> Iterator[tuple[Path, Any]]:
        """What plain decoding makes of a path, up to this length."""
        if len(path) >= length:
            yield path[:length], mass
            return
        for token, chance in enumerate(self.target(path)):
            if chance:
                yield from self.go_on(
                    (*path, token), mass * (chance if isinstance(mass, Fraction) else float(chance)), length
                )


def product(numbers: Iterator[Fraction] | Sequence[Fraction]) -> Fraction:
    return math.prod(numbers, start=Fraction(1))


WORLDS = [World(vocab, num_drafts, seed) for vocab, num_drafts in SIZES for seed in range(4)]
worlds = pytest.mark.parametrize("world", WORLDS, ids=lambda w: f"V{w.vocab}-K{w.num_drafts}-{w.seed}")


# The two rules, written out again from the papers.


def token_rule(world: World, path: Path) -> list[tuple[Fraction, int, Law]]:
    """Chance, number of drafts that stand, law of the next token."""
    outcomes, alive = [], Fraction(1)
    for i, token in enumerate(path):
        p, q = world.target(path[:i]), world.drafter(path[:i])
        accept = min(Fraction(1), p[token] / q[token])
        if accept < 1:
            outcomes.append(
                (alive * (1 - accept), i, normalised([max(a - b, Fraction(0)) for a, b in zip(p, q, strict=True)]))
            )
        alive *= accept
    return [*outcomes, (alive, len(path), world.target(path))]


def block_rule(world: World, path: Path) -> list[tuple[Fraction, int, Law]]:
    num_drafts = len(path)
    w = [Fraction(1)]
    for i, token in enumerate(path):
        w.append(min(Fraction(1), w[-1] * world.target(path[:i])[token] / world.drafter(path[:i])[token]))
    rests = [
        [max(w[i] * a - b, Fraction(0)) for a, b in zip(world.target(path[:i]), world.drafter(path[:i]), strict=True)]
        for i in range(num_drafts)
    ]
    stands = []
    for i in range(1, num_drafts):
        room = sum(rests[i]) + 1 - w[i]
        stands.append(sum(rests[i]) / room if room else Fraction(1))
    stands.append(w[-1])
    outcomes, none_longer = [], Fraction(1)
    for length in range(num_drafts, -1, -1):
        chance = none_longer * (stands[length - 1] if length else 1)
        if chance:
            outcomes.append((chance, length, world.target(path) if length == num_drafts else normalised(rests[length])))
        none_longer *= 1 - (stands[length - 1] if length else 1)
    return outcomes


def normalised(weights: Law) -> Law:
    return [weight / sum(weights) for weight in weights]


RULES = {"token": token_rule, "block": block_rule}
DECISIONS = {"token": token_decisions, "block": block_decisions}
rules = pytest.mark.parametrize("rule", RULES)


@rules
@worlds
def test_the_rules_are_exact(world: World, rule: str) -> None:
    length = world.num_drafts + 1
    found: dict[Path, Fraction] = defaultdict(Fraction)
    for path, mass in world.drafts():
        for chance, count, law in RULES[rule](world, path):
            for token, last in enumerate(law):
                for output, part in world.go_on((*path[:count], token), mass * chance * last, length):
                    found[output] += part
    assert {path: mass for path, mass in found.items() if mass} == world.outputs(length)


def chances(world: World, path: Path, rule: str) -> list[Fraction]:
    """The real arithmetic, on rational numbers."""
    ratios: Any = [world.target(path[:i])[token] / world.drafter(path[:i])[token] for i, token in enumerate(path)]
    if rule == "token":
        found: Any = token_chances(ratios)
        return [Fraction(chance) for chance in found]
    weights: Any = prefix_weights(ratios)
    surpluses: Any = [
        sum(
            max(weights[i] * p - q, Fraction(0))
            for p, q in zip(world.target(path[:i]), world.drafter(path[:i]), strict=True)
        )
        for i in range(1, len(path))
    ]
    found = block_chances(weights, surpluses)
    return [Fraction(chance) for chance in found]


def law_of_count(stands: Sequence[Fraction], rule: str) -> dict[int, Fraction]:
    num_drafts = len(stands)
    if rule == "token":
        law = {i: product(stands[:i]) * (1 - stands[i]) for i in range(num_drafts)} | {num_drafts: product(stands)}
    else:
        law = {i: (stands[i - 1] if i else 1) * product([1 - s for s in stands[i:]]) for i in range(num_drafts + 1)}
    return {count: chance for count, chance in law.items() if chance}


@rules
@worlds
def test_the_chances_are_the_rules_in_rational_numbers(world: World, rule: str) -> None:
    for path, _ in world.drafts():
        expected = {count: chance for chance, count, _ in RULES[rule](world, path) if chance}
        assert law_of_count(chances(world, path, rule), rule) == expected


def real_outcomes(
    world: World, rule: str, vocabulary: list[int] | None
) -> Iterator[tuple[Path, float, Decision, list[float]]]:
    """Draft, mass, decision and law of the last token of the real batched code, in float64.

    A decision changes only where a uniform passes a chance, so one uniform on either side of each is all of them.
    """
    columns = range(world.vocab) if vocabulary is None else vocabulary
    drafts, laws, noise, cases = [], [], [], []
    for path, mass in world.drafts():
        prefixes = [path[:i] for i in range(world.num_drafts)]
        q = torch.tensor([[float(world.drafter(x)[token]) for token in columns] for x in prefixes], dtype=torch.float64)
        p = torch.tensor(
            [[float(number) for number in world.target(x)] for x in (*prefixes, path)], dtype=torch.float64
        )
        stands = chances(world, path, rule)
        for pattern in itertools.product((True, False), repeat=world.num_drafts):
            weight = product([h if is_low else 1 - h for h, is_low in zip(stands, pattern, strict=True)])
            if weight:
                drafts.append(Draft(path, q, None if vocabulary is None else torch.tensor(vocabulary)))
                laws.append(p)
                noise.append(
                    [float(h / 2 if is_low else (1 + h) / 2) for h, is_low in zip(stands, pattern, strict=True)]
                )
                cases.append((path, float(mass * weight)))
    decisions = DECISIONS[rule](torch.cat(laws), drafts, noise)
    for (path, weight_), p, draft, decision in zip(cases, laws, drafts, decisions, strict=True):
        left = leftover(p, draft, decision)
        yield path, weight_, decision, (left / left.sum()).tolist()


@rules
@worlds
def test_the_real_code_is_exact(world: World, rule: str) -> None:
    length = world.num_drafts + 1
    found: dict[Path, float] = defaultdict(float)
    for path, mass, decision, law in real_outcomes(world, rule, None):
        for token, last in enumerate(law):
            for output, part in world.go_on((*path[: decision.num_accepted], token), mass * last, length):
                found[output] += part
    expected = world.outputs(length)
    assert max(abs(found[path] - float(expected.get(path, 0))) for path in found.keys() | expected.keys()) < 1e-12


class Narrow(World):
    """Its drafter knows tokens 1 and 3 only."""

    def drafter(self, path: Path) -> Law:
        law = [chance if token in (1, 3) else Fraction(0) for token, chance in enumerate(super().drafter(path))]
        return normalised(law) if sum(law) else [Fraction(0), Fraction(1), Fraction(0), Fraction(0)]


@rules
@pytest.mark.parametrize("seed", range(8))
def test_a_reduced_vocabulary_changes_nothing(seed: int, rule: str) -> None:
    world = Narrow(4, 3, seed)
    full, reduced = (real_outcomes(world, rule, vocabulary) for vocabulary in (None, [1, 3]))
    for (_, _, decision, law), (_, _, other, other_law) in zip(full, reduced, strict=True):
        assert decision.num_accepted == other.num_accepted
        assert decision.weight == pytest.approx(other.weight)
        assert law == pytest.approx(other_law, abs=1e-12)


def expected_count(world: World, rule: str) -> float:
    return sum(mass * decision.num_accepted for _, mass, decision, _ in real_outcomes(world, rule, None))


@worlds
def test_block_accepts_at_least_as_many_as_token(world: World) -> None:
    tokens, blocks = expected_count(world, "token"), expected_count(world, "block")
    exactly = {
        rule: sum(
            mass * chance * count for path, mass in world.drafts() for chance, count, _ in RULES[rule](world, path)
        )
        for rule in RULES
    }
    assert tokens == pytest.approx(float(exactly["token"]), abs=1e-12)
    assert blocks == pytest.approx(float(exactly["block"]), abs=1e-12)
    assert exactly["block"] >= exactly["token"]


def test_the_example_of_the_paper() -> None:
    """Target (1/3, 2/3), drafter (2/3, 1/3), two drafts: 10/9 stand by tokens, 11/9 by blocks."""

    class Example(World):
        def target(self, path: Path) -> Law:
            return [Fraction(1, 3), Fraction(2, 3)]

        def drafter(self, path: Path) -> Law:
            return [Fraction(2, 3), Fraction(1, 3)]

    example = Example(2, 2, 0)
    assert expected_count(example, "token") == pytest.approx(10 / 9, abs=1e-12)
    assert expected_count(example, "block") == pytest.approx(11 / 9, abs=1e-12)


def test_what_cannot_be_drawn_never_stands_and_broken_probabilities_emit_a_token_of_the_target() -> None:
    laws = torch.tensor([[0.0, 1.0], [0.5, 0.5]])
    for row in ([0.0, 1.0], [math.nan, math.nan]):
        draft = Draft((0,), torch.tensor([row]))
        for decide in (token_decisions, block_decisions):
            (decision,) = decide(laws, [draft], [[1e-9]])
            assert decision.num_accepted == 0
            assert leftover(laws[:2], draft, decision).tolist() == [0.0, 1.0]


# Deterministic drafts: chains and trees.

SHAPES: dict[str, tuple[Path, Path]] = {  # token ids, parents
    "nothing": ((), ()),
    "chain": ((0, 1, 2), (-1, 0, 1)),
    "two roots": ((0, 2), (-1, -1)),
    "all roots": ((2, 0, 1), (-1, -1, -1)),
    "comb": ((0, 1, 1, 2), (-1, -1, 0, 0)),
    "deep right": ((2, 1, 0, 0, 1), (-1, -1, 1, 2, 0)),
}


def tree_rule(world: World, token_ids: Path, parents: Path) -> dict[Path, Fraction]:
    """Children in turn: x stands with p(x), else p(x) becomes 0 and p is normalised; the rest is drawn from."""
    found: dict[Path, Fraction] = defaultdict(Fraction)

    def descend(node: int, path: Path, mass: Fraction) -> None:
        law = world.target(path)
        for child, (token, parent) in enumerate(zip(token_ids, parents, strict=True)):
            if parent == node and mass:
                if law[token]:
                    descend(child, (*path, token), mass * law[token])
                mass *= 1 - law[token]
                law = [Fraction(0) if other == token else number for other, number in enumerate(law)]
                law = normalised(law) if sum(law) else law
        for token, chance in enumerate(law):
            found[(*path, token)] += mass * chance

    descend(-1, (), Fraction(1))
    return {path: mass for path, mass in found.items() if mass}


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("seed", range(5))
def test_deterministic_trees_are_exact(shape: str, seed: int) -> None:
    world, (token_ids, parents) = World(3, 3, seed), SHAPES[shape]
    draft = Draft(token_ids, parents=parents)
    laws = [world.target(tuple(path)) for path in draft.paths()]
    found: dict[Path, Fraction] = defaultdict(Fraction)
    for targets in itertools.product(range(world.vocab), repeat=draft.num_rows):
        verdict = follow(draft, targets)
        found[verdict.token_ids] += product([law[token] for law, token in zip(laws, targets, strict=True)])
        assert [draft.paths()[row] for row in verdict.rows] == [verdict.token_ids[:i] for i in range(len(verdict.rows))]
    assert {path: mass for path, mass in found.items() if mass} == tree_rule(world, token_ids, parents)
    outputs: dict[Path, Fraction] = defaultdict(Fraction)
    for path, mass in found.items():
        for output, part in world.go_on(path, mass, 4):
            outputs[output] += part
    assert {path: mass for path, mass in outputs.items() if mass} == world.outputs(4)


def test_a_chain_is_a_tree() -> None:
    for targets in itertools.product(range(2), repeat=4):
        assert follow(Draft((1, 0, 1)), targets) == follow(Draft((1, 0, 1), parents=(-1, 0, 1)), targets)


@pytest.mark.parametrize("parents", [(0,), (-2,), (-1, 1)])
def test_a_parent_comes_before_its_children(parents: Path) -> None:
    with pytest.raises(ValueError, match="before"):
        Draft(tuple(parents), parents=parents)


def test_a_tree_has_no_probabilities() -> None:
    with pytest.raises(ValueError, match="deterministic"):
        Draft((0,), torch.ones(1, 2), parents=(-1,))
