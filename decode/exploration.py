"""How much may be lost to trying things out, and when a sequence that stopped drafting is tried again."""

from __future__ import annotations

from collections.abc import Iterable


class ExplorationBudget:
    """A share of the time, saved up while nothing is tried. In steps: what is lost over what a step takes."""

    def __init__(self, share: float, most_steps: float) -> None:
        self._share = share
        self._most_steps = most_steps
        self._num_steps = most_steps

    @property
    def num_steps(self) -> float:
        return self._num_steps

    def allows(self, expected_loss: float) -> bool:
        return expected_loss <= self._num_steps

    def earn(self) -> None:
        self._num_steps = min(self._num_steps + self._share, self._most_steps)

    def spend(self, loss: float) -> None:
        """May overdraw: a trial was dearer than expected, and the next one waits for it."""
        self._num_steps -= loss


class ProbeTimetable:
    """When a sequence without drafts gets one, to see whether it drafts better now.

    Each probe that fails doubles the wait; one that succeeds is followed by another at once, until the sequence's
    acceptance has recovered or one fails.
    """

    def __init__(self, first_wait: int, longest_wait: int) -> None:
        self._first_wait = first_wait
        self._longest_wait = longest_wait
        self._due: dict[str, int] = {}
        self._waits: dict[str, int] = {}

    def is_due(self, sequence_id: str, step: int) -> bool:
        return step >= self._due.get(sequence_id, 0)

    def drafted(self, sequence_id: str, step: int) -> None:
        """By choice, not to probe."""
        self._waits[sequence_id] = self._first_wait
        self._due[sequence_id] = step + self._first_wait

    def probed(self, sequence_id: str, step: int, *, accepted: bool) -> None:
        if accepted:
            self._due[sequence_id] = step + 1
            return
        wait = self._waits.get(sequence_id, self._first_wait)
        self._due[sequence_id] = step + wait
        self._waits[sequence_id] = min(2 * wait, self._longest_wait)

    def forget(self, sequence_ids: Iterable[str]) -> None:
        for sequence_id in sequence_ids:
            self._due.pop(sequence_id, None)
            self._waits.pop(sequence_id, None)
