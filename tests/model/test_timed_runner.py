from __future__ import annotations

import ctypes
import json
import time
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from model.kv_layout import KVLayout
from model.runner import Chunk, Logprobs, SampledToken
from model.sampling_params import SamplingParams
from model.timed_runner import StepTiming, TimedRunner, expected_tokens

LAYOUT = KVLayout("timed", "bfloat16", num_layers=3, num_kv_heads=2, head_dim=8, block_size=4)
AT_ONCE = StepTiming(scale=0.0)
VOCAB = 1000
GREEDY = SamplingParams(max_tokens=99, temperature=0.0)


def runner(timing: StepTiming = AT_ONCE, num_blocks: int = 16) -> TimedRunner:
    return TimedRunner(LAYOUT, num_blocks, timing, vocab_size=VOCAB)


def chunk(tokens: Sequence[int], start: int, end: int, blocks: Sequence[int], params: SamplingParams = GREEDY) -> Chunk:
    last = end == len(tokens)
    return Chunk(tokens[start:end], start, blocks, params if last else None, tokens if last else (), len(tokens))


def generate(
    one: TimedRunner, prompt: Sequence[int], blocks: Sequence[int], num_tokens: int, params: SamplingParams = GREEDY
) -> list[int]:
    """Prefill in one chunk, then decode."""
    tokens, start = list(prompt), 0
    while len(tokens) < len(prompt) + num_tokens:
        (sampled,) = one.execute([chunk(tokens, start, len(tokens), blocks, params)]).sampled
        assert isinstance(sampled, SampledToken)
        start = len(tokens)
        tokens.append(sampled.token_id)
    return tokens[len(prompt) :]


def memory(one: TimedRunner) -> memoryview:
    """The cache as a transfer sees it: an address and the layout."""
    cache = (ctypes.c_char * (one.num_blocks * LAYOUT.block_bytes)).from_address(one.cache_address)
    return memoryview(cache).cast("B")


def region(one: TimedRunner, layer: int, block_id: int) -> slice:
    start = (layer * one.num_blocks + block_id) * LAYOUT.layer_block_bytes
    return slice(start, start + LAYOUT.layer_block_bytes)


@settings(max_examples=30, deadline=None)
@given(
    prompt=st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=30),
    blocks=st.permutations(range(16)),
    cuts=st.lists(st.integers(1, 29), max_size=4),
)
def test_tokens_do_not_depend_on_blocks_or_chunks(prompt: list[int], blocks: list[int], cuts: list[int]) -> None:
    one = runner()
    expected = expected_tokens(prompt, 6, LAYOUT, vocab_size=VOCAB)
    assert generate(one, prompt, blocks, 6) == expected
    edges = [0, *sorted({cut for cut in cuts if cut < len(prompt)}), len(prompt)]
    for start, end in pairwise(edges):
        (sampled,) = one.execute([chunk(prompt, start, end, blocks[::-1])]).sampled
    assert isinstance(sampled, SampledToken)
    assert sampled.token_id == expected[0]


def test_a_batch_is_what_each_would_be_alone() -> None:
    prompts = [[1, 2, 3], list(range(20)), [9]]
    blocks = [[0], [3, 1, 2, 8, 9, 10], [7]]
    batch = [chunk(prompt, 0, len(prompt), ids) for prompt, ids in zip(prompts, blocks, strict=True)]
    batch.insert(1, chunk(list(range(50)), 0, 8, [4, 5]))
    sampled = runner().execute(batch).sampled
    assert sampled[1] is None
    alone = [expected_tokens(prompt, 1, LAYOUT, vocab_size=VOCAB)[0] for prompt in prompts]
    assert [token.token_id for token in sampled if isinstance(token, SampledToken)] == alone


def test_different_prompts_continue_differently() -> None:
    answers = {
        tuple(expected_tokens([*prompt, 5], 2, LAYOUT, vocab_size=VOCAB)) for prompt in ([1], [2], [1, 2], [2, 1])
    }
    assert len(answers) == 4


def test_a_handed_over_cache_goes_on_exactly() -> None:
    """Copies blocks to other places of another cache, as a transfer does, by address and layout."""
    prompt = list(range(100, 114))
    sender, receiver = runner(num_blocks=6), runner(num_blocks=16)
    (first,) = sender.execute([chunk(prompt, 0, 14, [5, 0, 3, 1])]).sampled
    assert isinstance(first, SampledToken)
    for source, target in zip([5, 0, 3, 1], [10, 2, 15, 4], strict=True):
        for layer in range(LAYOUT.num_layers):
            memory(receiver)[region(receiver, layer, target)] = memory(sender)[region(sender, layer, source)]
    tokens = [*prompt, first.token_id]
    for length in range(14, 20):
        (sampled,) = receiver.execute([chunk(tokens, length, length + 1, [10, 2, 15, 4, 6, 7])]).sampled
        assert isinstance(sampled, SampledToken)
        tokens.append(sampled.token_id)
    assert tokens[14:] == expected_tokens(prompt, 7, LAYOUT, vocab_size=VOCAB)


@pytest.mark.parametrize("layer", range(LAYOUT.num_layers))
@pytest.mark.parametrize("index", range(4))
def test_any_part_of_a_block_that_did_not_arrive_shows_in_the_next_token(layer: int, index: int) -> None:
    prompt, blocks = list(range(14)), [3, 1, 0, 2]
    one = runner()
    expected = expected_tokens(prompt, 2, LAYOUT, vocab_size=VOCAB)
    assert generate(one, prompt, blocks, 1) == expected[:1]
    memory(one)[region(one, layer, blocks[index])] = bytes(LAYOUT.layer_block_bytes)
    (sampled,) = one.execute([chunk([*prompt, expected[0]], 14, 15, blocks)]).sampled
    assert isinstance(sampled, SampledToken)
    assert sampled.token_id != expected[1]


def test_every_word_a_token_wrote_is_read_again_within_some_steps() -> None:
    """Overwrites each head, part and slot of one block on its own; head by head is how parallel workers transfer."""
    prompt, blocks = list(range(8)), list(range(16))
    num_steps = 1 + LAYOUT.block_size * LAYOUT.num_kv_heads * 2  # the first comes before the damage
    expected = expected_tokens(prompt, num_steps, LAYOUT, vocab_size=VOCAB)
    slot_bytes = LAYOUT.head_dim * 2
    for place in range(LAYOUT.num_kv_heads * 2 * LAYOUT.block_size):
        one = runner()
        generate(one, prompt, blocks, 1)
        start = region(one, 1, 0).start + place * slot_bytes
        memory(one)[start : start + slot_bytes] = bytes(slot_bytes)
        tokens = [*prompt, expected[0]]
        for length in range(8, 8 + num_steps - 1):
            (sampled,) = one.execute([chunk(tokens, length, length + 1, blocks)]).sampled
            assert isinstance(sampled, SampledToken)
            tokens.append(sampled.token_id)
        assert tokens[8:] != expected, f"place {place} was never read"


def test_wrong_content_before_a_chunk_spoils_everything_after_it() -> None:
    prompt = list(range(12))
    one = runner()
    one.execute([chunk(prompt, 0, 8, [0, 1])])
    memory(one)[region(one, 0, 1)] = bytes(LAYOUT.layer_block_bytes)
    one.execute([chunk(prompt, 8, 12, [0, 1, 2])])
    right = runner()
    right.execute([chunk(prompt, 0, 12, [0, 1, 2])])
    assert memory(one)[region(one, 0, 2)] != memory(right)[region(right, 0, 2)]
    assert memory(one)[region(one, 1, 2)] == memory(right)[region(right, 1, 2)]


def test_seeds_count_unless_greedy() -> None:
    sampled = SamplingParams(max_tokens=9, seed=77)
    expected = expected_tokens([1, 2], 4, LAYOUT, vocab_size=VOCAB, seed=77)
    assert generate(runner(), [1, 2], [0, 1], 4, sampled) == expected
    assert generate(runner(), [1, 2], [0, 1], 4, replace(GREEDY, seed=77)) != expected
    assert generate(runner(), [1, 2], [0, 1], 4, replace(GREEDY, seed=77)) == generate(runner(), [1, 2], [0, 1], 4)


def test_end_tokens_are_never_sampled_and_logprobs_are_of_certainty() -> None:
    layout = replace(LAYOUT, num_layers=1)
    one = TimedRunner(layout, 64, AT_ONCE, vocab_size=4, never_sampled=(0, 2))
    params = replace(GREEDY, num_logprobs=2)
    found = generate(one, [1], list(range(64)), 60, params)
    assert set(found) == {1, 3}
    assert found == expected_tokens([1], 60, layout, vocab_size=4, never_sampled=(0, 2))
    (sampled,) = one.execute([chunk([1], 0, 1, [0], params)]).sampled
    assert isinstance(sampled, SampledToken)
    assert sampled.logprobs == Logprobs(0.0, ((sampled.token_id, 0.0),))


def test_layers_come_one_after_another_over_the_time_of_the_step() -> None:
    one = runner(StepTiming(decode_base_s=0.06, decode_sequence_s=0.0, decode_context_token_s=0.0))
    told: list[tuple[int, float, bytes]] = []
    start_s = time.perf_counter()

    def layer_done(layer: int) -> None:
        told.append((layer, time.perf_counter() - start_s, bytes(memory(one)[region(one, layer, 0)])))

    output = one.execute([chunk([5], 0, 1, [0])], layer_done)
    assert [layer for layer, _, _ in told] == [0, 1, 2]
    for layer, at_s, content in told:
        assert at_s >= 0.02 * (layer + 1)
        assert any(content), "the layer is not in the cache when it is said to be"
    assert 0.06 <= output.compute_s < 1.0


def test_time_of_a_step() -> None:
    timing = StepTiming(
        prefill_base_s=1.0,
        prefill_token_s=0.1,
        prefill_pair_s=0.001,
        decode_base_s=10.0,
        decode_sequence_s=2.0,
        decode_context_token_s=0.5,
    )
    tokens = list(range(20))
    prefill = chunk(tokens, 10, 20, range(5))
    decode = [chunk(tokens[:4], 3, 4, [0]), chunk(tokens[:7], 6, 7, [0, 1])]
    assert timing.step_s([prefill]) == pytest.approx(1.0 + 10 * 0.1 + 10 * 20 * 0.001)
    assert timing.step_s(decode) == pytest.approx(10.0 + 2 * 2.0 + 11 * 0.5)
    assert timing.step_s([prefill, *decode]) == pytest.approx(1.0 + 1.0 + 0.2 + 4.0 + 5.5)
    assert replace(timing, scale=0.5).step_s([prefill]) == pytest.approx(1.1)


def test_timing_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "timing.json"
    path.write_text(json.dumps({"decode_base_s": 0.5, "scale": 2}))
    assert StepTiming.load(path) == StepTiming(decode_base_s=0.5, scale=2)
    path.write_text(json.dumps({"decode_base": 0.5}))
    with pytest.raises(ValueError, match=r"has decode_base; a step timing has prefill_base_s, "):
        StepTiming.load(path)
    with pytest.raises(ValueError, match="scale is -1"):
        StepTiming(scale=-1)


def test_what_it_refuses() -> None:
    with pytest.raises(ValueError, match="a multiple of 8"):
        TimedRunner(replace(LAYOUT, head_dim=3), 1, AT_ONCE, vocab_size=VOCAB)
    with pytest.raises(ValueError, match="block ids -1 to 0 in a cache of 16"):
        runner().execute([chunk([1, 2, 3, 4, 5], 0, 5, [0, -1])])
