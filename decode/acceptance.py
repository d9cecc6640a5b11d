"""How likely a draft stands: by sequence, grade and position, given that all before it stand. Old steps fade.

In a tree, whose best nodes come first, a position is a node's place in that order, and its chance that of the node to
be on the path that stands, whatever became of others.

A sequence about which little is known is taken to be like all others of this drafter, in drafts of the same grade; its
own history pulls it away. Letters: S slots, B sequences of a step, G grades (see `decode.outlook`), K positions.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from decode.outlook import NUM_GRADES

Floats = NDArray[np.float64]

_FIRST_ACCEPTANCE = 0.6  # of a drafter nobody has used yet
_OWN_MEMORY = 0.99  # of a sequence, per step that looked at the position
_POOL_MEMORY = 0.997  # of all, per draft that looked at it: many at once tell as much of what there is by now
_UNSEEN_MEMORY = 0.995  # of positions that a step did not reach: they slowly become like the one before, and are tried
_PRIOR_COUNT = 20.0  # drafts of its own after which a sequence counts as much as what others say of it
_LEAST_PRIOR_COUNT = 4.0  # the same, where there are no others
_RATIO_COUNT = 4.0  # drafts that would stand by others', after which a sequence is taken to differ from them
_NEIGHBOUR_COUNT = 2.0  # of a position: what the position before it says
_NODE_FADE, _NODE_NEIGHBOUR_COUNT = 0.7, 12.0  # a node's chance to the one before it: they fall smoothly
_HIGHEST = 0.99
_HOPE = 2.0  # standard errors
_FIRST_SLOTS = 32


@dataclass(frozen=True, slots=True)
class DraftOutcome:
    """What became of one sequence's draft in one step: 0 <= accepted <= drafted <= asked.

    `nodes`: which ones were accepted, if it was a tree. All drafts of a grade are trees, or none is. `is_free`: see
    `Outlook`.
    """

    sequence_id: str
    num_asked: int
    num_drafted: int
    num_accepted: int
    grade: int = 0
    nodes: tuple[int, ...] | None = None
    is_free: bool = False

    def __post_init__(self) -> None:
        if not 0 <= self.num_accepted <= self.num_drafted <= self.num_asked:
            raise ValueError(
                f"accepted {self.num_accepted} of {self.num_drafted} drafted tokens, where {self.num_asked} were asked"
            )
        if self.nodes is not None and not self._are_nodes(self.nodes):
            raise ValueError(
                f"accepted {self.num_accepted} of {self.num_drafted} drafted tokens, the nodes {self.nodes}"
            )

    def _are_nodes(self, nodes: tuple[int, ...]) -> bool:
        return (
            len(nodes) == self.num_accepted
            and all(0 <= node < self.num_drafted for node in nodes)
            and all(node < following for node, following in itertools.pairwise(nodes))
        )

    @property
    def num_looked_at(self) -> int:
        """Drafts whose chance this says something of."""
        return self.num_drafted if self.nodes is not None else min(self.num_accepted + 1, self.num_drafted)


@dataclass(frozen=True, slots=True)
class Chances:
    """`survival[i, j]`: that draft j of sequence i stands, and so do those it is behind; `hopeful[i, j]`: at most.

    For the first draft that is two standard errors more, and for all as many times more. `by_grade` is what `survival`
    would be of other grades, and in its last row of a sequence that is not among these.
    """

    survival: Floats  # [B, K], falling along K
    hopeful: Floats  # [B, K], falling along K
    by_grade: Floats  # [B + 1, G, K], falling along K
    _rows: Mapping[str, int]

    def of(self, sequence_id: str, grade: int) -> Floats:
        """The survival of its drafts, [K], were they of this grade."""
        survival: Floats = self.by_grade[self._rows.get(sequence_id, -1), grade]
        return survival


class AcceptanceBook:
    def __init__(self, longest_draft: int) -> None:
        self._positions = np.arange(longest_draft)
        self._slots: dict[str, int] = {}
        self._free = list(range(_FIRST_SLOTS))
        # Decayed counts, [2, ...]: drafts looked at (all before them stood), and those of them that stood.
        self._counts = np.zeros((2, _FIRST_SLOTS, NUM_GRADES, longest_draft))  # of each sequence
        self._is_tree = np.zeros(NUM_GRADES, dtype=np.bool_)
        self._pool = np.zeros((2, NUM_GRADES, longest_draft))  # of all that there ever were
        self._shares = np.zeros_like(self._counts)  # of the pool, each sequence's own: it is no evidence about itself

    @property
    def pool_rates(self) -> Floats:
        """Chance of each position, [K], given that all before it stood: the average over the pool."""
        looked = self._pool[0]
        weights = looked + 1e-3 * looked[:, :1]  # what a grade has seen says most; where none has, how common it is
        rates = self._rates(self._pool)
        if not weights.any():
            return np.asarray(rates[0])
        return np.asarray((weights * rates).sum(axis=0) / weights.sum(axis=0))

    def meet(self, sequence_ids: Iterable[str]) -> None:
        """From now on what becomes of their drafts says something of them, and not of the pool alone."""
        for sequence_id in sequence_ids:
            if sequence_id not in self._slots:
                self._add(sequence_id)

    def chances(self, sequence_ids: Sequence[str], grades: Sequence[int]) -> Chances:
        """Of every sequence, known or not, for drafts of these grades."""
        self.meet(sequence_ids)
        slots, every = [self._slots[name] for name in sequence_ids], range(len(sequence_ids))
        counts, shares = np.zeros((2, 2, len(slots) + 1, *self._pool.shape[1:]))  # [2, B + 1, G, K] each
        counts[:, :-1], shares[:, :-1] = self._counts[:, slots], self._shares[:, slots]
        others = np.maximum(self._pool[:, None] - shares, 0.0)
        pool_rates = self._rates(others)
        expected = (counts[0] * pool_rates).sum(axis=(1, 2))
        ratios = (counts[1].sum(axis=(1, 2)) + _RATIO_COUNT) / (expected + _RATIO_COUNT)  # one for all of a sequence
        priors = np.minimum(ratios[:, None, None] * pool_rates, _HIGHEST)
        known = np.minimum(others[0, ..., 0], _PRIOR_COUNT)  # [B + 1, G], of others
        prior_counts = np.maximum(known, _LEAST_PRIOR_COUNT)[..., None]
        rates = (counts[1] + prior_counts * priors) / (counts[0] + prior_counts)
        is_tree = self._is_tree[:, None]
        by_grade: Floats = np.where(is_tree, np.minimum.accumulate(rates, axis=2), np.cumprod(rates, axis=2))
        survival, first = by_grade[every, grades], rates[every, grades, 0]
        evidence = 1.0 + counts[0, every, grades, 0] + known[every, grades]
        doubt = np.sqrt((1.0 - first) / first / evidence)  # relative
        most = np.minimum(1.0 + _HOPE * doubt, _HIGHEST / first)
        rows = {name: row for row, name in enumerate(sequence_ids)}
        return Chances(survival, survival * most[:, None], by_grade, rows)

    def observe(self, *steps: Sequence[DraftOutcome]) -> None:
        """The outcomes of these steps, whose order does not count. Those of sequences that were forgotten count for the
        pool only."""
        drafts = [(step, outcome) for step, found in enumerate(steps) for outcome in found if outcome.num_asked > 0]
        if not drafts:
            return
        outcomes = [outcome for _, outcome in drafts]
        new = self._looked_and_stood(outcomes)
        grades = np.array([outcome.grade for outcome in outcomes], dtype=np.intp)
        for grade in set(grades.tolist()):
            num_steps = len({step for step, outcome in drafts if outcome.grade == grade})
            of_grade = new[:, grades == grade].sum(axis=1)
            memory = np.where(of_grade[0] > 0.0, _POOL_MEMORY ** of_grade[0], _UNSEEN_MEMORY**num_steps)
            self._pool[:, grade] = self._pool[:, grade] * memory + of_grade
            self._shares[:, :, grade] *= memory
        known = [index for index, outcome in enumerate(outcomes) if outcome.sequence_id in self._slots]
        slots = np.array([self._slots[outcomes[index].sequence_id] for index in known], dtype=np.intp)
        sums, num_drafts = np.zeros_like(self._counts), np.zeros(self._counts.shape[1:3])
        for kind in (0, 1):
            np.add.at(sums[kind], (slots, grades[known]), new[kind, known])
        np.add.at(num_drafts, (slots, grades[known]), 1.0)
        num_unseen = num_drafts[..., None] - sums[0]  # a position that a draft looked at was looked at once
        self._counts *= _OWN_MEMORY ** sums[0] * _UNSEEN_MEMORY**num_unseen
        self._counts += sums
        self._shares += sums

    def _looked_and_stood(self, outcomes: Sequence[DraftOutcome]) -> Floats:
        """0 or 1 by draft and position, [2, N, K]: whether it was looked at, and whether it stood."""
        ends = np.array([(outcome.num_looked_at, outcome.num_accepted) for outcome in outcomes]).T
        new = (self._positions < ends[:, :, None]).astype(np.float64)
        for index, outcome in enumerate(outcomes):
            if outcome.nodes is not None:
                self._is_tree[outcome.grade] = True
                new[1, index] = 0.0
                new[1, index, list(outcome.nodes)] = 1.0
        return new

    def forget(self, sequence_ids: Iterable[str]) -> None:
        """Ids that are not known are ignored."""
        for sequence_id in sequence_ids:
            slot = self._slots.pop(sequence_id, None)
            if slot is not None:
                self._counts[:, slot] = self._shares[:, slot] = 0.0
                self._free.append(slot)

    def _rates(self, counts: Floats) -> Floats:
        """Chances of each position, [..., G, K], from counts [2, ..., G, K].

        Where little was seen a position is like the one before it.
        """
        neighbour_count = np.where(self._is_tree, _NODE_NEIGHBOUR_COUNT, _NEIGHBOUR_COUNT)[:, None]
        fade = np.where(self._is_tree, _NODE_FADE, 1.0)
        weights = counts[0] + neighbour_count
        rates: Floats = counts[1] / weights
        inherited = neighbour_count / weights
        inherited[..., 0] *= _FIRST_ACCEPTANCE
        inherited[..., 1:] *= fade[:, None]
        before: float | Floats = 1.0
        for rate, share in zip(np.moveaxis(rates, -1, 0), np.moveaxis(inherited, -1, 0), strict=True):
            rate += share * before
            before = rate
        return rates

    def _add(self, sequence_id: str) -> None:
        if not self._free:
            num_slots = self._counts.shape[1]
            self._counts = np.concatenate([self._counts, np.zeros_like(self._counts)], axis=1)
            self._shares = np.concatenate([self._shares, np.zeros_like(self._shares)], axis=1)
            self._free = list(range(num_slots, 2 * num_slots))
        self._slots[sequence_id] = self._free.pop()
