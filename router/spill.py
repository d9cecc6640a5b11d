"""Whether a decode worker is to compute a prompt that would be late on any prefill worker. Pure.

The fast answer to pools whose sizes do not fit the moment, until roles have changed: a decode worker that spends a
share of its time on prompts makes each token take 1 / (1 - share) as long, and while that keeps to what is promised
nobody loses anything.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from router.config import SloPolicy

WINDOW_S = 10.0  # a share is of about so long: as sequences stay, longer than a prompt takes
_FULL = 0.9  # of the time per token that is promised: what else comes meanwhile is not known


@dataclass(frozen=True, slots=True)
class Spilled:
    """Tokens of prompts that a worker was sent lately to compute where they decode, as of `at`; old ones fade away."""

    num_tokens: float = 0.0
    at: float = -math.inf

    def and_then(self, at: float, num_tokens: int) -> Spilled:
        return Spilled(self.num_tokens_at(at) + num_tokens, at)

    def num_tokens_at(self, now: float) -> float:
        return self.num_tokens * math.exp(min(0.0, self.at - now) / WINDOW_S)


def keeps_promises(slo: SloPolicy, ttft_s: float, tpot_s: float, prompts_s: float) -> bool:
    """`ttft_s` of this prompt; `tpot_s` with its sequence, were there no prompts; `prompts_s`: of the last `WINDOW_S`,
    on prompts, with this one."""
    share = prompts_s / WINDOW_S
    return ttft_s <= slo.ttft_s and share < 1 and tpot_s / (1 - share) <= _FULL * slo.tpot_s
