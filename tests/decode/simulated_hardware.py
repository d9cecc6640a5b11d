"""Hardware and drafters whose times and acceptances are known, for the draft policy to find its way on."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

from decode.acceptance import DraftOutcome
from decode.coverage import Routing, distinct_experts
from decode.draft_decision import DraftDecision, DraftDemand, StepOutcome
from decode.draft_policy import DraftPolicy
from decode.outlook import ANYTHING, NOTHING, Outlook


@dataclass(frozen=True)
class Hardware:
    """Seconds are in units of the dense plain step. `beta` is the truth, which the policy has to find."""

    weights_s: float = 1.0  # to read what every step reads: the time of few rows
    free_rows: int = 8  # computed while the weights are read
    row_s: float = 0.0  # of each row beyond those
    context_token_s: float = 2e-5
    expert_s: float = 0.0
    routing: Routing = field(default_factory=lambda: Routing(8, 2))
    beta: float = 0.6
    draft_step_s: float = 0.05
    draft_token_s: float = 0.0005

    def experts(self, lengths: Sequence[int]) -> float:
        return distinct_experts(self.routing, sum((length + 1) ** self.beta for length in lengths))

    def verify_s(self, lengths: Sequence[int], num_context_tokens: int) -> float:
        num_rows = len(lengths) + sum(lengths)
        memory_s = self.weights_s + self.expert_s * self.experts(lengths)
        compute_s = max(0, num_rows - self.free_rows) * self.row_s
        return memory_s + compute_s + self.context_token_s * num_context_tokens

    def draft_s(self, asked: Sequence[int]) -> float:
        """`asked` of the drafter: look-ups are free."""
        return self.draft_step_s * max(asked, default=0) + self.draft_token_s * sum(asked)


DENSE = Hardware(row_s=0.04)
COMPUTE_BOUND = Hardware(row_s=0.125)  # a step of 16 rows takes twice as long as one of 8
MIXTURE = Hardware(weights_s=0.3, expert_s=0.35, row_s=0.025)  # 8 experts, 2 chosen: one row loads a quarter of them
SPARSE = Hardware(weights_s=0.3, expert_s=0.03, row_s=0.015, routing=Routing(128, 8))


@dataclass(frozen=True)
class Offer:
    """What a drafter has in this share of the steps. `acceptance` of None: the sequence's own.

    Of a tree, `nodes` are the chances of its nodes by their places, which the acceptance is multiplied by.
    """

    share: float = 1.0
    acceptance: float | None = None
    outlook: Outlook = ANYTHING
    nodes: tuple[float, ...] | None = None

    def chances(self, own: float) -> list[float]:
        """By place: that a draft stands, and so do those it is behind."""
        acceptance = own if self.acceptance is None else self.acceptance
        if self.nodes is not None:
            return [acceptance * node for node in self.nodes]
        return [acceptance ** (place + 1) for place in range(self.outlook.num_tokens)]


NOTHING_TO_OFFER = Offer(1.0, 0.0, NOTHING)


@dataclass
class Simulation:
    """Steps of one batch that never ends. `acceptance[i]` (may be changed) is sequence i's truth.

    In the share of steps that no offer takes the drafter has nothing to propose for a sequence.
    """

    hardware: Hardware
    acceptance: list[float]
    offers: Sequence[Offer] = (Offer(),)
    noise: float = 0.05
    longest_draft: int = 7
    seed: int = 1
    slowness: float = 1.0
    context_tokens: int = 200  # per sequence
    spent_s: float = 0.0  # without noise
    num_tokens: float = 0.0  # expected, by the true acceptances
    decisions: list[DraftDecision] = field(default_factory=list)
    offered: list[list[tuple[float, Offer]]] = field(default_factory=list)  # in each step, by sequence

    def __post_init__(self) -> None:
        self._random = random.Random(self.seed)

    def run(self, policy: DraftPolicy, num_steps: int) -> float:
        """Tokens per second of these steps, as expected from what was chosen."""
        self.spent_s = self.num_tokens = 0.0
        self.decisions, self.offered = [], []
        for _ in range(num_steps):
            self._step(policy)
        return self.num_tokens / self.spent_s

    def _step(self, policy: DraftPolicy) -> None:
        offers = self.offers_of_a_step()
        self.offered.append(offers)
        demands = [
            DraftDemand(str(index), self.longest_draft, offer.outlook) for index, (_, offer) in enumerate(offers)
        ]
        num_context_tokens = self.context_tokens * len(demands)
        decision = policy.choose(demands, num_context_tokens, 4096)
        asked = decision.draft_lengths
        assert all(length <= offer.outlook.num_tokens for length, (_, offer) in zip(asked, offers, strict=True))
        verify_s = self.hardware.verify_s(asked, num_context_tokens) * self.slowness
        draft_s = self.hardware.draft_s(made(asked, offers)) * self.slowness
        self.decisions.append(decision)
        self.spent_s += verify_s + draft_s
        self.num_tokens += emitted(offers, asked)
        outcomes = tuple(
            self._outcome(str(index), asked[index], own, offer)
            for index, (own, offer) in enumerate(offers)
            if asked[index]
        )
        experts = self._counted_experts(asked) if self.hardware.expert_s else None
        policy.observe(
            decision,
            StepOutcome(
                len(asked), num_context_tokens, outcomes, verify_s * self._noisy(), draft_s * self._noisy(), experts
            ),
        )

    def _outcome(self, sequence_id: str, num_drafts: int, own: float, offer: Offer) -> DraftOutcome:
        outlook = offer.outlook
        if offer.nodes is None:
            acceptance = own if offer.acceptance is None else offer.acceptance
            num_accepted = self._accepted(acceptance, num_drafts)
            return DraftOutcome(
                sequence_id, num_drafts, num_drafts, num_accepted, outlook.grade, is_free=outlook.is_free
            )
        chances = offer.chances(own)[:num_drafts]
        nodes = tuple(place for place, chance in enumerate(chances) if self._random.random() < chance)
        return DraftOutcome(sequence_id, num_drafts, num_drafts, len(nodes), outlook.grade, nodes)

    def offers_of_a_step(self) -> list[tuple[float, Offer]]:
        """By sequence: its own acceptance, and what the drafter has for it."""
        offers = []
        for own in self.acceptance:
            draw = self._random.random()
            for offer in self.offers:
                draw -= offer.share
                if draw < 0:
                    offers.append((own, offer))
                    break
            else:
                offers.append((own, NOTHING_TO_OFFER))
        return offers

    def _noisy(self) -> float:
        return max(0.5, self._random.gauss(1.0, self.noise))

    def _counted_experts(self, drafted: Sequence[int]) -> float:
        num_experts, expected = self.hardware.routing.num_experts, self.hardware.experts(drafted)
        spread = (expected * (1.0 - expected / num_experts)) ** 0.5  # of a count of independent experts
        return min(num_experts, self._random.gauss(expected, spread / 4))  # a mean over layers

    def _accepted(self, acceptance: float, num_drafted: int) -> int:
        for position in range(num_drafted):
            if self._random.random() >= acceptance:
                return position
        return num_drafted


def made(lengths: Sequence[int], offers: Sequence[tuple[float, Offer]]) -> list[int]:
    """Of the drafts of these lengths, those that take the drafter time."""
    return [length for length, (_, offer) in zip(lengths, offers, strict=True) if not offer.outlook.is_free]


def emitted(offers: Sequence[tuple[float, Offer]], lengths: Sequence[int]) -> float:
    """Expected of all sequences together."""
    pairs = zip(lengths, offers, strict=True)
    return sum(1.0 + sum(offer.chances(own)[:length]) for length, (own, offer) in pairs)


def fixed_rates(simulation: Simulation) -> dict[int, float]:
    """Tokens per second of every uniform draft length, where the drafter had as many, in the steps of the last run."""
    hardware = simulation.hardware
    num_context_tokens = simulation.context_tokens * len(simulation.acceptance)
    always = simulation.offers[0].share == 1.0
    steps = [simulation.offers_of_a_step()] if always else simulation.offered
    rates = {}
    for longest in range(simulation.longest_draft + 1):
        num_tokens = seconds = 0.0
        for offers in steps:
            lengths = [min(longest, offer.outlook.num_tokens) for _, offer in offers]
            num_tokens += emitted(offers, lengths)
            seconds += hardware.verify_s(lengths, num_context_tokens) + hardware.draft_s(made(lengths, offers))
        rates[longest] = num_tokens / seconds
    return rates
