"""How much may be lost to trying things out, and when a sequence that stopped drafting is tried again."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


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
        """May overdraw: a trial was dearer than expected, and the next one waits for it. Negative if one has paid."""
        self._num_steps = min(self._num_steps - loss, self._most_steps)


class ProbeTimetable:
    """When a sequence without drafts gets one, to see whether those of this grade stand by now.

    Each probe that fails doubles the wait; one that succeeds is followed by another at once, until the sequence's
    acceptance has recovered or one fails.
    """

    def __init__(self, first_wait: int, longest_wait: int) -> None:
        self._first_wait = first_wait
        self._longest_wait = longest_wait
        self._entries: dict[str, dict[int, _Entry]] = {}  # by sequence and grade

    def is_due(self, sequence_id: str, grade: int, step: int) -> bool:
        entry = self._entries.get(sequence_id, {}).get(grade)
        return entry is None or step >= entry.due

    def drafted(self, sequence_id: str, grade: int, step: int) -> None:
        """By choice, not to probe."""
        self._entries.setdefault(sequence_id, {})[grade] = _Entry(step + self._first_wait, self._first_wait)

    def probed(self, sequence_id: str, grade: int, step: int, *, accepted: bool) -> None:
        entries = self._entries.setdefault(sequence_id, {})
        wait = entries[grade].wait if grade in entries else self._first_wait
        if accepted:
            entries[grade] = _Entry(step, wait)
        else:
            entries[grade] = _Entry(step + wait, min(2 * wait, self._longest_wait))

    def forget(self, sequence_ids: Iterable[str]) -> None:
        for sequence_id in sequence_ids:
            self._entries.pop(sequence_id, None)


@dataclass(frozen=True, slots=True)
class _Entry:
    """`wait`: steps after the next probe, if that fails."""

    due: int
    wait: int
