"""What is told of drafts, by who made them: against counts made by hand."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from decode.acceptance import DraftOutcome
from decode.decoding import DecodeSequence
from decode.draft_decision import DraftDecision, DraftReason, StepOutcome
from decode.draft_log import DraftLog, DraftReport
from decode.draft_planner import AdaptiveDrafts, FixedDrafts, NoDrafts
from decode.draft_policy import DraftPolicy
from decode.outbox import Outbox
from decode.outlook import NOTHING, Outlook
from model.runner import DraftingState, Outcome, SampledToken, StepOutput, VerifiedDraft
from model.sampling_params import SamplingParams
from model.sequence import Sequence as TokenSequence


def draft(drafted: int, accepted: int, *, free: bool = False, nodes: tuple[int, ...] | None = None) -> DraftOutcome:
    return DraftOutcome("a", 8, drafted, accepted, int(free), nodes, free)


def only(log: DraftLog) -> DraftReport:
    (report,) = log.reports()
    return report


def test_of_a_chain_a_position_counts_where_all_before_it_stood() -> None:
    log = DraftLog("eagle")
    log.add([draft(3, 3), draft(3, 1), draft(2, 0)], num_undrafted=4)
    log.add([draft(0, 0)], num_undrafted=0)
    report = only(log)
    assert report.source == "eagle"
    assert report.acceptance == pytest.approx(
        (2 / 3, 1 / 2, 1.0), rel=0.01
    )  # reached by 3, 2, 1; later ones weigh more
    assert report.lengths == (5, 0, 1, 2)
    assert (report.num_drafted, report.num_accepted) == (8, 4)
    assert report.tokens_per_step == pytest.approx((4 + 2 + 1) / 3, rel=0.01)
    assert report.speedup == 0.0


def test_of_a_tree_every_node_counts() -> None:
    log = DraftLog("eagle")
    log.add([draft(4, 2, nodes=(0, 2)), draft(4, 1, nodes=(1,))], num_undrafted=0)
    assert only(log).acceptance == pytest.approx((1 / 2, 1 / 2, 1 / 2, 0.0), rel=0.01)


def test_look_up_is_a_source_of_its_own_behind_another_and_the_only_one_alone() -> None:
    both, alone = DraftLog("medusa+ngram"), DraftLog("ngram")
    for log in (both, alone):
        log.add([draft(2, 2, free=True), draft(1, 0, free=log is alone)], num_undrafted=3)
    head, lookup = both.reports()
    assert (head.source, head.lengths, head.num_accepted) == ("medusa", (3, 1), 0)
    assert (lookup.source, lookup.lengths, lookup.num_accepted) == ("ngram", (0, 0, 1), 2)
    assert (only(alone).source, only(alone).lengths) == ("ngram", (3, 1, 1))


def test_what_is_long_ago_counts_no_longer_and_numbers_stay_finite() -> None:
    """260,000 drafts: the weights alone would overflow."""
    rng, log = random.Random(5), DraftLog("model")
    for chance in (0.9, 0.3):
        for _ in range(130_000):
            log.add([draft(1, int(rng.random() < chance))], num_undrafted=0)
    report = only(log)
    assert report.acceptance[0] == pytest.approx(0.3, abs=0.1)
    assert report.num_drafted == 260_000 and report.num_accepted == pytest.approx(156_000, rel=0.02)
    assert report.tokens_per_step == pytest.approx(1.3, abs=0.1)


def test_speedup_is_of_steps_that_one_source_has_to_itself() -> None:
    """A plain step of 10 ms; one that drafts takes 15 ms and emits three tokens, or 12 ms and two."""
    log = DraftLog("eagle+ngram")
    decision = DraftDecision((3,), DraftReason.FASTEST, (), 2.0, 0.015, 0.010, expected_draft_s=0.0)
    head, lookup = draft(3, 2), draft(2, 1, free=True)
    for _ in range(50):
        log.timed(decision, StepOutcome(1, 50, (head,), verify_s=0.014, draft_s=0.001))
        log.timed(decision, StepOutcome(1, 50, (lookup,), verify_s=0.012, draft_s=0.0))
        log.timed(decision, StepOutcome(2, 50, (head, lookup), verify_s=0.500, draft_s=0.0))
    assert [each.speedup for each in log.reports()] == pytest.approx([3 * 10 / 15, 2 * 10 / 12])


def decoding() -> DecodeSequence:
    return DecodeSequence(TokenSequence("a", [5, 6, 7], 3, SamplingParams(max_tokens=100), 16), Outbox())


def verified(drafted: int, accepted: int) -> VerifiedDraft:
    return VerifiedDraft(tuple(SampledToken(9) for _ in range(accepted + 1)), drafted)


def test_planners_tell_their_log_what_became_of_each_draft() -> None:
    offers = {0: Outlook(3), 1: Outlook(4, grade=2, is_free=True), 2: NOTHING}
    sequences = [decoding() for _ in offers]
    states = {id(each.sequence.drafting): offers[index] for index, each in enumerate(sequences)}

    def outlook(drafting: DraftingState, token_ids: Sequence[int]) -> Outlook:
        return states[id(drafting)]

    planner = FixedDrafts(8, 1000, outlook, "eagle+ngram")
    assert list(planner.plan(sequences, 64)) == [3, 4, 0]
    outcomes: list[Outcome] = [verified(3, 1), verified(4, 4), SampledToken(9)]
    planner.learn(list(zip(sequences, outcomes, strict=True)), StepOutput((), 0.01), was_mixed=False)
    head, lookup = planner.reports()
    assert (head.lengths, head.num_drafted, head.num_accepted) == ((1, 0, 0, 1), 3, 1)
    assert (lookup.lengths, lookup.num_drafted, lookup.num_accepted) == ((0, 0, 0, 0, 1), 4, 4)
    assert planner.reason == "fixed"

    adaptive = AdaptiveDrafts(DraftPolicy(8), 8, 1000, outlook, "eagle+ngram")
    first = decoding()
    states[id(first.sequence.drafting)] = Outlook(8)
    adaptive.plan([first], 64)
    adaptive.learn([(first, SampledToken(9))], StepOutput((), 0.01), was_mixed=False)
    assert (adaptive.reason, adaptive.reports()[0].lengths) == ("no_times", (1,))
    length = adaptive.plan([first], 64)[0]
    adaptive.learn([(first, verified(length, length))], StepOutput((), 0.012), was_mixed=False)
    report = adaptive.reports()[0]
    assert length >= 1 and (report.num_drafted, report.num_accepted) == (length, length)
    assert report.speedup == pytest.approx((length + 1) * 10 / 12, rel=0.05)
    assert adaptive.reason in set(DraftReason)
    assert (NoDrafts().reason, list(NoDrafts().reports())) == ("", [])
