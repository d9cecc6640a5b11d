"""Whether a decode worker is to compute a prompt that would be late on any prefill worker. Pure.

The fast answer to pools whose sizes do not fit the moment, until roles have changed: a decode worker that spends a
share of its time on prompts makes each token take 1 / (1 - share) as long, and while that keeps to what is promised
nobody loses anything but short answers, which do not even out what one prompt takes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from router.config import SloPolicy

WINDOW_S = 10.0  # a share is of about so long: as sequences stay, longer than a prompt takes
_LATE = 0.8  # of the time to the first token that is promised
_FULL = 0.9  # of the time per token that is promised: what else comes meanwhile is not known
_MOST_HURT = 0.5  # sequences, for one prompt that might be late


@dataclass(frozen=True, slots=True)
class Spilled:
    """Tokens of prompts that a worker was sent lately to compute where they decode, as of `at`; old ones fade away."""

    num_tokens: float = 0.0
    at: float = -math.inf

    def and_then(self, at: float, num_tokens: int) -> Spilled:
        return Spilled(self.num_tokens_at(at) + num_tokens, at)

    def num_tokens_at(self, now: float) -> float:
        return self.num_tokens * math.exp(min(0.0, self.at - now) / WINDOW_S)


def is_late(slo: SloPolicy, ttft_s: float) -> bool:
    """As predicted. A queue that is kept at the limit makes every other request miss it."""
    return ttft_s > _LATE * slo.ttft_s


@dataclass(frozen=True, slots=True)
class Spill:
    """What became of a prompt on a decode worker, and of the sequences there.

    `ttft_s`: of this prompt, which takes `prompt_s`. `prompts_s`: on prompts in the last `WINDOW_S`, with this one.
    `tpot_s`: with its sequence, were there no prompts. `num_beside` sequences stay `stay_s` on the mean; 0: not known.
    """

    ttft_s: float
    tpot_s: float
    prompt_s: float
    prompts_s: float
    num_beside: int
    stay_s: float

    def keeps(self, slo: SloPolicy) -> bool:
        share = self.prompts_s / WINDOW_S
        is_in_time = self.ttft_s <= slo.ttft_s and share < 1 and self.tpot_s / (1 - share) <= _FULL * slo.tpot_s
        return is_in_time and self._num_hurt(slo.tpot_s - self.tpot_s) <= _MOST_HURT

    def _num_hurt(self, slack_s: float) -> float:
        """Sequences whose answers are so short that this prompt alone makes them late, as expected.

        With lengths distributed exponentially those that are met running are longer by their length: x of the mean or
        less have 1 - (1 + x) exp(-x) of them.
        """
        if not self.stay_s:
            return 0.0
        least_tokens, mean_tokens = self.prompt_s / slack_s, self.stay_s / self.tpot_s
        x = least_tokens / mean_tokens
        return self.num_beside * (1 - (1 + x) * math.exp(-x))
