"""Acceptance by sequence, grade and position: what is counted, what a sequence inherits, and what fades."""

from __future__ import annotations

import random

import numpy as np
import pytest

from decode.acceptance import AcceptanceBook, DraftOutcome


def rates(book: AcceptanceBook, sequence_id: str, grade: int = 0) -> list[float]:
    """Chance of each position given those before it."""
    survival = book.chances([sequence_id], [grade]).survival[0]
    return list(survival / np.concatenate([[1.0], survival[:-1]]))


def feed(
    book: AcceptanceBook, sequence_id: str, chances: list[float], num_steps: int, seed: int = 1, grade: int = 0
) -> None:
    """Steps of a sequence whose draft j stands with chance `chances[j]` if all before it do."""
    book.chances([sequence_id], [grade])
    draws = random.Random(seed)
    for _ in range(num_steps):
        num_accepted = next((j for j, chance in enumerate(chances) if draws.random() >= chance), len(chances))
        book.observe([DraftOutcome(sequence_id, len(chances), len(chances), num_accepted, grade)])


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
    assert own[0] > 0.85 and 0.1 < own[1] < 0.6 and own[4] < 0.15
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


def test_another_kind_of_text_is_learnt_by_drafts_not_by_steps() -> None:
    """Forty steps of 16 sequences are 640 drafts: 0.997^640 = 0.15 of what was known before is left."""
    for batch, low, high in ((1, 0.8, 0.95), (16, 0.2, 0.4)):
        book, draws = AcceptanceBook(1), random.Random(1)
        for chance, num_steps in ((0.95, 40 * 16 // batch), (0.2, 40)):
            for _ in range(num_steps):
                outcomes = [DraftOutcome("of the past", 1, 1, int(draws.random() < chance)) for _ in range(batch)]
                book.observe(outcomes)
        assert low < rates(book, "new")[0] < high


def test_what_was_not_proposed_was_not_rejected() -> None:
    book, draws = AcceptanceBook(2), random.Random(2)
    book.chances(["a"], [0])
    for _ in range(600):
        num_drafted = 2 if draws.random() < 0.25 else 0
        book.observe([DraftOutcome("a", 2, num_drafted, num_drafted)])
    assert book.chances(["a"], [0]).survival[0, 1] > 0.85


def test_grades_are_told_apart_and_inherited_apart() -> None:
    """One sequence, whose drafts of grade 3 stand and those of grade 1 fall; a newcomer starts where each grade is."""
    book, draws = AcceptanceBook(3), random.Random(4)
    chances = {1: 0.2, 3: 0.9}
    book.chances(["a"], [0])
    for _ in range(800):
        grade = draws.choice([1, 3])
        num_accepted = next((j for j in range(3) if draws.random() >= chances[grade]), 3)
        book.observe([DraftOutcome("a", 3, 3, num_accepted, grade)])
    for name in ("a", "new"):
        assert rates(book, name, 1)[0] == pytest.approx(0.2, abs=0.12)
        assert rates(book, name, 3) == pytest.approx([0.9] * 3, abs=0.1)
    both = book.chances(["a", "new"], [3, 1]).survival
    assert both[0, 0] == pytest.approx(rates(book, "a", 3)[0]) and both[1, 0] == pytest.approx(rates(book, "new", 1)[0])
    assert 0.2 < book.pool_rates[0] < 0.9  # what a draft has on average


def test_own_failures_are_not_taken_for_everybody_elses_too() -> None:
    """A lone sequence: its 8 failures are all that is known, and say no more of it when they are the pool as well."""
    book = AcceptanceBook(1)
    book.chances(["a"], [0])
    for _ in range(8):
        book.observe([DraftOutcome("a", 1, 1, 0)])
    ratio = 4 / (7.5 * 0.6 + 4)  # its own have faded to 7.5
    assert rates(book, "a")[0] == pytest.approx(4 * 0.6 * ratio / (7.5 + 4), abs=0.01)
    assert rates(book, "new")[0] == pytest.approx(2 * 0.6 / (7.7 + 2), abs=0.01)  # to another they are all there is


def test_hope_is_what_little_evidence_leaves_open() -> None:
    book = AcceptanceBook(2)
    ratios = []
    for num_steps in (4, 40, 400):
        feed(book, f"after {num_steps}", [0.5, 0.5], num_steps)
        chances = book.chances([f"after {num_steps}"], [0])
        assert (np.diff(chances.hopeful) <= 0).all() and (chances.hopeful < 1).all()
        ratios.append(chances.hopeful[0] / chances.survival[0])
        assert ratios[-1][0] == pytest.approx(ratios[-1][1])
    assert ratios[0][0] > ratios[1][0] > ratios[2][0] > 1.0
    # 400 steps count as (1 - 0.99^400) / 0.01 = 98, those of others before as 40 * 0.94 * 0.997^400 + 4 * 0.997^440
    # = 12.4, where a step of the pool fades by 0.997: two standard errors of about 112 trials.
    chance = chances.survival[0, 0]
    assert ratios[2][0] == pytest.approx(1 + 2 * (chance * (1 - chance) / 112) ** 0.5 / chance, abs=0.01)


def test_survival_of_other_grades_than_were_asked_for() -> None:
    book = AcceptanceBook(2)
    feed(book, "a", [0.9, 0.1], 400, grade=3)
    asked, others = book.chances(["b", "a"], [1, 3]), book.chances(["b", "a"], [0, 1])
    assert list(asked.of("a", 3)) == list(asked.survival[1]) == list(others.of("a", 3))
    assert others.of("a", 3)[0] > others.of("a", 1)[0] + 0.2
    assert list(others.of("b", 0)) == pytest.approx([0.6, 0.36])  # nobody has drafted


def test_survival_of_a_sequence_that_is_not_there_is_that_of_a_new_one() -> None:
    book = AcceptanceBook(3)
    feed(book, "good", [0.9, 0.9, 0.9], 300)
    feed(book, "bad", [0.2, 0.2, 0.2], 300)
    absent = book.chances(["good", "bad"], [0, 0]).of("new", 0)
    assert list(absent) == pytest.approx(list(book.chances(["new"], [0]).survival[0]))
    assert book.chances(["bad"], [0]).survival[0, 0] < absent[0] < book.chances(["good"], [0]).survival[0, 0]


def test_what_becomes_of_a_sequence_counts_from_when_it_is_met() -> None:
    for is_met in (False, True):
        book = AcceptanceBook(2)
        feed(book, "other", [0.9, 0.9], 100)
        if is_met:
            book.meet(["a"])
        for _ in range(30):
            book.observe([DraftOutcome("a", 2, 2, 0)])
        assert bool(rates(book, "a")[0] < 0.3) is is_met


def test_survival_never_rises_along_a_sequence() -> None:
    book, draws = AcceptanceBook(6), random.Random(5)
    names = [str(index) for index in range(50)]  # more than there is room for at first
    for _ in range(40):
        grades = [draws.randrange(4) for _ in names]
        survival = book.chances(names, grades).survival
        assert (np.diff(survival, axis=1) <= 0).all() and (survival >= 0).all() and (survival <= 1).all()
        outcomes = []
        for name, grade in zip(names, grades, strict=True):
            asked = draws.randint(0, 6)
            drafted = draws.randint(0, asked)
            outcomes.append(DraftOutcome(name, asked, drafted, draws.randint(0, drafted), grade))
        book.observe(outcomes)


def test_order_of_sequences_does_not_matter() -> None:
    book = AcceptanceBook(1)
    feed(book, "bad", [0.1], 100)
    feed(book, "good", [0.9], 100)
    both = book.chances(["good", "bad"], [0, 0]).survival[:, 0]
    assert list(book.chances(["bad", "good"], [0, 0]).survival[:, 0]) == list(both[::-1])
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


def test_nodes_of_a_tree_are_followed_by_their_places() -> None:
    """Any may stand, whatever became of those before it; one of a place never counts as likelier than those before."""
    book, draws, truth = AcceptanceBook(4), random.Random(3), [0.5, 0.3, 0.05, 0.2]
    book.chances(["a"], [0])
    for _ in range(2000):
        nodes = tuple(place for place, chance in enumerate(truth) if draws.random() < chance)
        book.observe([DraftOutcome("a", 4, 4, len(nodes), nodes=nodes)])
    assert list(book.pool_rates) == pytest.approx(truth, abs=0.1)
    survival = book.chances(["a"], [0]).survival[0]
    assert survival[:3] == pytest.approx(truth[:3], abs=0.12) and survival[3] == survival[2]


def test_grades_of_chains_and_trees_stand_side_by_side() -> None:
    book, draws = AcceptanceBook(2), random.Random(3)
    book.chances(["a"], [0])
    for _ in range(400):
        book.observe([DraftOutcome("a", 2, 2, 1, 0, nodes=(draws.randint(0, 1),))])
        num_accepted = 2 if draws.random() < 0.5 else draws.randint(0, 1)
        book.observe([DraftOutcome("a", 2, 2, num_accepted, 1)])
    tree, chain = (book.chances(["a"], [grade]).survival[0] for grade in (0, 1))
    assert tree == pytest.approx([0.5, 0.5], abs=0.12)
    assert chain == pytest.approx([0.75, 0.5], abs=0.12)


@pytest.mark.parametrize("nodes", [(0,), (0, 3), (1, 0), (-1, 1)])
def test_nodes_that_cannot_be_are_refused(nodes: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"nodes \("):
        DraftOutcome("a", 4, 3, 2, nodes=nodes)


def test_few_looks_at_a_node_say_little() -> None:
    """Its chance is near that of the node before it, until it was seen often."""
    book = AcceptanceBook(3)
    book.chances(["a"], [0])
    for step in range(200):
        book.observe([DraftOutcome("a", 1, 1, step % 2, nodes=(0,) if step % 2 else ())])
    for _ in range(4):
        book.observe([DraftOutcome("a", 3, 3, 0, nodes=())])
    first, second, third = book.chances(["a"], [0]).survival[0]
    assert first > second > third > 0.1


def test_sequences_that_come_and_go_take_no_more_memory() -> None:
    book = AcceptanceBook(4)
    room = book._counts.shape
    for number in range(200):
        book.chances([str(number)], [0])
        book.observe([DraftOutcome(str(number), 4, 4, 2)])
        book.forget([str(number)])
    assert book._counts.shape == room and not book._counts.any()


def test_steps_learnt_from_together_count_alike() -> None:
    """Each count is a sum, and what was known before fades once for each draft that looked at a position."""
    book = AcceptanceBook(3)
    book.chances(["a", "b"], [0, 1])
    book.observe([DraftOutcome("a", 3, 3, 1), DraftOutcome("b", 3, 3, 3, grade=1)])
    book.observe([DraftOutcome("a", 3, 3, 3)], [DraftOutcome("a", 3, 3, 0), DraftOutcome("b", 3, 2, 2, grade=1)], [])
    a, b = book._slots["a"], book._slots["b"]
    looked, stood = book._counts
    assert looked[a, 0].tolist() == pytest.approx([0.99**2 * 1 + 2, 0.99 * 0.995 * 1 + 1, 0.99 * 0.995 * 0 + 1])
    assert stood[a, 0].tolist() == pytest.approx([0.99**2 * 1 + 1, 1, 1])
    assert looked[b, 1].tolist() == pytest.approx([0.99 + 1, 0.99 + 1, 0.995])
    assert book._pool[0, 0].tolist() == pytest.approx([0.997**2 + 2, 0.997 + 1, 1])
    assert book._pool[0, 1].tolist() == pytest.approx([0.997 + 1, 0.997 + 1, 0.995])
