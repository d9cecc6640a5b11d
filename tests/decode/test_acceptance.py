"""Acceptance by sequence and position: what is counted, what a sequence inherits, and what fades."""

from __future__ import annotations

import random

import numpy as np
import pytest

from decode.acceptance import AcceptanceBook, DraftOutcome


def rates(book: AcceptanceBook, sequence_id: str) -> list[float]:
    """Chance of each position given those before it."""
    survival = book.chances([sequence_id]).survival[0]
    return list(survival / np.concatenate([[1.0], survival[:-1]]))


def feed(book: AcceptanceBook, sequence_id: str, chances: list[float], num_steps: int, seed: int = 1) -> None:
    """Steps of a sequence whose draft j stands with chance `chances[j]` if all before it do."""
    book.chances([sequence_id])
    draws = random.Random(seed)
    for _ in range(num_steps):
        num_accepted = next((j for j, chance in enumerate(chances) if draws.random() >= chance), len(chances))
        book.observe([DraftOutcome(sequence_id, len(chances), len(chances), num_accepted)])


def test_learns_conditional_chances_by_position() -> None:
    book, truth = AcceptanceBook(3), [0.9, 0.5, 0.8]
    feed(book, "a", truth, 2000)
    assert rates(book, "a") == pytest.approx(truth, abs=0.12)
    assert list(book.pool_rates) == pytest.approx(truth, abs=0.12)


def test_counts_only_drafts_whose_forerunners_stood() -> None:
    """Accepted 1 of 3: position 0 stood, position 1 did not, position 2 was never judged."""
    book = AcceptanceBook(3)
    before = rates(book, "a")
    book.observe([DraftOutcome("a", 3, 3, 1)])
    assert book.pool_rates[0] > before[0]
    assert book.pool_rates[1] < before[1]
    one, other = AcceptanceBook(3), AcceptanceBook(3)
    for book in (one, other):
        feed(book, "a", [0.9, 0.9, 0.1], 100)
    for _ in range(50):
        one.observe([DraftOutcome("a", 3, 3, 1)])
        other.observe([DraftOutcome("a", 2, 2, 1)])
    assert one.pool_rates == pytest.approx(other.pool_rates)
    assert rates(one, "a") == pytest.approx(rates(other, "a"))


def test_new_sequence_is_like_the_pool_and_its_own_history_pulls_it_away() -> None:
    book = AcceptanceBook(2)
    feed(book, "good", [0.9, 0.9], 400)
    new = rates(book, "new")
    assert new == pytest.approx(list(book.pool_rates), abs=1e-9)
    own = [new[0]]
    for _ in range(4):
        for _ in range(10):
            book.observe([DraftOutcome("new", 2, 2, 0)])
        own.append(rates(book, "new")[0])
    assert own == sorted(own, reverse=True)
    assert own[0] > 0.85 and 0.2 < own[1] < 0.6 and own[4] < 0.15
    assert rates(book, "good")[0] > 0.7  # its neighbour goes on


def test_bad_start_lowers_later_positions_too() -> None:
    book = AcceptanceBook(2)
    feed(book, "good", [0.9, 0.9], 400)
    feed(book, "bad", [0.05, 0.9], 60)  # its second draft was hardly ever judged
    assert rates(book, "bad")[1] < 0.8 * rates(book, "good")[1]


def test_old_steps_fade() -> None:
    book = AcceptanceBook(1)
    feed(book, "a", [0.95], 300)
    feed(book, "a", [0.1], 150)
    assert rates(book, "a")[0] < 0.3


def test_drafter_that_proposes_less_than_asked() -> None:
    """What was not proposed was not rejected."""
    book, draws = AcceptanceBook(2), random.Random(2)
    book.chances(["a"])
    for _ in range(600):
        num_drafted = 2 if draws.random() < 0.25 else 0
        book.observe([DraftOutcome("a", 2, num_drafted, num_drafted)])
    chances = book.chances(["a"])
    assert chances.survival[0, 1] > 0.85
    assert chances.proposal[0] == pytest.approx([0.25, 0.25], abs=0.12)
    assert book.chances(["new"]).proposal[0] == pytest.approx([0.25, 0.25], abs=0.12)


def test_survival_and_proposal_never_rise_along_a_sequence() -> None:
    book, draws = AcceptanceBook(6), random.Random(5)
    names = [str(index) for index in range(50)]  # more than there is room for at first
    for _ in range(40):
        chances = book.chances(names)
        assert (np.diff(chances.survival, axis=1) <= 0).all() and (np.diff(chances.proposal, axis=1) <= 0).all()
        assert (chances.survival >= 0).all() and (chances.survival <= 1).all()
        outcomes = []
        for name in names:
            asked = draws.randint(0, 6)
            drafted = draws.randint(0, asked)
            outcomes.append(DraftOutcome(name, asked, drafted, draws.randint(0, drafted)))
        book.observe(outcomes)


def test_order_of_sequences_does_not_matter() -> None:
    book = AcceptanceBook(1)
    feed(book, "bad", [0.1], 100)
    feed(book, "good", [0.9], 100)
    both = book.chances(["good", "bad"]).survival[:, 0]
    assert list(book.chances(["bad", "good"]).survival[:, 0]) == list(both[::-1])
    assert both[0] > 2 * both[1]


def test_forgotten_sequence_leaves_nothing_behind() -> None:
    book = AcceptanceBook(1)
    feed(book, "bad", [0.05], 100)
    feed(book, "good", [0.95], 400)
    book.forget(["bad", "unknown"])
    pool = list(book.pool_rates)
    for index in range(60):  # whoever takes its place, and the places of a table that has grown
        assert rates(book, f"new{index}") == pytest.approx(pool)
    book.observe([DraftOutcome("bad", 1, 1, 0)])  # late, of a step that was running
    assert book.pool_rates[0] < pool[0]


@pytest.mark.parametrize("counts", [(1, 2, 0), (2, 1, 2), (1, 1, -1)])
def test_refuses_impossible_outcomes(counts: tuple[int, int, int]) -> None:
    with pytest.raises(ValueError, match="were asked"):
        DraftOutcome("a", *counts)
