from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from model.block_pool import BlockPool, NoFreeBlocks, hash_blocks
from model.sampling_params import SamplingParams
from model.sequence import FinishReason, Sequence

BLOCK = 4
PARAMS = SamplingParams(max_tokens=8)


def sequence(token_ids: list[int], num_prompt_tokens: int | None = None, sampling: SamplingParams = PARAMS) -> Sequence:
    num_prompt_tokens = len(token_ids) if num_prompt_tokens is None else num_prompt_tokens
    return Sequence("s", list(token_ids), num_prompt_tokens, sampling, BLOCK)


def computed(pool: BlockPool, token_ids: list[int]) -> Sequence:
    """A sequence whose KV is all there and published."""
    one = sequence(token_ids)
    one.take_prefix(pool)
    one.grow(pool, one.num_tokens)
    one.num_computed_tokens = one.num_tokens
    one.publish(pool)
    return one


def test_counts() -> None:
    one = sequence([1, 2, 3, 4, 5], num_prompt_tokens=3)
    one.num_computed_tokens = 4
    assert (one.num_tokens, one.num_output_tokens, one.num_uncomputed_tokens) == (5, 2, 1)
    assert [one.num_blocks_for(n) for n in (0, 1, 4, 5, 9)] == [0, 1, 1, 2, 3]


def test_ends_by_length_or_stop_token_and_not_before_min_tokens() -> None:
    stops = SamplingParams(max_tokens=4, min_tokens=2, stop_token_ids=(9,))
    one = sequence([1], sampling=stops)
    one.append(9)
    assert one.finish_reason is None
    one.append(9)
    assert one.finish_reason is FinishReason.STOP
    two = sequence([1], sampling=stops)
    for token_id in (5, 5, 5):
        two.append(token_id)
        assert two.finish_reason is None
    two.append(5)
    assert two.finish_reason is FinishReason.LENGTH
    three = sequence([1], sampling=SamplingParams(max_tokens=1, stop_token_ids=(9,)))
    three.append(9)
    assert three.finish_reason is FinishReason.STOP  # both at once: it is a stop


def test_a_resumed_sequence_ends_where_the_first_would_have() -> None:
    one = sequence([1, 7, 7], num_prompt_tokens=1, sampling=SamplingParams(max_tokens=3))
    one.append(7)
    assert one.finish_reason is FinishReason.LENGTH


def test_takes_the_cached_prefix_and_leaves_the_last_token() -> None:
    pool = BlockPool(8)
    first = computed(pool, list(range(8)))
    again = sequence(list(range(8)))
    again.take_prefix(pool)
    assert again.block_ids == first.block_ids[:1]  # the second block has the last token, whose logits are wanted
    assert again.num_cached_tokens == again.num_computed_tokens == 4
    longer = sequence([*range(8), 8])
    longer.take_prefix(pool)
    assert longer.block_ids == first.block_ids
    assert longer.num_cached_tokens == 8
    other = sequence([*range(4), 99, *range(5, 20)])
    other.take_prefix(pool)
    assert other.num_cached_tokens == 4


def test_growing_fails_whole() -> None:
    pool = BlockPool(2)
    one = sequence(list(range(12)))
    one.grow(pool, 5)
    assert len(one.block_ids) == 2
    one.grow(pool, 8)
    assert len(one.block_ids) == 2
    with pytest.raises(NoFreeBlocks):
        one.grow(pool, 9)
    assert len(one.block_ids) == 2
    one.drop_blocks(pool)
    assert pool.num_free == 2


def test_publishes_full_computed_blocks_as_they_come() -> None:
    pool = BlockPool(8)
    one = sequence(list(range(10)))
    one.grow(pool, 10)
    hashes = hash_blocks(list(range(12)), BLOCK)
    for num_computed, num_findable in ((3, 0), (4, 1), (7, 1), (10, 2)):
        one.num_computed_tokens = num_computed
        one.publish(pool)
        found = pool.match_prefix(hashes)
        assert found == one.block_ids[:num_findable]
        pool.release(found)
    one.append(10)
    one.append(11)
    one.num_computed_tokens = 12  # tokens that were sampled fill the third block
    one.publish(pool)
    assert pool.match_prefix(hashes) == one.block_ids


def test_dropped_and_computed_again_it_goes_on_from_its_own_blocks() -> None:
    pool = BlockPool(8)
    one = computed(pool, list(range(10)))
    one.append(50)
    held = list(one.block_ids)
    one.drop_blocks(pool)
    assert pool.num_used == 0
    assert (one.num_computed_tokens, one.num_cached_tokens, one.block_ids) == (0, 0, [])
    assert one.token_ids == [*range(10), 50]
    one.take_prefix(pool)
    assert one.block_ids == held[:2]
    assert one.num_cached_tokens == 8
    one.grow(pool, 11)
    one.num_computed_tokens = 11
    one.publish(pool)
    pool.check_integrity()


def test_adopted_blocks_are_not_published_twice() -> None:
    pool = BlockPool(4)
    blocks = pool.allocate(3)
    hashes = hash_blocks(list(range(9)), BLOCK)
    for block_id, block_hash in zip(blocks[:2], hashes, strict=True):
        pool.publish(block_id, block_hash)
    one = sequence([*range(9), 77], num_prompt_tokens=9)
    one.adopt(blocks, 9)
    assert one.num_cached_tokens == 0
    one.token_ids += [1, 2]
    one.num_computed_tokens = 12
    one.publish(pool)
    assert pool.match_prefix(one.block_hashes) == blocks
    pool.release(blocks)
    one.drop_blocks(pool)
    assert pool.num_used == 0
    pool.check_integrity()


@given(st.lists(st.tuples(st.integers(0, 3), st.lists(st.integers(0, 1), min_size=1, max_size=20)), max_size=30))
def test_any_mix_of_sequences_returns_all_blocks_and_never_shares_wrong_content(
    steps: list[tuple[int, list[int]]],
) -> None:
    """The content of each block is kept beside the pool; whatever a prefix finds must be these very tokens."""
    pool, content = BlockPool(6), dict[int, tuple[int, ...]]()
    running: list[Sequence] = []
    for kind, token_ids in steps:
        if kind == 0 and running:
            running.pop(0).drop_blocks(pool)
            continue
        one = sequence(token_ids)
        one.take_prefix(pool)
        for index, block_id in enumerate(one.block_ids):
            assert content[block_id] == tuple(token_ids[: BLOCK * (index + 1)])
        try:
            one.grow(pool, one.num_tokens)
        except NoFreeBlocks:
            one.drop_blocks(pool)
            continue
        for index in range(one.num_computed_tokens // BLOCK, one.num_tokens // BLOCK):
            content[one.block_ids[index]] = tuple(token_ids[: BLOCK * (index + 1)])
        one.num_computed_tokens = one.num_tokens
        one.publish(pool)
        running.append(one)
        pool.check_integrity()
    for one in running:
        one.drop_blocks(pool)
    assert pool.num_free == 6
    pool.check_integrity()
