"""Every byte of every block is copied once and to where it belongs, in as few regions as the block ids allow."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtransfer.geometry import CacheSpan, regions
from model.kv_layout import KVLayout
from tests.kvtransfer.cache import LAYOUT, Cache


@st.composite
def two_sides(draw: st.DrawFn) -> tuple[CacheSpan, CacheSpan, int, list[int], list[int]]:
    layout = KVLayout(
        model_digest="m",
        dtype=draw(st.sampled_from(["float32", "bfloat16"])),
        num_layers=draw(st.integers(1, 4)),
        num_kv_heads=draw(st.integers(1, 3)),
        head_dim=draw(st.integers(1, 4)),
        block_size=draw(st.integers(1, 4)),
    )
    local = CacheSpan(layout, draw(st.integers(0, 10_000)), draw(st.integers(1, 12)))
    remote = CacheSpan(layout, draw(st.integers(0, 10_000)), draw(st.integers(1, 12)))
    count = draw(st.integers(0, min(local.num_blocks, remote.num_blocks)))
    here = draw(st.permutations(range(local.num_blocks)))[:count]
    there = draw(st.permutations(range(remote.num_blocks)))[:count]
    if draw(st.booleans()):  # runs, as pools hand them out
        here, there = sorted(here), sorted(there)
    return local, remote, draw(st.integers(0, layout.num_layers - 1)), here, there


@given(two_sides())
def test_every_byte_once_and_in_its_place(sides: tuple[CacheSpan, CacheSpan, int, list[int], list[int]]) -> None:
    local, remote, layer, here, there = sides
    size = local.layout.layer_block_bytes
    expected = {}  # remote byte address to local byte address, block by block
    for block_here, block_there in zip(here, there, strict=True):
        for byte in range(size):
            source = local.base_address + (layer * local.num_blocks + block_here) * size + byte
            expected[remote.base_address + (layer * remote.num_blocks + block_there) * size + byte] = source
    copied: dict[int, int] = {}
    for region in regions(local, remote, layer, here, there):
        for byte in range(region.num_bytes):
            assert region.remote_address + byte not in copied
            copied[region.remote_address + byte] = region.local_address + byte
    assert copied == expected


def test_runs_on_both_sides_become_one_region() -> None:
    local, remote = CacheSpan(LAYOUT, 0, 100), CacheSpan(LAYOUT, 0, 50)
    sizes = [region.num_bytes for region in regions(local, remote, 2, [4, 5, 6, 7, 9], [20, 21, 30, 31, 32])]
    assert sizes == [2 * LAYOUT.layer_block_bytes, 2 * LAYOUT.layer_block_bytes, LAYOUT.layer_block_bytes]


def test_addresses_are_those_of_the_array() -> None:
    cache = Cache()
    span = CacheSpan(LAYOUT, cache.address, cache.array.shape[1])
    assert span.address(2, 5) == cache.array[2, 5].ctypes.data
    assert span.num_bytes == cache.array.nbytes


@pytest.mark.parametrize(("layer", "block_id"), [(-1, 0), (3, 0), (0, -1), (0, 10)])
def test_outside_the_cache_is_refused(layer: int, block_id: int) -> None:
    with pytest.raises(ValueError, match="is not one of"):
        CacheSpan(LAYOUT, 0, 10).address(layer, block_id)


def test_pieces_of_different_size_are_refused() -> None:
    span, smaller = CacheSpan(LAYOUT, 0, 10), CacheSpan(replace(LAYOUT, block_size=2), 0, 10)
    with pytest.raises(ValueError, match="pieces of 256 bytes do not fit those of 128"):
        regions(span, smaller, 0, [1], [1])


def test_sides_of_different_length_are_refused() -> None:
    span = CacheSpan(LAYOUT, 0, 10)
    with pytest.raises(ValueError, match="2 local blocks for 1 remote ones"):
        regions(span, span, 0, [1, 2], [1])
