"""Which experts the tokens of each layer have chosen lately, as shares."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

_HALF_LIFE_S = 30.0  # what was counted so long ago is worth half


@dataclass(frozen=True, slots=True)
class LayerShares:
    """`shares` sum to 1. `imbalance`: the greatest over their mean."""

    layer: int
    shares: tuple[float, ...]

    @property
    def imbalance(self) -> float:
        return max(self.shares) * len(self.shares)


class ExpertShares:
    """Counts every token that ran, drafts that were rejected among them. Event loop only."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._counted_at = clock()
        self._tokens: NDArray[np.float64] = np.zeros((0, 0))  # [layers, experts]

    def add(self, load: Sequence[Sequence[int]]) -> None:
        """Tokens of a step, [layers, experts]; empty of a dense model."""
        if not len(load):
            return
        now, new = self._clock(), np.asarray(load, np.float64)
        if self._tokens.shape == new.shape:
            self._tokens *= 0.5 ** ((now - self._counted_at) / _HALF_LIFE_S)
            self._tokens += new
        else:
            self._tokens = new
        self._counted_at = now

    def layers(self) -> list[LayerShares]:
        """Those that ran any token."""
        sums = self._tokens.sum(axis=1)
        return [
            LayerShares(layer, tuple((self._tokens[layer] / sums[layer]).tolist()))
            for layer in np.flatnonzero(sums).tolist()
        ]
