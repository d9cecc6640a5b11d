"""Eight bits for the wire on a GPU: what a CPU packs and unpacks. Not run on a GPU yet: see conftest."""

from __future__ import annotations

import pytest
import torch

from kvtransfer.eight_bit import Coding, EightBit
from model.kv_layout import KVLayout

pytestmark = pytest.mark.gpu

LAYOUT = KVLayout("m", "bfloat16", num_layers=1, num_kv_heads=3, head_dim=5, block_size=4)


@pytest.mark.parametrize("coding", Coding)
def test_a_gpu_packs_and_unpacks_as_a_cpu_does(coding: Coding) -> None:
    codec, ids, there = EightBit(LAYOUT, coding), [4, 2, 8], [0, 5, 3]
    layer = torch.randn((9, 3, 2, 4, 5), generator=torch.Generator().manual_seed(0)).bfloat16()
    packed = torch.zeros((3, codec.packed_bytes), dtype=torch.uint8)
    codec.pack(layer, ids, 11, packed)
    expected, target = torch.zeros_like(layer), torch.zeros_like(layer).cuda()
    codec.unpack(packed, expected, there)
    codec.unpack(packed.cuda(), target, there)
    assert torch.equal(target.cpu(), expected)
    on_device = torch.zeros_like(packed).cuda()
    codec.pack(layer.cuda(), ids, 11, on_device)
    codec.unpack(on_device, target, there)  # a scale may differ in its last bit, and a code by a step
    largest = layer.abs().amax((-2, -1), keepdim=True)[ids].float()
    steps = largest / 127 if coding is Coding.INT8 else largest / 8
    assert bool(((target.cpu()[there].float() - expected[there].float()).abs() <= 1.01 * steps).all())
