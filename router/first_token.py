"""When a prompt's first token will be there, from what steps take and what waits before it on a prefill worker. Pure.

A prefill worker computes first what has least left, and what has waited for long before that. So it matters what waits:
a short prompt goes past a long one, but for the step that is in progress. A step is as full as there is something to
compute: the last one of this prompt takes up what waits behind it, too.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from router.candidate import Candidate

AGEING_TOKENS_PER_S = 500.0  # as of `prefill.scheduler`: a second of waiting counts like so many tokens less
_DOUBTED, _TRUSTED = 0.2, 0.6  # confidence up to which the mean pace says it alone, and from which on the model does
_LEAST = 0.02  # without a pace: even a calibration that was cut short says more than nothing


@dataclass(frozen=True, slots=True)
class Prompt:
    """To be computed: what it does not find cached, as of what is known."""

    num_tokens: int
    num_cached_tokens: int

    @property
    def num_uncached(self) -> int:
        return self.num_tokens - self.num_cached_tokens


def rank_of(num_uncached: int, came_at: float) -> float:
    """The lower the sooner: all grow older together, so that the moment does not matter."""
    return num_uncached + AGEING_TOKENS_PER_S * came_at


def first_token_s(worker: Candidate, prompt: Prompt, now: float, paced_s: float | None) -> float | None:
    """`paced_s`: by the worker's mean speed; what it says fades away as the model becomes known."""
    times = worker.prefill_times
    if times is None:
        return paced_s
    if paced_s is None:
        return _modelled_s(worker, prompt, now) if times.confidence >= _LEAST else None
    trust = min(1.0, max(0.0, (times.confidence - _DOUBTED) / (_TRUSTED - _DOUBTED)))
    if trust == 0.0 or paced_s <= 0.0:
        return paced_s
    return float(paced_s * (_modelled_s(worker, prompt, now) / paced_s) ** trust)


def _modelled_s(worker: Candidate, prompt: Prompt, now: float) -> float:
    times = worker.prefill_times
    assert times is not None
    most, num_queued, num_uncached = times.max_step_tokens, worker.num_queued_tokens, prompt.num_uncached
    num_ahead = _num_ahead(worker, prompt, now)
    num_in_step = min(most, num_queued)  # of the step in progress, half of which is over
    seconds = 0.5 * (times.base_s + times.token_s * num_in_step) if num_queued else 0.0
    num_before = max(0, num_ahead - num_in_step)
    num_behind = max(0, num_queued - max(num_in_step, num_ahead))
    num_steps = max(1, math.ceil((num_before + num_uncached) / most))
    num_filling = min(num_steps * most - num_before - num_uncached, num_behind)
    # a token in the middle of it sees what is cached and half of the rest; in a chunk all are counted with its end
    chunk = min(most, num_uncached)
    context = prompt.num_cached_tokens + (num_uncached + chunk) / 2
    seconds += times.base_s * num_steps + times.token_s * (num_before + num_uncached + num_filling)
    return seconds + times.pair_s * num_uncached * context


def _num_ahead(worker: Candidate, prompt: Prompt, now: float) -> int:
    """Of the tokens that wait there. Of prompts that other routers sent, the same share as of those known here."""
    num_known = sum(num_tokens for _, num_tokens in worker.prompts)
    if num_known == 0:
        return worker.num_queued_tokens
    rank = rank_of(prompt.num_uncached, now)
    num_ahead = sum(num_tokens for other, num_tokens in worker.prompts if other < rank)
    unknown = max(0, worker.num_queued_tokens - num_known)
    return min(worker.num_queued_tokens, num_ahead + unknown * num_ahead // num_known)
