"""KV in eight bits from one cache in device memory into another, over NIXL. Not run on a GPU yet: see conftest."""

from __future__ import annotations

import time

import pytest
import torch

from kvtransfer.agent import Pieces, WriteState
from kvtransfer.eight_bit import Coding, EightBit
from kvtransfer.geometry import CacheSpan
from kvtransfer.nixl_agent import NixlAgent
from kvtransfer.packing import Packing
from kvtransfer.unpacking import Unpacking
from model.kv_cache import PagedKVCache
from model.kv_layout import KVLayout
from tests.kvtransfer.progress import making_progress
from tests.kvtransfer.wire import arriving

pytestmark = pytest.mark.gpu

LAYOUT = KVLayout(model_digest="tiny", dtype="bfloat16", num_layers=2, num_kv_heads=2, head_dim=64, block_size=16)
NUM_BLOCKS = 32
DEVICE_ID = 0
DEVICE = torch.device("cuda", DEVICE_ID)


@pytest.mark.parametrize("coding", ["int8", "fp8"])
def test_what_arrives_is_what_plain_coding_gives(coding: str) -> None:
    """Beside work that is queued on the stream of the model. The checksums of both sides agree."""
    source, target = (PagedKVCache(LAYOUT, NUM_BLOCKS, DEVICE) for _ in range(2))
    source.memory.copy_(torch.randn(source.memory.shape))
    torch.cuda.synchronize()
    packing = Packing(EightBit(LAYOUT, Coding(coding)), source.memory, num_slots=2)
    unpacking = Unpacking(LAYOUT, target.memory)
    sender = NixlAgent("packing", source.address, source.memory.nbytes, DEVICE_ID)
    receiver = NixlAgent("unpacking", target.address, target.memory.nbytes, DEVICE_ID)
    sender.register(packing.address, packing.num_bytes)
    sender.connect("unpacking", receiver.metadata(), DEVICE_ID)
    remote = CacheSpan(LAYOUT, target.address, NUM_BLOCKS)
    here, there = [3, 30, 7, 8], [9, 8, 20, 1]
    sums = packing.start(2)
    for layer in range(LAYOUT.num_layers):
        pieces = packing.pack(layer, layer, here, 3 * 16 + 5, sums, [(0, 0), (3, 1)])
        remote_pieces = remote.indices(range(layer, layer + 1), there)
        write = sender.write("unpacking", Pieces(packing.grid, packing.remote_grid(remote), pieces, remote_pieces))
        deadline = time.monotonic() + 10.0
        with making_progress(receiver):
            while write.poll() is WriteState.MOVING and time.monotonic() < deadline:
                time.sleep(0.001)
        assert write.poll() is WriteState.DONE
    found = unpacking.sums(coding).start(2)
    found.add(range(LAYOUT.num_layers), [9, 1], [0, 1])
    assert found.values() == sums.values()
    unpacking.unpack(coding, there)
    expected = arriving(source.memory[:, here].cpu(), 3 * 16 + 5, coding)
    assert torch.equal(target.memory[:, there].cpu(), expected)
    untouched = sorted(set(range(NUM_BLOCKS)) - set(there))
    assert not target.memory[:, untouched].any()
    sender.close()
    receiver.close()
