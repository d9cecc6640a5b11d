"""How long answers are, of requests that came lately, though some of these have not ended yet.

Of those that came lately, short answers have ended and long ones run still: who looks only at the ended
ones takes answers for shorter than they are. So this is Kaplan and Meier's estimator (1958), in which a running request
says that its answer is longer than so much.
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from dataclasses import dataclass

_TAIL = 1.5  # what is longer than all that was seen: so many times the longest


@dataclass(frozen=True, slots=True)
class AnswerLengths:
    """A distribution: `lengths` in order, and the share of answers that are longer than each."""

    lengths: Sequence[int]
    longer: Sequence[float]

    @classmethod
    def of(cls, ended: Sequence[int], running: Sequence[int]) -> AnswerLengths:
        """Tokens of answers that have ended, and those so far of answers that have not."""
        seen = sorted([(length, True) for length in ended] + [(length, False) for length in running])
        lengths: list[int] = []
        longer: list[float] = []
        share, num_left = 1.0, len(seen)
        for length, has_ended in seen:
            if has_ended:
                share *= 1.0 - 1.0 / num_left
                lengths.append(length)
                longer.append(share)
            num_left -= 1
        if share > 0.0 and seen:
            lengths.append(max(1, round(_TAIL * seen[-1][0])))
            longer.append(0.0)
        return cls(lengths, longer)

    def at(self, share: float, at_least: int = 0) -> int:
        """The length that this share of those that are longer than `at_least` does not exceed."""
        first = bisect.bisect_right(self.lengths, at_least)
        if first == len(self.lengths):
            return max(1, round(_TAIL * at_least))
        before = self.longer[first - 1] if first else 1.0
        wanted = before * (1.0 - share)
        index = first
        while index + 1 < len(self.lengths) and self.longer[index] > wanted:
            index += 1
        return self.lengths[index]
