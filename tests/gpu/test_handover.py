"""NIXL moves blocks from one cache in device memory into another. Not run on a GPU yet: see conftest."""

from __future__ import annotations

import random
import time

import pytest
import torch

from kvtransfer.agent import WriteState
from kvtransfer.geometry import CacheSpan, pieces
from kvtransfer.nixl_agent import NixlAgent
from model.kv_cache import PagedKVCache
from model.kv_layout import KVLayout
from tests.kvtransfer.progress import making_progress

pytestmark = pytest.mark.gpu

LAYOUT = KVLayout(model_digest="tiny", dtype="bfloat16", num_layers=4, num_kv_heads=4, head_dim=64, block_size=16)
NUM_BLOCKS = 512
DEVICE_ID = 0
DEVICE = torch.device("cuda", DEVICE_ID)


def agent_of(name: str, cache: PagedKVCache) -> NixlAgent:
    return NixlAgent(name, cache.address, cache.memory.nbytes, DEVICE_ID)


def test_scattered_blocks_arrive_bit_exact_and_no_other_is_touched() -> None:
    source, target = (PagedKVCache(LAYOUT, NUM_BLOCKS, DEVICE) for _ in range(2))
    source.memory.copy_(torch.randn(source.memory.shape).to(DEVICE))
    rng = random.Random(3)
    here, there = (rng.sample(range(NUM_BLOCKS), 100) for _ in range(2))
    local, remote = (CacheSpan(LAYOUT, cache.address, NUM_BLOCKS) for cache in (source, target))
    wanted = pieces(local, remote, range(LAYOUT.num_layers), here, there)
    torch.cuda.synchronize()
    sender, receiver = agent_of("sender", source), agent_of("receiver", target)
    sender.connect("receiver", receiver.metadata(), DEVICE_ID)
    write = sender.write("receiver", wanted)
    deadline = time.monotonic() + 10.0
    with making_progress(receiver):
        while write.poll() is WriteState.MOVING and time.monotonic() < deadline:
            time.sleep(0.001)
    assert write.poll() is WriteState.DONE
    assert write.num_bytes == 100 * LAYOUT.block_bytes
    expected = torch.zeros_like(target.memory)
    expected[:, there] = source.memory[:, here]
    assert torch.equal(target.memory, expected)
    sender.close()
    receiver.close()
