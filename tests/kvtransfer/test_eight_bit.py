"""Eight bits on the wire: bounds of the error by hand, against torch's own e4m3, and nothing lost without a trace."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from kvtransfer import eight_bit
from kvtransfer.eight_bit import Coding, EightBit
from model.block_codes import kernels
from model.kernels.library import load_fastest
from model.kv_layout import KVLayout

LAYOUT = KVLayout("m", "float32", num_layers=1, num_kv_heads=3, head_dim=5, block_size=4)
DTYPES = ("float32", "bfloat16", "float16")
# Of a value, by rounding to the cache's dtype when it is unpacked: half of its last bit.
ROUNDING = {"float32": 2.0**-22, "bfloat16": 2.0**-8, "float16": 2.0**-11}


@pytest.fixture(params=["kernels", "torch"], autouse=True)
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Of packing and unpacking."""
    if request.param == "torch":
        monkeypatch.setattr(eight_bit, "kernels", lambda: None)
    else:
        load_fastest()  # raises where there is no compiler
    return str(request.param)


def random_layer(layout: KVLayout, num_blocks: int) -> Tensor:
    """Each head's keys and values of a block in another range, from 2^-12 to 2^12."""
    shape = (num_blocks, layout.num_kv_heads, layout.num_vectors, layout.block_size, layout.head_dim)
    generator = torch.Generator().manual_seed(0)
    sizes = torch.exp2(torch.randint(-12, 12, shape[:3], generator=generator))[..., None, None]
    return (torch.randn(shape, generator=generator) * sizes).to(getattr(torch, layout.dtype))


def there_and_back(codec: EightBit, layer: Tensor, block_ids: list[int], num_tokens: int | None = None) -> Tensor:
    """What arrives of these blocks, in order: sent into other blocks, in another order, of a cache of sevens."""
    num_tokens = len(block_ids) * codec.layout.block_size if num_tokens is None else num_tokens
    packed = torch.full((len(block_ids), codec.packed_bytes), 255, dtype=torch.uint8)
    codec.pack(layer, block_ids, num_tokens, packed)
    target = torch.full((len(block_ids) + 3, *layer.shape[1:]), 7.0, dtype=layer.dtype)
    there = list(range(len(block_ids) + 1, 1, -1))
    codec.unpack(packed, target, there)
    untouched = [block for block in range(len(target)) if block not in there]
    assert torch.equal(target[untouched], torch.full_like(target[untouched], 7.0))
    in_a_run = torch.full_like(target, 7.0)
    codec.unpack(packed, in_a_run, there[::-1])
    assert torch.equal(in_a_run[there[::-1]].nan_to_num(9.0), target[there].nan_to_num(9.0))
    assert torch.equal(in_a_run[untouched], target[untouched])
    return target[there]


@pytest.mark.parametrize("dtype", DTYPES)
def test_int8_is_off_by_half_a_step_at_most(dtype: str) -> None:
    layout = replace(LAYOUT, dtype=dtype)
    layer = random_layer(layout, 20)
    ids = [3, 0, 19, 7, 8, 9]
    arrived, sent = there_and_back(EightBit(layout, Coding.INT8), layer, ids).double(), layer[ids].double()
    step = sent.abs().amax((-2, -1), keepdim=True) / 127
    bound = step / 2 * (1 + 2.0**-20) + (sent.abs() + step) * ROUNDING[dtype]
    assert bool(((arrived - sent).abs() <= bound).all())
    assert bool(((arrived - sent).abs() > step / 4).any())  # steps are not finer than that


@pytest.mark.parametrize("dtype", DTYPES)
def test_fp8_is_off_by_a_sixteenth_at_most(dtype: str) -> None:
    layout = replace(LAYOUT, dtype=dtype)
    layer = random_layer(layout, 20)
    ids = [3, 0, 19, 7, 8, 9]
    arrived, sent = there_and_back(EightBit(layout, Coding.FP8), layer, ids).double(), layer[ids].double()
    scale = sent.abs().amax((-2, -1), keepdim=True) / 448
    half_subnormal_step = scale * 2.0**-10
    bound = torch.maximum(sent.abs() * 2.0**-4, half_subnormal_step) * (1 + 2.0**-20)
    bound += (sent.abs() * 1.0625 + scale) * ROUNDING[dtype]
    assert bool(((arrived - sent).abs() <= bound).all())
    assert bool(((arrived - sent).abs() > sent.abs() * 2.0**-6).any())


def layer_of(values: list[float], layout: KVLayout) -> Tensor:
    """One block, these values the keys of the last head, everything else 0."""
    layer = torch.zeros((1, layout.num_kv_heads, 2, layout.block_size, layout.head_dim))
    layer[0, -1, 0] = torch.tensor(values).view(layout.block_size, layout.head_dim)
    return layer.to(getattr(torch, layout.dtype))


TINY = replace(LAYOUT, num_kv_heads=2, head_dim=4, block_size=2)


def test_packed_bytes_by_hand() -> None:
    """Four scales, then 32 codes: those of the third group are 127/127 of a value each."""
    codec = EightBit(TINY, Coding.INT8)
    assert codec.packed_bytes == 48
    layer = layer_of([127.0, -127.0, 1.0, 1.4, 1.5, -63.6, 0.0, 0.4], TINY)
    packed = torch.full((1, 48), 255, dtype=torch.uint8)
    codec.pack(layer, [0], 2, packed)
    scales, codes = packed[0, :16].view(torch.float32), packed[0, 16:].view(torch.int8)
    assert scales.tolist() == [torch.finfo(torch.float32).tiny] * 2 + [1.0] + [torch.finfo(torch.float32).tiny]
    assert codes.tolist() == [0] * 16 + [127, -127, 1, 1, 2, -64, 0, 0] + [0] * 8
    latent = replace(TINY, num_kv_heads=1, latent=True)  # one scale and eight codes, then zeros
    packed = torch.full((1, 16), 255, dtype=torch.uint8)
    EightBit(latent, Coding.INT8).pack(torch.full((1, 1, 1, 2, 4), -2.0), [0], 2, packed)
    assert packed[0, :4].view(torch.float32).item() == pytest.approx(2 / 127)
    assert packed[0, 4:].view(torch.int8).tolist() == [-127] * 8 + [0] * 4


def test_every_e4m3_number_arrives_as_torch_reads_it() -> None:
    layout = replace(LAYOUT, num_kv_heads=1, head_dim=127, block_size=2)
    numbers = torch.tensor([*range(127), *range(128, 255)], dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    layer = layer_of(numbers.tolist(), layout)  # 448 is the largest: the scale is 1
    assert torch.equal(there_and_back(EightBit(layout, Coding.FP8), layer, [0]), layer)


def test_half_the_bytes_of_bfloat16() -> None:
    layout = KVLayout("m", "bfloat16", num_layers=30, num_kv_heads=3, head_dim=64, block_size=16)
    assert layout.layer_block_bytes == 12_288
    assert EightBit(layout, Coding.INT8).packed_bytes == 3 * 2 * (4 + 16 * 64) + 8  # to a multiple of 16
    latent = KVLayout("m", "bfloat16", num_layers=61, num_kv_heads=1, head_dim=576, latent=True)
    assert EightBit(latent, Coding.FP8).packed_bytes == 16 * 576 + 16


@pytest.mark.parametrize("coding", Coding)
def test_zeros_and_the_smallest_numbers(coding: Coding) -> None:
    codec, smallest = EightBit(TINY, coding), torch.finfo(torch.float32).tiny
    assert torch.equal(there_and_back(codec, layer_of([0.0] * 8, TINY), [0]), layer_of([0.0] * 8, TINY))
    values = [smallest, -smallest, smallest / 4, 2.0**-149, 0.0, smallest * 2, smallest * 3, smallest * 100]
    arrived = there_and_back(codec, layer_of(values, TINY), [0])[0, -1, 0].flatten()
    for value, got in zip(values, arrived.tolist(), strict=True):
        assert abs(got - value) <= max(smallest / 2, abs(value) / 16)


@pytest.mark.parametrize("coding", Coding)
@pytest.mark.parametrize("dtype", DTYPES)
def test_largest_numbers_stay_finite(coding: Coding, dtype: str) -> None:
    layout = replace(TINY, dtype=dtype)
    largest = torch.finfo(getattr(torch, dtype)).max
    arrived = there_and_back(EightBit(layout, coding), layer_of([largest, -largest] + [1.0] * 6, layout), [0])
    assert arrived[0, -1, 0].flatten()[:2].tolist() == pytest.approx([largest, -largest], rel=2.0**-21)


@pytest.mark.parametrize("coding", Coding)
@pytest.mark.parametrize("wrong", [torch.nan, torch.inf, -torch.inf])
def test_what_is_not_finite_makes_its_head_nan_and_no_other(coding: Coding, wrong: float) -> None:
    layer = random_layer(TINY, 2)
    layer[1, 0, 1, 1, 2] = wrong
    arrived = there_and_back(EightBit(TINY, coding), layer, [0, 1])
    is_nan = torch.zeros_like(arrived, dtype=torch.bool)
    is_nan[1, 0, 1] = True
    assert torch.equal(arrived.isnan(), is_nan)


@pytest.mark.parametrize("coding", Coding)
def test_slots_behind_the_last_token_count_for_nothing(coding: Coding) -> None:
    codec, layer = EightBit(LAYOUT, coding), random_layer(LAYOUT, 3)
    clean = layer.clone()
    clean[2, :, :, 1:] = 0
    layer[2, :, :, 1:] = torch.tensor([torch.nan, 1e30, torch.inf]).view(3, 1)
    before = layer.clone()
    arrived = there_and_back(codec, layer, [0, 2], num_tokens=5)
    assert torch.equal(arrived, there_and_back(codec, clean, [0, 2]))
    assert torch.equal(layer.nan_to_num(), before.nan_to_num())  # it is read only


def test_what_does_not_fit_is_refused() -> None:
    codec, layer = EightBit(TINY, Coding.INT8), random_layer(TINY, 4)
    packed = torch.zeros((2, codec.packed_bytes), dtype=torch.uint8)
    for num_tokens in (2, 5):
        with pytest.raises(ValueError, match=f"2 blocks for {num_tokens} tokens of 2 a block"):
            codec.pack(layer, [0, 1], num_tokens, packed)
    for wrong in (packed[:1], packed.float(), packed.repeat(1, 2)[:, ::2], packed[:, 1:]):
        with pytest.raises(ValueError, match=r"it must be \[2, 48\] uint8, contiguous"):
            codec.pack(layer, [0, 1], 4, wrong)
        with pytest.raises(ValueError, match="it must be"):
            codec.unpack(wrong, layer, [0, 1])
    for other in (layer.half(), layer[:, :1]):
        with pytest.raises(ValueError, match=r"its blocks must be \[2, 2, 2, 4\]"):
            codec.pack(other, [0, 1], 4, packed)


@pytest.mark.parametrize("coding", Coding)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("head_dim", "block_size"), [(5, 4), (64, 16), (127, 31)])
def test_both_ways_give_the_same_bytes(
    coding: Coding, dtype: str, head_dim: int, block_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Numbers of every size, zeros and what is not finite among them; of the last block but one token."""
    layout = replace(LAYOUT, dtype=dtype, head_dim=head_dim, block_size=block_size)
    codec, layer = EightBit(layout, coding), random_layer(layout, 12)
    layer[3, 1, 0, 2] *= torch.exp2(torch.arange(head_dim) / -4.0).to(layer.dtype)
    layer[4, 0, 1, 0, 3], layer[5, 2, 1, 1, 1], layer[6, 0, 0] = torch.nan, torch.inf, 0
    ids = [3, 9, 4, 5, 6, 7, 11]
    found = []
    for ways in (kernels, lambda: None):
        monkeypatch.setattr(eight_bit, "kernels", ways)
        packed = torch.full((7, codec.packed_bytes), 255, dtype=torch.uint8)
        codec.pack(layer, ids, 6 * block_size + 1, packed)
        there = torch.full_like(layer, 7.0)
        codec.unpack(packed, there, ids)
        found.append((packed, there))
    (packed, there), (other_packed, other_there) = found
    assert torch.equal(there.isnan(), other_there.isnan()) and int(there.isnan().sum()) == 2 * head_dim * block_size
    assert torch.equal(there.nan_to_num(9.0), other_there.nan_to_num(9.0))
    is_finite = [index for index, block in enumerate(ids) if block not in (4, 5)]  # what NaN is coded as, nobody reads
    assert torch.equal(packed[is_finite], other_packed[is_finite])


def test_blocks_that_are_not_there_are_refused() -> None:
    codec, layer = EightBit(TINY, Coding.INT8), random_layer(TINY, 4)
    packed = torch.zeros((1, codec.packed_bytes), dtype=torch.uint8)
    with pytest.raises(ValueError, match="blocks 4 to 4 of 4"):
        codec.pack(layer, [4], 2, packed)
    with pytest.raises(ValueError, match="blocks 4 to 4 of 4"):
        codec.unpack(packed, layer, [4])
