"""How likely a draft stands: by sequence and position, given that all before it stand. Old steps fade.

A sequence about which little is known is taken to be like all others of this drafter; its own history pulls it away.
A drafter may propose fewer tokens than it was asked for; how often it does is kept apart, since a token that was not
proposed costs nothing either. Letters: S slots, B sequences of a step, K positions.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

_FIRST_ACCEPTANCE = 0.6  # of a drafter nobody has used yet
_OWN_MEMORY = 0.98  # of a sequence, per step that looked at the position
_POOL_MEMORY = 0.99
_UNSEEN_MEMORY = 0.995  # of positions that a step did not reach: they slowly become like the one before, and are tried
_PRIOR_COUNT = 12.0  # drafts of its own after which a sequence counts as much as its prior
_NEIGHBOUR_COUNT = 2.0  # of a position: what the position before it says
_HIGHEST = 0.99
_FIRST_SLOTS = 32


@dataclass(frozen=True, slots=True)
class DraftOutcome:
    """What became of one sequence's draft in one step: 0 <= accepted <= drafted <= asked."""

    sequence_id: str
    num_asked: int
    num_drafted: int
    num_accepted: int

    def __post_init__(self) -> None:
        if not 0 <= self.num_accepted <= self.num_drafted <= self.num_asked:
            raise ValueError(
                f"accepted {self.num_accepted} of {self.num_drafted} drafted tokens, where {self.num_asked} were asked"
            )


@dataclass(frozen=True, slots=True)
class Chances:
    """`survival[i, j]`: that drafts 0 to j of sequence i stand, if proposed; `proposal[i, j]`: that they are."""

    survival: Floats  # [B, K], falling along K
    proposal: Floats  # [B, K], falling along K


class AcceptanceBook:
    def __init__(self, longest_draft: int) -> None:
        self._positions = np.arange(longest_draft)
        self._slots: dict[str, int] = {}
        self._free = list(range(_FIRST_SLOTS))
        # Decayed counts [4, S, K]: drafts looked at (all before them stood), that stood, that were asked for, proposed.
        self._counts = np.zeros((4, _FIRST_SLOTS, longest_draft))
        self._pool_counts = np.zeros((4, longest_draft))
        self._pool_rates = np.full(longest_draft, _FIRST_ACCEPTANCE)
        self._pool_proposal = np.ones(longest_draft)

    @property
    def pool_rates(self) -> Floats:
        """Chance of each position, [K], given that all before it stood: the average over the pool."""
        return self._pool_rates.copy()

    def chances(self, sequence_ids: Sequence[str]) -> Chances:
        """Of every sequence, known or not."""
        for sequence_id in sequence_ids:
            if sequence_id not in self._slots:
                self._add(sequence_id)
        looked, stood, asked, proposed = self._counts[:, [self._slots[name] for name in sequence_ids]]  # [B, K] each
        expected = looked @ self._pool_rates
        ratios = (stood.sum(axis=1) + _PRIOR_COUNT) / (expected + _PRIOR_COUNT)  # one for all positions of a sequence
        priors = np.minimum(ratios[:, None] * self._pool_rates, _HIGHEST)
        rates = (stood + _PRIOR_COUNT * priors) / (looked + _PRIOR_COUNT)
        proposal = (proposed + _PRIOR_COUNT * self._pool_proposal) / (asked + _PRIOR_COUNT)
        return Chances(np.cumprod(rates, axis=1), np.minimum.accumulate(proposal, axis=1))

    def observe(self, outcomes: Sequence[DraftOutcome]) -> None:
        """Of one step. A sequence that was forgotten meanwhile counts for the pool only."""
        outcomes = [outcome for outcome in outcomes if outcome.num_asked > 0]
        if not outcomes:
            return
        ends = np.array(
            [(min(o.num_accepted + 1, o.num_drafted), o.num_accepted, o.num_asked, o.num_drafted) for o in outcomes]
        ).T[:, :, None]  # [4, B, 1]
        new = (self._positions < ends).astype(np.float64)  # [4, B, K]
        seen = new[[0, 0, 2, 2]]  # which counts a draft had its say in
        known = [index for index, outcome in enumerate(outcomes) if outcome.sequence_id in self._slots]
        slots = [self._slots[outcomes[index].sequence_id] for index in known]
        self._counts[:, slots] = (
            self._counts[:, slots] * np.where(seen[:, known], _OWN_MEMORY, _UNSEEN_MEMORY) + new[:, known]
        )
        self._observe_pool(new.sum(axis=1), np.asarray(seen.any(axis=1)))

    def forget(self, sequence_ids: Iterable[str]) -> None:
        """Ids that are not known are ignored."""
        for sequence_id in sequence_ids:
            slot = self._slots.pop(sequence_id, None)
            if slot is not None:
                self._counts[:, slot] = 0.0
                self._free.append(slot)

    def _add(self, sequence_id: str) -> None:
        if not self._free:
            num_slots = self._counts.shape[1]
            self._counts = np.concatenate([self._counts, np.zeros_like(self._counts)], axis=1)
            self._free = list(range(num_slots, 2 * num_slots))
        self._slots[sequence_id] = self._free.pop()

    def _observe_pool(self, new: Floats, seen: NDArray[np.bool_]) -> None:
        self._pool_counts = self._pool_counts * np.where(seen, _POOL_MEMORY, _UNSEEN_MEMORY) + new
        looked, stood, asked, proposed = self._pool_counts.tolist()
        rate, rates = _FIRST_ACCEPTANCE, []
        for num_looked, num_stood in zip(looked, stood, strict=True):
            rate = (num_stood + _NEIGHBOUR_COUNT * rate) / (num_looked + _NEIGHBOUR_COUNT)
            rates.append(rate)
        self._pool_rates = np.array(rates)
        share, shares = 1.0, []
        for num_asked, num_proposed in zip(asked, proposed, strict=True):
            share = min(share, (num_proposed + _NEIGHBOUR_COUNT * share) / (num_asked + _NEIGHBOUR_COUNT))
            shares.append(share)
        self._pool_proposal = np.array(shares)
