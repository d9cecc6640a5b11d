"""KV of tokens between caches of other block sizes and other numbers of ranks: by hand, and copied for real."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from kvtransfer.agent import Region
from kvtransfer.geometry import CacheSpan, regions, token_regions
from kvtransfer.ranks import Rank
from model.kv_layout import KVLayout

ONE = KVLayout("m", "bfloat16", num_layers=2, num_kv_heads=1, head_dim=2, block_size=2)  # vectors of 4 bytes
TWO = replace(ONE, num_kv_heads=2)
LATENT = replace(ONE, latent=True)


def of_size(layout: KVLayout, block_size: int) -> KVLayout:
    return replace(layout, block_size=block_size)


@dataclass(frozen=True)
class Case:
    source: CacheSpan
    target: CacheSpan
    tokens: range
    source_ids: list[int]
    target_ids: list[int]
    expected: list[tuple[int, int, int]]
    layers: range = range(1)


CASES = {
    # A source block is 16 bytes (keys, then values, of 8), a target's 32 (of 16); layer 1 starts at 160 on both sides.
    "small blocks into large": Case(
        CacheSpan(ONE, 0, 10), CacheSpan(of_size(ONE, 4), 0, 5), range(8), [3, 4, 9, 0], [1, 2],
        [(208, 192, 8), (224, 200, 8), (216, 208, 8), (232, 216, 8),
         (304, 224, 8), (160, 232, 8), (312, 240, 8), (168, 248, 8)],
        range(1, 2),
    ),
    "seven tokens": Case(
        CacheSpan(ONE, 0, 10), CacheSpan(of_size(ONE, 4), 0, 5), range(7), [3, 4, 9, 0], [1, 2],
        [(208, 192, 8), (224, 200, 8), (216, 208, 8), (232, 216, 8),
         (304, 224, 8), (160, 232, 4), (312, 240, 8), (168, 248, 4)],
        range(1, 2),
    ),
    # Token 2 is in the middle of the source's block 1, and the first of the target's block 5.
    "large into small, from the middle of a block": Case(
        CacheSpan(of_size(ONE, 4), 1000, 5), CacheSpan(ONE, 5000, 8), range(2, 7), [1, 2], [5, 0, 7],
        [(1064, 5000, 8), (1080, 5008, 8), (1040, 5080, 8), (1056, 5088, 8), (1072, 5112, 4), (1088, 5120, 4)],
    ),
    "sixteen into thirty-two": Case(  # a run of both sides is 16 tokens of 4 bytes
        CacheSpan(of_size(ONE, 16), 0, 9), CacheSpan(of_size(ONE, 32), 0, 9), range(32), [1, 7], [2],
        [(128, 512, 64), (896, 576, 64), (192, 640, 64), (960, 704, 64)],
    ),
    # All heads of a block are 32 bytes, one head 16: no run of blocks is contiguous where both heads are.
    "one rank into the second of two": Case(
        CacheSpan(TWO, 0, 5), CacheSpan(TWO, 0, 5, Rank(1, 2)), range(4), [1, 2], [0, 1], [(48, 0, 16), (80, 16, 16)],
    ),
    "the first of two ranks into one": Case(
        CacheSpan(TWO, 0, 5, Rank(0, 2)), CacheSpan(TWO, 0, 5), range(4), [0, 1], [1, 2], [(0, 32, 16), (16, 64, 16)],
    ),
    "two ranks into two": Case(
        CacheSpan(TWO, 0, 5, Rank(1, 2)), CacheSpan(TWO, 0, 5, Rank(1, 2)), range(4), [0, 1], [1, 2], [(0, 16, 32)],
    ),
    "the first of two ranks into the second": Case(
        CacheSpan(TWO, 0, 5, Rank(0, 2)), CacheSpan(TWO, 0, 5, Rank(1, 2)), range(4), [0, 1], [1, 2], [],
    ),
    "a second replica is filled": Case(
        CacheSpan(TWO, 0, 5, Rank(0, 2)), CacheSpan(TWO, 0, 5, Rank(1, 4)), range(4), [0, 1], [1, 2], [(0, 16, 32)],
    ),
    "by one source replica": Case(
        CacheSpan(TWO, 0, 5, Rank(1, 4)), CacheSpan(TWO, 0, 5, Rank(0, 2)), range(4), [0, 1], [1, 2], [],
    ),
    # A token is 4 bytes and nothing lies between tokens, so blocks of any size with consecutive ids are one run.
    "latent": Case(
        CacheSpan(LATENT, 0, 9), CacheSpan(of_size(LATENT, 4), 0, 9), range(7), [3, 4, 5, 7], [1, 2],
        [(24, 16, 24), (56, 40, 4)],
    ),
    "latent, one replica into another": Case(
        CacheSpan(LATENT, 0, 9, Rank(1, 2)), CacheSpan(LATENT, 0, 9, Rank(3, 4)), range(4), [3, 4], [1, 2],
        [(24, 8, 16)],
    ),
    "equal blocks are copied whole": Case(
        CacheSpan(ONE, 0, 9), CacheSpan(ONE, 0, 9), range(3), [3, 4], [1, 2], [(48, 16, 32)],
    ),
    "layers that adjoin": Case(
        CacheSpan(ONE, 100, 3), CacheSpan(ONE, 900, 3), range(6), [0, 1, 2], [0, 1, 2], [(100, 900, 96)], range(2),
    ),
    "no tokens": Case(CacheSpan(ONE, 0, 9), CacheSpan(ONE, 0, 9), range(4, 4), [], [], []),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_regions_by_hand(name: str) -> None:
    case = CASES[name]
    found = token_regions(case.source, case.target, case.layers, case.tokens, case.source_ids, case.target_ids)
    assert found == [Region(*region) for region in case.expected]


@dataclass(frozen=True)
class Handed:
    layout: KVLayout
    num_source_ranks: int
    num_target_ranks: int
    source_block_size: int
    target_block_size: int
    layers: range
    tokens: range
    source_ids: list[int]
    target_ids: list[int]

    def spans(self, block_size: int, num_ranks: int, num_blocks: int, base: int) -> list[CacheSpan]:
        layout = of_size(self.layout, block_size)
        return [CacheSpan(layout, base + rank, num_blocks, Rank(rank, num_ranks)) for rank in range(num_ranks)]


HEADS_AND_RANKS = [
    (heads, ones, others)
    for heads, counts in {1: (1, 2, 3), 2: (1, 2, 4), 4: (1, 2, 4, 8), 6: (1, 2, 3)}.items()
    for ones in counts
    for others in counts
]
NUM_BLOCKS = (9, 11)
Elements = NDArray[Any]  # as wide as the cache's, and no arithmetic is done


@st.composite
def handed(draw: st.DrawFn) -> Handed:
    num_heads, num_source_ranks, num_target_ranks = draw(st.sampled_from(HEADS_AND_RANKS))
    layout = KVLayout(
        "m",
        draw(st.sampled_from(["float32", "bfloat16"])),
        draw(st.integers(1, 3)),
        num_heads,
        draw(st.integers(1, 3)),
        latent=num_heads == 1 and draw(st.booleans()),
    )
    size, factor = draw(st.integers(1, 4)), draw(st.integers(1, 4))
    sizes = draw(st.permutations([size, size * factor]))
    start = draw(st.integers(0, 2 * size * factor))
    tokens = range(start, start + draw(st.integers(0, 5 * size)))
    ids = []
    for block_size, num_blocks in zip(sizes, NUM_BLOCKS, strict=True):
        count = len({token // block_size for token in tokens})
        chosen = draw(st.permutations(range(num_blocks)))[:count]
        ids.append(sorted(chosen) if draw(st.booleans()) else chosen)
    first_layer = draw(st.integers(0, layout.num_layers))
    layers = range(first_layer, draw(st.integers(first_layer, layout.num_layers)))
    ranks = num_source_ranks, num_target_ranks
    return Handed(layout, *ranks, sizes[0], sizes[1], layers, tokens, ids[0], ids[1])


def array_of(span: CacheSpan) -> Elements:
    layout, count = span.layout, len(span.rank.heads(span.layout.num_kv_heads))
    shape = (layout.num_layers, span.num_blocks, count, layout.num_vectors, layout.block_size, layout.head_dim)
    array: Elements = np.full(shape, 0xFFFF, np.uint32 if layout.dtype == "float32" else np.uint16)
    assert array.nbytes == span.num_bytes
    return array


def fill(array: Elements, span: CacheSpan, tokens: range, block_ids: list[int], layers: range, heads: range) -> None:
    """Every number of these blocks tells its layer, head, vector, token and dimension."""
    layout, held = span.layout, span.rank.heads(span.layout.num_kv_heads)
    first_block = tokens.start // layout.block_size
    vectors, dims = np.arange(layout.num_vectors), np.arange(layout.head_dim)
    for layer, token, head in itertools.product(layers, tokens, heads):
        block, slot = block_ids[token // layout.block_size - first_block], token % layout.block_size
        values = ((layer * 8 + head) * 2 + vectors) * 128 + token
        array[layer, block, head - held.start, :, slot] = values[:, None] * 3 + dims


@given(handed())
def test_every_byte_is_where_it_belongs_once_and_no_other_is_touched(case: Handed) -> None:
    sources = case.spans(case.source_block_size, case.num_source_ranks, NUM_BLOCKS[0], 1000)
    targets = case.spans(case.target_block_size, case.num_target_ranks, NUM_BLOCKS[1], 500_000)
    copied = case.tokens
    if case.tokens and case.source_block_size == case.target_block_size:
        copied = range(copied.start, -(-copied.stop // case.source_block_size) * case.source_block_size)
    held = []
    for source in sources:
        held.append(array_of(source))
        if case.tokens:
            start = case.tokens.start // case.source_block_size * case.source_block_size
            everything = range(start, start + len(case.source_ids) * case.source_block_size)
            layers = range(case.layout.num_layers)
            fill(held[-1], source, everything, case.source_ids, layers, source.heads)
    for target in targets:
        expected, actual = array_of(target), array_of(target)
        if case.tokens:
            fill(expected, target, copied, case.target_ids, case.layers, target.heads)
        memory = actual.reshape(-1).view(np.uint8)
        writes = np.zeros(memory.shape, np.int64)
        for source, array in zip(sources, held, strict=True):
            found = token_regions(source, target, case.layers, case.tokens, case.source_ids, case.target_ids)
            for region in found:
                here, there = region.local_address - source.base_address, region.remote_address - target.base_address
                assert min(here, there) >= 0 < region.num_bytes
                memory[there : there + region.num_bytes] = array.reshape(-1).view(np.uint8)[here:][: region.num_bytes]
                writes[there : there + region.num_bytes] += 1
            ends = {(r.local_address + r.num_bytes, r.remote_address + r.num_bytes) for r in found}
            assert not ends & {(r.local_address, r.remote_address) for r in found}, "two could be one"
        assert np.array_equal(actual, expected)
        num_vectors = len(case.layers) * len(copied) * len(target.heads) * case.layout.num_vectors
        assert writes.max(initial=0) <= 1 and writes.sum() == num_vectors * case.layout.vector_bytes


@given(st.permutations(range(9)), st.permutations(range(9)), st.integers(1, 9))
def test_equal_layouts_give_the_regions_of_whole_blocks(here: list[int], there: list[int], count: int) -> None:
    span, other = CacheSpan(TWO, 100, 9), CacheSpan(TWO, 5000, 9)
    here, there = here[:count], there[:count]
    found = token_regions(span, other, range(1, 2), range(2 * count), here, there)
    by_target = sorted(zip(there, here, strict=True))
    assert found == regions(span, other, 1, [one for _, one in by_target], [one for one, _ in by_target])


BAD: dict[str, dict[str, Any]] = {
    "block_size is 3 at the target and 2 at the source: neither divides the other": {"target": of_size(ONE, 3)},
    "num_kv_heads is 2 at the target and 1 at the source": {"target": TWO},
    "the layers of drafter 'eagle:1' are at the target and not at the source": {
        "target": replace(ONE, drafter="eagle:1", num_layers=3)
    },
    "layer 2 is not one of 2": {"layers": range(1, 3)},
    "block 9 is not one of 9": {"source_ids": [0, 9]},
    "block -1 is not one of 9": {"target_ids": [-1, 2]},
    "3 blocks for tokens 0 to 4; 2 blocks of 2 hold them": {"source_ids": [0, 1, 2]},
    "1 blocks for tokens 0 to 4; 2 blocks of 2 hold them": {"target_ids": [0]},
    "are not consecutive positions": {"tokens": range(0, 4, 2)},
}


@pytest.mark.parametrize("message", BAD)
def test_what_does_not_go_together_is_refused(message: str) -> None:
    given: dict[str, Any] = {"target": ONE, "layers": range(2), "tokens": range(3), "source_ids": [0, 1]} | BAD[message]
    source, target = CacheSpan(ONE, 0, 9), CacheSpan(given["target"], 0, 9)
    ids = given["source_ids"], given.get("target_ids", [0, 1])
    with pytest.raises(ValueError, match=message):
        token_regions(source, target, given["layers"], given["tokens"], *ids)


def test_heads_that_cannot_be_shared_are_refused() -> None:
    with pytest.raises(ValueError, match="3 KV heads cannot be shared evenly by 2 ranks"):
        CacheSpan(replace(ONE, num_kv_heads=3), 0, 9, Rank(0, 2))
