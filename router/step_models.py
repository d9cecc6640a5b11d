"""The step-time model of one kind of worker: begins with a calibration, and learns from what the workers measure.

Prefill and decode are learnt apart, each with a confidence of its own. What it has learnt is a `StepCosts`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from router.least_squares import LeastSquares
from router.step_costs import StepCosts

_USUAL_CHUNKS = [[(n, n + before)] for n in (64, 512, 2048) for before in (0, 4096)]
_USUAL_BATCHES = (1, 8, 32, 128)
_USUAL_CONTEXTS = (256, 2048)  # of each sequence
_TOKENS_SHARE = 0.05  # of each step in the mean


@dataclass(frozen=True, slots=True)
class Calibration:
    """What is known of a kind of worker before it has measured anything; it counts for so many steps."""

    costs: StepCosts
    num_steps: float = 10.0


class StepModel:
    """`observe_*` what steps took, `costs` says what they will take."""

    def __init__(self, calibration: Calibration, *, memory: float = 300.0) -> None:
        first = calibration.costs
        self._first = first
        self._prefill = LeastSquares(
            [first.prefill_base_s, first.prefill_token_s, first.prefill_pair_s],
            [_prefill_features(chunks) for chunks in _USUAL_CHUNKS],
            weight=calibration.num_steps,
            memory=memory,
        )
        decode = [first.decode_base_s, first.decode_sequence_s, first.decode_context_token_s]
        if first.experts is not None:
            decode.append(first.decode_expert_s)
        self._decode = LeastSquares(
            decode,
            [
                self._decode_features(number, number * context)
                for number in _USUAL_BATCHES
                for context in _USUAL_CONTEXTS
            ],
            weight=calibration.num_steps,
            memory=memory,
        )
        self._tokens_per_step = first.tokens_per_step

    def observe_prefill(self, chunks: Iterable[tuple[int, int]], step_s: float) -> None:
        """A step that computed these chunks and nothing else: tokens of each, and tokens of context with them."""
        self._prefill.observe(_prefill_features(list(chunks)), step_s)

    def observe_decode(
        self, num_sequences: float, num_context_tokens: float, step_s: float, tokens_per_step: float | None = None
    ) -> None:
        """A step in which every sequence decoded; `tokens_per_step`: how many of its tokens each got, on average."""
        self._decode.observe(self._decode_features(num_sequences, num_context_tokens), step_s)
        if tokens_per_step is not None and tokens_per_step >= 1.0:
            self._tokens_per_step += _TOKENS_SHARE * (tokens_per_step - self._tokens_per_step)

    @property
    def costs(self) -> StepCosts:
        base, token, pair = self._prefill.coefficients
        decode = self._decode.coefficients
        return replace(
            self._first,
            prefill_base_s=base,
            prefill_token_s=token,
            prefill_pair_s=pair,
            decode_base_s=decode[0],
            decode_sequence_s=decode[1],
            decode_context_token_s=decode[2],
            decode_expert_s=decode[3] if self._first.experts is not None else self._first.decode_expert_s,
            tokens_per_step=self._tokens_per_step,
        )

    @property
    def prefill_confidence(self) -> float:
        return self._prefill.confidence

    @property
    def decode_confidence(self) -> float:
        return self._decode.confidence

    def _decode_features(self, num_sequences: float, num_context_tokens: float) -> list[float]:
        features = [1.0, num_sequences, num_context_tokens]
        return features if self._first.experts is None else [*features, self._first.experts.touched(num_sequences)]


def _prefill_features(chunks: Sequence[tuple[int, int]]) -> list[float]:
    return [1.0, sum(n for n, _ in chunks), sum(n * context for n, context in chunks)]
