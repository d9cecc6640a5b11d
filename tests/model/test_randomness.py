from __future__ import annotations

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from model.randomness import Purpose, bits, gumbel_noise, seed_tensor, uniforms

MASK = 2**64 - 1
GOLDEN = 0x9E3779B97F4A7C15


def splitmix(state: int) -> int:
    """SplitMix64's output for a state, as published, in plain integers."""
    state &= MASK
    state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & MASK
    return state ^ (state >> 31)


def plain_bits(seed: int, position: int, purpose: int, index: int) -> int:
    key = splitmix(seed + GOLDEN)
    key = splitmix(key + position * GOLDEN)
    key = splitmix(key + purpose * GOLDEN)
    return splitmix(key + (index + 1) * GOLDEN)


def test_the_mixer_is_splitmix64() -> None:
    """First outputs of the reference generator seeded with 1234567 (its state grows by the golden ratio each time)."""
    outputs = [splitmix(1234567 + (step + 1) * GOLDEN) for step in range(3)]
    assert outputs == [6457827717110365317, 3203168211198807973, 9817491932198370423]


@given(
    st.integers(0, MASK),
    st.integers(0, 2**31),
    st.sampled_from(Purpose),
    st.lists(st.integers(0, 2**20), min_size=1, max_size=5),
)
def test_bits_equal_plain_integers(seed: int, position: int, purpose: Purpose, indexes: list[int]) -> None:
    found = bits(seed_tensor([seed]), torch.tensor([position]), purpose, torch.tensor(indexes))
    assert [value & MASK for value in found[0].tolist()] == [plain_bits(seed, position, purpose, i) for i in indexes]


@given(st.integers(0, MASK), st.integers(0, 2**31))
def test_uniforms_are_the_high_63_bits(seed: int, position: int) -> None:
    found = uniforms(seed_tensor([seed]), torch.tensor([position]), Purpose.SAMPLE, torch.arange(4))[0]
    high = np.array([plain_bits(seed, position, Purpose.SAMPLE, i) >> 1 for i in range(4)], dtype=np.int64)
    expected = (high.astype(np.float32) + np.float32(0.5)) * np.float32(2.0**-63)
    assert found.tolist() == np.minimum(expected, np.float32(1 - 2**-24)).tolist()


def test_every_value_is_strictly_inside_even_at_the_extremes() -> None:
    drawn = uniforms(seed_tensor(range(64)), torch.arange(64), Purpose.SAMPLE, torch.arange(20_000))
    assert float(drawn.min()) > 0.0
    assert float(drawn.max()) < 1.0
    for extreme in (0, 2**63 - 1):  # the conversion on its own, at the ends of its range
        value = torch.tensor([extreme]).to(torch.float32).add_(0.5).mul_(2.0**-63).clamp_(max=1 - 2**-24)
        assert 0.0 < float(value) < 1.0
    assert torch.isfinite(
        gumbel_noise(seed_tensor([5]), torch.tensor([1]), Purpose.SAMPLE, torch.arange(200_000))
    ).all()


def test_rows_do_not_depend_on_the_batch_or_on_which_indexes_are_asked_for() -> None:
    seeds, positions = seed_tensor([7, 2**64 - 1, 0]), torch.tensor([3, 0, 9])
    whole = bits(seeds, positions, Purpose.SAMPLE, torch.arange(100))
    for row in range(3):
        alone = bits(seeds[row : row + 1], positions[row : row + 1], Purpose.SAMPLE, torch.tensor([50, 3]))
        assert alone[0].tolist() == whole[row, [50, 3]].tolist()
    picked = bits(seeds, positions, Purpose.SAMPLE, torch.tensor([[1, 2], [3, 4], [5, 6]]))
    assert picked.tolist() == [whole[row, [2 * row + 1, 2 * row + 2]].tolist() for row in range(3)]


def chi_square(counts: np.ndarray) -> float:
    expected = counts.sum() / counts.size
    return float(((counts - expected) ** 2 / expected).sum())


def many(axis: str, size: int, purpose: Purpose = Purpose.SAMPLE) -> np.ndarray:
    """Uniforms that differ in one argument only."""
    fixed = torch.full((size,), 11, dtype=torch.int64)
    running = torch.arange(size)
    if axis == "seed":
        return uniforms(running, fixed, purpose, torch.tensor([3])).flatten().numpy()
    if axis == "position":
        return uniforms(fixed, running, purpose, torch.tensor([3])).flatten().numpy()
    return uniforms(fixed[:1], fixed[:1], purpose, running).flatten().numpy()


def test_uniform_and_without_memory_along_every_argument() -> None:
    """Neighbours in 16 x 16 cells: 255 degrees of freedom, so 255 +- 22.6; five standard deviations are allowed."""
    for axis in ("seed", "position", "index"):
        drawn = many(axis, 200_000)
        cells = np.histogram2d(drawn[:-1], drawn[1:], bins=16, range=[[0, 1], [0, 1]])[0]
        assert abs(chi_square(cells) - 255) < 5 * 22.6, axis


def test_purposes_and_arguments_are_independent_of_each_other() -> None:
    drawn = {purpose: many("position", 100_000, purpose) for purpose in Purpose}
    for other in (Purpose.DRAFT, Purpose.VERDICT):
        cells = np.histogram2d(drawn[Purpose.SAMPLE], drawn[other], bins=16, range=[[0, 1], [0, 1]])[0]
        assert abs(chi_square(cells) - 255) < 5 * 22.6, other
    diagonal = bits(torch.arange(100), torch.arange(100).flip(0), Purpose.SAMPLE, torch.arange(100))
    assert (
        len(set(diagonal.flatten().tolist())) == 100 * 100
    )  # seed + position does not collide where the sum is the same


def test_gumbel_noise_has_the_gumbel_distribution() -> None:
    noise = gumbel_noise(seed_tensor([3]), torch.tensor([8]), Purpose.SAMPLE, torch.arange(200_000))[0].double()
    assert abs(float(noise.mean()) - 0.5772157) < 4 * 1.2825 / 200_000**0.5
    probabilities = torch.exp(-torch.exp(-noise))  # its distribution function makes it uniform
    counts = torch.histc(probabilities, bins=64, min=0, max=1).numpy()
    assert abs(chi_square(counts) - 63) < 5 * (2 * 63) ** 0.5
