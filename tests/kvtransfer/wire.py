"""Caches of numbers on both sides of a hand-over in eight bits, and what has to arrive, worked out number by number."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from kvtransfer.eight_bit import Coding, EightBit
from kvtransfer.integrity import Verification
from kvtransfer.loopback_agent import LoopbackAgent, LoopbackNetwork
from kvtransfer.outgoing import Outgoing
from kvtransfer.packing import Packing
from kvtransfer.receiver_options import ReceiverOptions
from kvtransfer.unpacking import Unpacking
from model.block_sums import BlockSums
from model.kv_layout import KVLayout
from tests.kvtransfer.cache import Cache, hashes_of
from tests.kvtransfer.workers import FAST_PEER, DecodeSide, PrefillSide, loopback

LAYOUT = KVLayout(model_digest="tiny", dtype="bfloat16", num_layers=3, num_kv_heads=2, head_dim=8, block_size=4)
BLOCK = LAYOUT.block_size
_TEST_S = 30.0
# Nothing here is about time, so that a busy machine has enough of it.
_OPTIONS = ReceiverOptions(lease_s=10.0, quarantine_grace_s=0.05, timer_s=0.01)
_PEER_OPTIONS = replace(FAST_PEER, silence_s=20.0, call_timeout_s=10.0)


def memory_of(cache: Cache, layout: KVLayout = LAYOUT) -> Tensor:
    """The cache [L, N, H, V, B, D], where it lies."""
    dtype: torch.dtype = getattr(torch, layout.dtype)
    num_layers, num_blocks, _ = cache.array.shape
    shape = (num_layers, num_blocks, layout.num_kv_heads, layout.num_vectors, layout.block_size, layout.head_dim)
    return torch.from_numpy(cache.array).view(dtype).view(shape)


def cache_of_numbers(layout: KVLayout = LAYOUT, num_blocks: int = 32) -> Cache:
    """Each head's keys and values of a block in another range."""
    cache = Cache(layout, num_blocks, fill=0)
    memory, generator = memory_of(cache, layout), torch.Generator().manual_seed(5)
    sizes = torch.exp2(torch.randint(-6, 6, memory.shape[:4], generator=generator))[..., None, None]
    memory.copy_(torch.randn(memory.shape, generator=generator) * sizes)
    return cache


def arriving(sent: Tensor, num_tokens: int, coding: str) -> Tensor:
    """What arrives of these blocks [L, blocks, H, V, B, D], of which so many tokens are a sequence's."""
    sent = sent.clone()
    block_size = sent.shape[-2]
    last = sent[:, num_tokens // block_size :]
    last[..., num_tokens % block_size :, :] = 0
    found = torch.empty_like(sent)
    for place in torch.cartesian_prod(*(torch.arange(size) for size in sent.shape[:4])).tolist():
        values = sent[tuple(place)].float()
        largest_code = {"int8": 127, "fp8": 448}[coding]
        scale = max(values.abs().max() / largest_code, torch.tensor(2.0**-126))
        codes = (values / scale).round() if coding == "int8" else (values / scale).to(torch.float8_e4m3fn).float()
        found[tuple(place)] = (codes * scale).to(sent.dtype)
    return found


@dataclass
class WirePair:
    """One prefill and one decode worker, whose caches are numbers."""

    prefill: PrefillSide
    decode: DecodeSide
    packing: Packing | None
    layout: KVLayout = LAYOUT

    async def reserve(self, attempt_id: str, num_tokens: int, first: int = 0) -> Outgoing:
        return await self.prefill.sender.reserve(
            self.decode.target,
            attempt_id=attempt_id,
            request_id="r",
            num_tokens=num_tokens,
            block_hashes=hashes_of(num_tokens, first, self.layout),
            timeout_s=10.0,
        )

    def here(self, block_ids: Sequence[int]) -> Tensor:
        return memory_of(self.prefill.cache, self.layout)[:, list(block_ids)]

    def there(self, block_ids: Sequence[int]) -> Tensor:
        return memory_of(self.decode.cache, self.layout)[:, list(block_ids)]

    @property
    def all_slots_are_free(self) -> bool:
        assert self.packing is not None
        return self.packing.staging.num_free == self.packing.grid.num_pieces // self.packing.blocks_per_slot


@asynccontextmanager
async def wire_pair(
    coding: str | None = "int8",
    *,
    layout: KVLayout = LAYOUT,
    takes_it: bool = True,
    checks: bool = True,
    num_slots: int = 8,
    blocks_per_slot: int = 4,
    agents: tuple[Any, Any] = (loopback, loopback),
    unpacking: type[Unpacking] = Unpacking,
    **agent_options: Any,
) -> AsyncIterator[WirePair]:
    """`agents` make that of the prefill side (with these options) and of the decode side."""
    network = LoopbackNetwork()
    decode_cache, prefill_cache = Cache(layout, fill=1), cache_of_numbers(layout)
    there = memory_of(decode_cache, layout)
    decode = DecodeSide(
        agents[1](network, "decode", decode_cache),
        decode_cache,
        layout=layout,
        options=_OPTIONS,
        verification=Verification(BlockSums(there), 1.0) if checks else None,
        unpacking=unpacking(layout, there) if takes_it else None,
    )
    await decode.start()
    agent: LoopbackAgent = agents[0](network, "prefill", prefill_cache, **agent_options)
    here = memory_of(prefill_cache, layout)
    packing = None
    if coding is not None:
        codec = EightBit(layout, Coding(coding))
        packing = Packing(codec, here, num_slots=num_slots, slot_bytes=blocks_per_slot * codec.packed_bytes)
        agent.register(packing.address, packing.num_bytes)
    prefill = PrefillSide(
        agent,
        prefill_cache,
        layout=layout,
        stall_s=10.0,
        sums=BlockSums(here),
        packing=packing,
        peer_options=_PEER_OPTIONS,
    )
    try:
        async with asyncio.timeout(_TEST_S):
            yield WirePair(prefill, decode, packing, layout)
    finally:
        await prefill.stop()
        await decode.stop()
