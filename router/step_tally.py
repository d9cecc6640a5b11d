"""Brings together what steps took, so that a few values tell of many of them: those alike become their mean.

What is called for each step takes a microsecond. However many steps there are, it holds a bounded number of them.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from router.measured_steps import DecodeSteps, PrefillSteps, Steps

_NUM_KINDS = 8  # of steps of each sort that are kept apart: of different loads more is learnt than of many alike
_NUM_ALIKE = 16  # of a kind, the first ones
_FAR = 2.0  # times the median of those alike: such a step was held up by something else

_Group = dict[tuple[int, int], list[tuple[float, float, float, float]]]


class StepTally:
    """Steps are alike within a factor of two of their tokens (sequences) and of the context of each."""

    def __init__(self) -> None:
        self._prefill: _Group = {}
        self._decode: _Group = {}

    def prefilled(self, num_tokens: float, num_pairs: float, step_s: float) -> None:
        alike = int(num_tokens).bit_length(), int(num_pairs / num_tokens).bit_length()
        _add(self._prefill, alike, (num_tokens, num_pairs, step_s, 0.0))

    def decoded(
        self, num_sequences: float, num_context_tokens: float, step_s: float, tokens_per_step: float = 1.0
    ) -> None:
        alike = int(num_sequences).bit_length(), int(num_context_tokens / num_sequences).bit_length()
        _add(self._decode, alike, (num_sequences, num_context_tokens, step_s, tokens_per_step))

    def take(self) -> list[Steps]:
        """What came since the last time, and begins anew."""
        prefill, self._prefill = self._prefill, {}
        decode, self._decode = self._decode, {}
        taken: list[Steps] = [PrefillSteps(*_mean(alike)[:3]) for alike in prefill.values()]
        taken += [DecodeSteps(*_mean(alike)) for alike in decode.values()]
        return taken


def _add(group: _Group, alike: tuple[int, int], step: tuple[float, float, float, float]) -> None:
    if step[2] <= 0.0:
        return
    steps = group.get(alike)
    if steps is None:
        if len(group) == _NUM_KINDS:
            return
        steps = group[alike] = []
    if len(steps) < _NUM_ALIKE:
        steps.append(step)


def _mean(steps: Sequence[tuple[float, float, float, float]]) -> tuple[float, float, float, float]:
    limit_s = _FAR * statistics.median(step[2] for step in steps)
    kept = [step for step in steps if step[2] <= limit_s]
    tokens, context, step_s, tokens_per_step = (sum(each) / len(kept) for each in zip(*kept, strict=True))
    return tokens, context, step_s, tokens_per_step
