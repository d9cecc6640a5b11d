"""Random numbers without a generator: a pure function of (seed, position, purpose, index), the same in every process.

So a sequence that is retried, handed over or batched with others draws what it would have drawn anyway. The bits are
SplitMix64's: int64 arithmetic that wraps, on whatever device the arguments are. Letters: R rows, V indexes.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence

import torch
from torch import Tensor


class Purpose(enum.IntEnum):
    """What a number decides. Two purposes never share noise, whatever the seed."""

    SAMPLE = 1  # the token at a position: Gumbel noise, indexed by token id
    DRAFT = 2  # a drafter's own choice, where it does not share the sample's noise
    VERDICT = 3  # whether a drafted token is accepted


def _wrap(value: int) -> int:
    """The int64 with the low 64 bits of `value`."""
    return (value + 2**63) % 2**64 - 2**63


_GOLDEN = _wrap(0x9E3779B97F4A7C15)
_FACTORS = (_wrap(0xBF58476D1CE4E5B9), _wrap(0x94D049BB133111EB))
_LARGEST_BELOW_ONE = 1.0 - 2.0**-24


def seed_tensor(seeds: Sequence[int], device: torch.device | str = "cpu") -> Tensor:
    """Seeds from [0, 2^64) as int64."""
    return torch.tensor([_wrap(seed) for seed in seeds], dtype=torch.int64, device=device)


def bits(seeds: Tensor, positions: Tensor, purpose: Purpose, indexes: Tensor) -> Tensor:
    """64 random bits each: seeds and positions [R], indexes [V] or [R, V], all int64 -> int64 [R, V]."""
    keys = _mix(seeds + _GOLDEN)
    keys = _mix(keys + positions * _GOLDEN)
    keys = _mix(keys + _wrap(purpose * _GOLDEN))
    return _mix(keys.unsqueeze(-1) + (indexes + 1) * _GOLDEN)


def uniforms(seeds: Tensor, positions: Tensor, purpose: Purpose, indexes: Tensor) -> Tensor:
    """Float32 strictly inside (0, 1). Small values are as finely spaced as float32 allows, down to 2^-64."""
    drawn = bits(seeds, positions, purpose, indexes)
    high = _shift_right(drawn, 1, out=drawn).to(torch.float32)  # 63 bits
    return high.add_(0.5).mul_(2.0**-63).clamp_(max=_LARGEST_BELOW_ONE)


def gumbel_noise(seeds: Tensor, positions: Tensor, purpose: Purpose, indexes: Tensor) -> Tensor:
    """Standard Gumbel, float32: argmax(logits + noise) is a draw from softmax(logits).

    The winner's noise is large, which is where 1 - u would be coarse: -log(-log(1 - u)) is fine there.
    """
    return uniforms(seeds, positions, purpose, indexes).neg_().log1p_().neg_().log_().neg_()


def _mix(state: Tensor) -> Tensor:
    """SplitMix64's output function. Overwrites `state`, which is always a fresh tensor here."""
    scratch = torch.empty_like(state)
    state.bitwise_xor_(_shift_right(state, 30, scratch)).mul_(_FACTORS[0])
    state.bitwise_xor_(_shift_right(state, 27, scratch)).mul_(_FACTORS[1])
    return state.bitwise_xor_(_shift_right(state, 31, scratch))


def _shift_right(value: Tensor, num_bits: int, out: Tensor) -> Tensor:
    """Logical: int64's own copies the sign down. `out` may be `value`; a fresh tensor costs more than the shift."""
    return torch.bitwise_right_shift(value, num_bits, out=out).bitwise_and_(2 ** (64 - num_bits) - 1)
