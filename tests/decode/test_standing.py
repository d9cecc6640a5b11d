"""What a standing decision gives to steps like the one that it was made for."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from decode.acceptance import Chances
from decode.draft_decision import DraftDemand, DraftReason
from decode.outlook import ANYTHING, NOTHING, Outlook
from decode.standing import Situation, StandingDecisions, Terms
from decode.step_time import StepForecast

LONGEST = 4
SURVIVAL = {0: [0.5, 0.3, 0.1, 0.05], 2: [0.8, 0.6, 0.4, 0.2]}
OF_NEW_ONES = 0.7  # of these
FREE, GUESS = Outlook(9, grade=2, is_free=True), ANYTHING
REST = (GUESS,) * 6  # of a batch of eight


def terms(
    num_sequences: int,
    cap: int = 1,
    price: float = 0.35,
    most_drafts: int = 100,
    row_s: float = 0.2,
    *,
    none_pays: bool = False,
) -> Terms:
    by_grade = np.zeros((num_sequences + 1, 4, LONGEST))
    for grade, survival in SURVIVAL.items():
        by_grade[:, grade] = survival
    by_grade[-1] *= OF_NEW_ONES
    rows = {str(index): index for index in range(num_sequences)}
    forecast = StepForecast(
        verify_s=10.0 + row_s * np.arange(most_drafts + 1.0),
        draft_s=np.arange(LONGEST + 1.0) * 0.5,
        draft_token_s=np.full(LONGEST + 1, 0.01),
        num_seen=np.ones(most_drafts + 1),
        noise=0.0,
    )
    chances = Chances(by_grade[:-1, 0], by_grade[:-1, 0], by_grade, rows)
    return Terms(
        chances,
        forecast,
        best_num_tokens=9.0,
        best_s=11.0,
        cap=cap,
        draft_cost=0.9,
        free_draft_cost=0.7,
        price=price,
        none_pays=none_pays,
    )


def situation(offers: Sequence[Outlook], spare: int = 100) -> Situation:
    return Situation.of([DraftDemand(str(index), 9, offer) for index, offer in enumerate(offers)], LONGEST, spare)


def standing(offers: Sequence[Outlook], lengths: Sequence[int], made_on: Terms | None = None) -> StandingDecisions:
    decisions, made_for = StandingDecisions(num_steps=3, longest=5), situation(offers)
    made_on = made_on or terms(len(offers))
    decisions.add(made_for, made_on.decision(made_for.demands, lengths, DraftReason.FASTEST), made_on)
    return decisions


def found(decisions: StandingDecisions, offers: Sequence[Outlook], spare: int = 100) -> tuple[int, ...] | None:
    decision = decisions.find(situation(offers, spare))
    return None if decision is None else decision.draft_lengths


def test_limits_are_the_least_of_wish_offer_and_longest() -> None:
    demands = [DraftDemand("a", 2, ANYTHING), DraftDemand("b", 9, Outlook(3)), DraftDemand("c", 9, ANYTHING)]
    assert Situation.of(demands, LONGEST, 100).limits == (2, 3, 4)
    assert Situation.of(demands, LONGEST, 100).num_spare_tokens == 9
    assert Situation.of(demands, LONGEST, 5).num_spare_tokens == 5


@pytest.mark.parametrize(
    ("before", "now", "cap", "price", "length"),
    [
        (NOTHING, FREE, 1, 0.35, 3),  # 0.8, 0.6 and 0.4 are worth it
        (NOTHING, FREE, 0, 0.5, 2),
        (NOTHING, GUESS, 1, 0.2, 1),  # the cap
        (NOTHING, GUESS, 4, 0.2, 2),  # 0.5 and 0.3
        (FREE, GUESS, 0, 0.2, 0),
        (FREE, NOTHING, 4, 0.0, 0),
    ],
)
def test_what_changed_gets_what_is_worth_its_price_and_others_what_they_had(
    before: Outlook, now: Outlook, cap: int, price: float, length: int
) -> None:
    decisions = standing([GUESS, before, *REST], [0, 4, 1, 0, 1, 0, 1, 0], terms(8, cap, price))
    assert found(decisions, [GUESS, now, *REST]) == (0, length, 1, 0, 1, 0, 1, 0)


def test_new_sequence_is_taken_to_be_like_others() -> None:
    """0.7 times 0.8 and 0.6 are worth 0.4, times 0.4 not."""
    decisions, other = standing([GUESS] * 8, [1] * 8, terms(8, price=0.4)), situation([GUESS] * 8)
    demands = (*other.demands[1:], DraftDemand("new", 9, FREE))
    decision = decisions.find(Situation(demands, other.limits, other.num_spare_tokens))
    assert decision is not None
    assert decision.draft_lengths == (1, 1, 1, 1, 1, 1, 1, 2)
    assert decision.num_expected_tokens == pytest.approx(8 + 7 * 0.5 + 0.7 * (0.8 + 0.6))


def test_forecast_of_another_offer_is_made_for_it() -> None:
    decision = standing([NOTHING, GUESS, *REST], [0, 1, 1, 0, 0, 0, 0, 0]).find(situation([FREE, GUESS, *REST]))
    assert decision is not None
    assert decision.num_expected_tokens == pytest.approx(8 + 0.8 + 0.6 + 0.4 + 0.5 + 0.5)
    assert decision.expected_draft_s == pytest.approx(0.5 + 2 * 0.01)  # a look-up takes none
    assert decision.expected_s == pytest.approx(10.0 + 5 * 0.2 + 0.52)
    assert (decision.plain_s, decision.reason) == (10.0, DraftReason.FASTEST)


def test_nothing_worth_drafting_is_called_plain() -> None:
    decisions = standing([FREE, GUESS, *REST], [4, 0, 0, 0, 0, 0, 0, 0], terms(8, cap=0))
    decision = decisions.find(situation([NOTHING, GUESS, *REST]))
    assert decision is not None
    assert (decision.draft_lengths, decision.reason) == ((0,) * 8, DraftReason.PLAIN_FASTEST)


def test_limit_of_an_ending_sequence_holds() -> None:
    decisions, all_free = standing([FREE] * 8, [4] * 8), situation([FREE] * 8)
    demands = [DraftDemand("0", 2, FREE), *all_free.demands[1:]]
    decision = decisions.find(Situation.of(demands, LONGEST, 100))
    assert decision is not None and decision.draft_lengths == (2, 4, 4, 4, 4, 4, 4, 4)


def test_prices_hold_for_a_few_of_many_within_the_room() -> None:
    def served(now: Sequence[Outlook], spare: int = 100, most_drafts: int = 100) -> bool:
        lengths = [0, 0, 1, 1, 0, 0, 0, 0]
        return found(standing([GUESS] * 8, lengths, terms(8, most_drafts=most_drafts)), now, spare) is not None

    assert served([FREE, FREE, *REST])
    assert served([FREE] * 4 + [GUESS] * 4)
    assert not served([FREE] * 5 + [GUESS] * 3)
    assert not served([FREE, *REST])  # one has left
    assert served([FREE, FREE, *REST], spare=8) and not served([FREE, FREE, *REST], spare=7)
    assert served([FREE, FREE, *REST], most_drafts=8) and not served([FREE, FREE, *REST], most_drafts=7)


def test_prices_do_not_hold_where_drafting_would_lose() -> None:
    """With 0.8 + 0.6 + 0.4 for each of four, 15.2 tokens take 10 s and 12 rows; 8 take 10 s."""
    offers = [FREE] * 4 + [NOTHING] * 4
    for row_s, length in ((0.74, 3), (0.76, None)):
        served = found(standing([NOTHING] * 8, [0] * 8, terms(8, row_s=row_s)), offers)
        assert served == (None if length is None else (3, 3, 3, 3, 0, 0, 0, 0))


def test_what_has_ended_is_forgotten() -> None:
    decisions, made_on = standing([GUESS], [1]), terms(1)
    for most in range(9):
        decisions.observed()
        other = Situation.of([DraftDemand("0", most, FREE)], LONGEST, 100)
        decisions.add(other, made_on.decision(other.demands, [0], DraftReason.PLAIN_FASTEST), made_on)
    assert len(decisions._by_situation) <= 5


def test_few_sequences_are_decided_on_anew() -> None:
    assert found(standing([GUESS] * 7, [1] * 7), [FREE, *[GUESS] * 6]) is None
    assert found(standing([GUESS] * 7, [1] * 7), [GUESS] * 7) == (1,) * 7


def test_serves_so_many_steps_whatever_their_offers() -> None:
    decisions = standing([GUESS] * 8, [1] * 8)
    assert found(decisions, [FREE, GUESS, *REST]) is not None
    assert found(decisions, [GUESS] * 8) is not None
    assert found(decisions, [GUESS] * 8) is None
    assert found(decisions, [FREE, GUESS, *REST]) is None


def test_ends_after_so_many_observed_steps() -> None:
    decisions = standing([GUESS] * 8, [1] * 8)
    for _ in range(4):
        decisions.observed()
    assert found(decisions, [GUESS] * 8) is not None
    decisions.observed()
    assert found(decisions, [GUESS] * 8) is None


def test_several_kinds_of_steps_stand_side_by_side() -> None:
    decisions, other, made_on = standing([GUESS], [1]), situation([FREE]), terms(1)
    decisions.add(other, made_on.decision(other.demands, [4], DraftReason.FASTEST), made_on)
    assert (found(decisions, [GUESS]), found(decisions, [FREE])) == ((1,), (4,))
    decisions.clear()
    assert found(decisions, [GUESS]) is None and found(decisions, [FREE]) is None


def test_decision_that_none_pays_serves_as_many_sequences_unasked() -> None:
    decisions = standing([GUESS] * 8, [0] * 8, terms(8, none_pays=True))
    assert decisions.find_unasked(7) is None
    assert [decisions.find_unasked(8) is not None for _ in range(3)] == [True, True, False]
    assert standing([GUESS] * 8, [0] * 8).find_unasked(8) is None
