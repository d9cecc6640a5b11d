"""What backends choose between: kernels by the number of tokens, and weights of eight bits for what is only guessed."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from model.backend import TorchBackend
from model.huge_pages import Arena
from model.kernel_backend import SIXTEEN_BIT_TOKENS, KernelBackend, MixedBackend
from model.moe import Expert

COUNTS = [1, SIXTEEN_BIT_TOKENS - 1, SIXTEEN_BIT_TOKENS, 60, 300]
NEEDS_BF16 = pytest.mark.skipif(not torch.ops.mkldnn._is_mkldnn_bf16_supported(), reason="no bfloat16 in this CPU")


@pytest.fixture(params=[KernelBackend, pytest.param(MixedBackend, marks=NEEDS_BF16)])
def backend(request: pytest.FixtureRequest) -> KernelBackend:
    made = request.param(torch.bfloat16)
    assert isinstance(made, KernelBackend)
    return made


def random(*shape: int, seed: int, scale: float = 1.0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * scale


def relative_error(found: Tensor, expected: Tensor) -> float:
    return float((found.double() - expected).abs().max() / expected.abs().max())


@pytest.mark.parametrize("num_tokens", COUNTS)
def test_eight_bits_are_near_enough_to_guess(backend: KernelBackend, num_tokens: int) -> None:
    weights = [random(rows, 96, seed=rows).bfloat16() for rows in (130, 65)]
    linear = backend.for_drafts().linear(weights, [None, None])
    x = random(num_tokens, 96, seed=1)
    expected = x.double() @ torch.cat(weights).double().T
    assert relative_error(linear(x), expected) < 0.02
    assert relative_error(linear(x, add_to=torch.ones(num_tokens, 195)), expected + 1) < 0.02


@pytest.mark.parametrize("num_tokens", COUNTS)
def test_feed_forward_of_eight_bits(backend: KernelBackend, num_tokens: int) -> None:
    gate, up, down = (random(130, 96, seed=2), random(130, 96, seed=3), random(96, 130, seed=4))
    expert = Expert(*(weight.bfloat16() / 8 for weight in (gate, up, down)))
    x = random(num_tokens, 96, seed=5)
    wide = [weight.double() for weight in (expert.gate, expert.up, expert.down)]
    expected = 1 + (F.silu(x.double() @ wide[0].T) * (x.double() @ wide[1].T)) @ wide[2].T
    y = torch.ones(num_tokens, 96)
    backend.for_drafts().feed_forward(expert)(x, add_to=y)
    assert relative_error(y, expected) < 0.02


def test_few_tokens_read_eight_bits_and_several_the_weights_themselves(backend: KernelBackend) -> None:
    """Told apart by a row in which eight bits, scaled to its largest weight, leave nothing of the others."""
    weight = torch.full((1, 64), 1e-3).bfloat16()
    weight[0, 0] = 1.0
    linear = backend.for_drafts().linear([weight], [None])
    x = torch.ones(SIXTEEN_BIT_TOKENS, 64)
    x[:, 0] = 0.0
    assert linear(x[:-1]).abs().max() == 0.0
    assert linear(x).min() > 0.05


def test_others_guess_as_they_compute() -> None:
    """In float32 a drafter is what its tests compare with."""
    plain = TorchBackend(torch.device("cpu"), torch.float32)
    assert plain.for_drafts() is plain
    kernels = KernelBackend(torch.float32)
    assert kernels.for_drafts() is kernels


def test_memory_of_copies_is_counted(backend: KernelBackend) -> None:
    weight = torch.zeros(8, 100, dtype=torch.bfloat16)
    assert (backend.placed_bytes(weight), backend.for_drafts().placed_bytes(weight)) == (1600, 1600 + 8 * 104)


def test_a_weight_is_copied_once(backend: KernelBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys' and values' are read with queries' and without; another weight at an address of before is another."""
    drafts, copied, num_copies = backend.for_drafts(), Arena.copied, 0

    def counted(arena: Arena, tensor: Tensor) -> Tensor:
        nonlocal num_copies
        num_copies += 1
        return copied(arena, tensor)

    monkeypatch.setattr(Arena, "copied", counted)
    first, second = random(8, 64, seed=1).bfloat16(), random(8, 64, seed=2).bfloat16()
    both, one = drafts.linear([first, second], [None, None]), drafts.linear([second], [None])
    x = random(1, 64, seed=3)
    assert torch.equal(both(x)[:, 8:], one(x))
    assert num_copies == 2
    for seed in range(20):
        weight = random(8, 64, seed=seed).bfloat16()
        assert relative_error(drafts.linear([weight], [None])(x), x.double() @ weight.double().T) < 0.05
