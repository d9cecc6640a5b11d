"""Decode policy as decisions: who runs, who waits, who is preempted; and that every block comes back."""

from __future__ import annotations

from collections.abc import Sequence as Sequence_

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from decode.decoding import DecodeSequence
from decode.draft_planner import NoDrafts
from decode.outbox import Outbox
from decode.scheduler import DecodeScheduler
from model.block_pool import BlockPool
from model.runner import NonFiniteLogits, Outcome, SampledToken, StepOutput, VerifiedDraft
from model.sampling_params import SamplingParams
from model.sequence import FinishReason, Sequence
from protos.errors import FailedPrecondition, ResourceExhausted

BLOCK_SIZE = 4
NOTHING = StepOutput(())


def next_token(history: list[int]) -> int:
    """A model: the next token depends on every token before it."""
    return sum((index + 1) * token for index, token in enumerate(history)) % 97 + 3


def plain_loop(prompt: list[int], max_tokens: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(max_tokens):
        tokens.append(next_token(tokens))
    return tokens[len(prompt) :]


def local(prompt: list[int], max_tokens: int, name: str = "s") -> DecodeSequence:
    """A sequence whose KV is computed here."""
    return DecodeSequence(Sequence(name, list(prompt), len(prompt), SamplingParams(max_tokens), BLOCK_SIZE), Outbox())


def received(pool: BlockPool, prompt: list[int], max_tokens: int) -> DecodeSequence:
    """A sequence as the hand-over delivers it: KV of the prompt is there, the first token is sampled."""
    decoding = local(prompt, max_tokens)
    decoding.sequence.adopt(pool.allocate(-(-len(prompt) // BLOCK_SIZE)), len(prompt))
    decoding.sequence.append(next_token(prompt))
    return decoding


def step(scheduler: DecodeScheduler, num_tokens: int = 64) -> list[int]:
    """Runs one step of the model above; returns the number of tokens of each chunk."""
    scheduled = scheduler.schedule(num_tokens)
    sampled = [
        SampledToken(next_token(list(s.chunk.history))) if s.chunk.sampling is not None else None for s in scheduled
    ]
    scheduler.complete(sampled, NOTHING)
    return [len(s.chunk.token_ids) for s in scheduled]


def output(decoding: DecodeSequence) -> list[int]:
    return decoding.sequence.token_ids[decoding.sequence.num_prompt_tokens :]


def test_received_sequence_decodes_one_token_a_step_and_frees_its_blocks() -> None:
    pool = BlockPool(8)
    scheduler = DecodeScheduler(pool, max_running=4)
    decoding = received(pool, [5, 6, 7, 8, 9], 4)
    scheduler.add(decoding)
    assert [step(scheduler) for _ in range(4)] == [[1], [1], [1], []]
    assert output(decoding) == plain_loop([5, 6, 7, 8, 9], 4)
    assert decoding.sequence.finish_reason is FinishReason.LENGTH
    assert pool.num_used == 0
    assert decoding.num_computed_tokens == 0


def test_local_sequence_prefills_in_chunks_of_the_budget() -> None:
    pool = BlockPool(8)
    scheduler = DecodeScheduler(pool, max_running=4)
    decoding = local(list(range(10)), 2)
    scheduler.add(decoding)
    assert [step(scheduler, 4) for _ in range(4)] == [[4], [4], [2], [1]]
    assert output(decoding) == plain_loop(list(range(10)), 2)
    assert decoding.num_computed_tokens == 10


def test_running_sequences_get_their_token_before_a_prefill_gets_the_rest() -> None:
    pool = BlockPool(32)
    scheduler = DecodeScheduler(pool, max_running=4)
    scheduler.add(local(list(range(30)), 2))
    for _ in range(2):
        scheduler.add(received(pool, [1, 2, 3], 8))
    assert step(scheduler, 8) == [1, 1, 6]


def test_prefix_cache_saves_the_second_prompt() -> None:
    pool = BlockPool(16)
    scheduler = DecodeScheduler(pool, max_running=4)
    for _ in range(2):
        decoding = local(list(range(10)), 1)
        scheduler.add(decoding)
        while step(scheduler):
            pass
    assert (decoding.num_cached_tokens, decoding.num_computed_tokens) == (8, 2)


def test_max_running_bounds_the_batch() -> None:
    pool = BlockPool(32)
    scheduler = DecodeScheduler(pool, max_running=2)
    for _ in range(3):
        scheduler.add(received(pool, [1, 2, 3], 4))
    assert step(scheduler) == [1, 1]
    assert (scheduler.num_running, scheduler.num_waiting) == (2, 1)


def test_wanted_are_a_block_for_each_that_runs_and_all_blocks_of_those_that_wait_without_any() -> None:
    pool = BlockPool(8)
    scheduler = DecodeScheduler(pool, max_running=2)
    assert scheduler.num_wanted_blocks == 0
    for _ in range(2):
        scheduler.add(received(pool, [1, 2, 3], 9))
    step(scheduler)
    assert scheduler.num_wanted_blocks == 2
    scheduler.add(received(pool, [1, 2, 3], 9))  # waits, and holds its block
    assert scheduler.num_wanted_blocks == 2
    scheduler.add(local(list(range(8)), 9))  # nine tokens with the next one: three blocks
    assert scheduler.num_wanted_blocks == 5


def test_newest_is_preempted_and_resumes_exactly() -> None:
    pool = BlockPool(4)
    scheduler = DecodeScheduler(pool, max_running=4)
    old, new = received(pool, [1, 2, 3], 9), received(pool, [4, 5, 6, 7], 9)
    scheduler.add(old)
    scheduler.add(new)
    while step(scheduler):
        pool.check_integrity()
    assert (old.num_preemptions, new.num_preemptions) == (0, 1)
    assert new.num_recomputed_tokens > 0
    assert output(old) == plain_loop([1, 2, 3], 9)
    assert output(new) == plain_loop([4, 5, 6, 7], 9)
    assert pool.num_used == 0


def test_preempted_sequence_goes_on_before_those_that_wait() -> None:
    pool = BlockPool(4)
    scheduler = DecodeScheduler(pool, max_running=2)
    old, new, waiting = received(pool, [1, 2, 3], 9), received(pool, [4, 5, 6, 7], 9), local([8], 3)
    for decoding in (old, new, waiting):
        scheduler.add(decoding)
    finished: list[DecodeSequence] = []
    while step(scheduler):
        finished += [d for d in (old, new, waiting) if d.sequence.finish_reason is not None and d not in finished]
    assert new.num_preemptions == 1
    assert finished == [old, new, waiting]


def test_sequence_removed_during_a_step_keeps_its_blocks_until_the_step_is_over() -> None:
    pool = BlockPool(8)
    scheduler = DecodeScheduler(pool, max_running=4)
    decoding = received(pool, [1, 2, 3], 9)
    scheduler.add(decoding)
    scheduler.schedule(8)
    scheduler.remove(decoding)
    assert pool.num_used == 1
    scheduler.complete([SampledToken(1)], NOTHING)
    assert pool.num_used == 0
    assert step(scheduler) == []


async def test_failed_step_ends_its_sequences_only() -> None:
    pool = BlockPool(8)
    scheduler = DecodeScheduler(pool, max_running=1)
    failing, waiting = received(pool, [1, 2, 3], 9), received(pool, [4, 5], 2)
    scheduler.add(failing)
    scheduler.add(waiting)
    scheduler.schedule(8)
    scheduler.fail(RuntimeError("no"))
    with pytest.raises(RuntimeError, match="no"):
        async for _ in failing.outbox.batches():
            pass
    while step(scheduler):
        pass
    assert output(waiting) == plain_loop([4, 5], 2)
    assert pool.num_used == 0


async def test_sequence_without_finite_logits_ends_alone_and_its_blocks_are_not_found_again() -> None:
    pool = BlockPool(8)
    scheduler = DecodeScheduler(pool, max_running=2)
    failing, other = local([1, 2, 3, 4, 5, 6, 7, 8, 9], 5), received(pool, [4, 5, 6, 7, 8], 3)
    scheduler.add(failing)
    scheduler.add(other)
    assert step(scheduler, 9) == [1, 8]
    scheduler.schedule(8)
    scheduler.complete([NonFiniteLogits("nan"), SampledToken(next_token([4, 5, 6, 7, 8, *output(other)]))], NOTHING)
    with pytest.raises(NonFiniteLogits, match="nan"):
        async for _ in failing.outbox.batches():
            pass
    while step(scheduler):
        pass
    assert output(other) == plain_loop([4, 5, 6, 7, 8], 3)
    assert pool.num_used == 0
    assert pool.match_prefix(failing.sequence.block_hashes) == []
    pool.check_integrity()


@settings(max_examples=200, deadline=None)
@given(
    requests=st.lists(
        st.tuples(st.lists(st.integers(0, 9), min_size=1, max_size=14), st.integers(2, 12), st.booleans()),
        min_size=1,
        max_size=8,
    ),
    num_blocks=st.integers(7, 20),
    max_running=st.integers(1, 5),
    budget=st.integers(1, 16),
    removed=st.sets(st.integers(0, 7), max_size=3),
)
def test_any_mix_ends_with_the_plain_loops_tokens_and_no_block_held(
    requests: list[tuple[list[int], int, bool]], num_blocks: int, max_running: int, budget: int, removed: set[int]
) -> None:
    pool = BlockPool(num_blocks)
    scheduler = DecodeScheduler(pool, max_running=max_running)
    decodings = []
    for prompt, max_tokens, is_local in requests:
        fits = -(-len(prompt) // BLOCK_SIZE) <= pool.num_free
        decoding = local(prompt, max_tokens) if is_local or not fits else received(pool, prompt, max_tokens)
        decodings.append(decoding)
        scheduler.add(decoding)
        step(scheduler, budget)
    for index in removed & set(range(len(decodings))):
        scheduler.remove(decodings[index])
    for _ in range(5000):
        if not step(scheduler, budget):
            break
        pool.check_integrity()
    assert (scheduler.num_running, scheduler.num_waiting, pool.num_used) == (0, 0, 0)
    for index, (decoding, (prompt, max_tokens, _)) in enumerate(zip(decodings, requests, strict=True)):
        if index not in removed:
            assert output(decoding) == plain_loop(prompt, max_tokens)


def test_drafts_without_blocks_are_taken_back_from_the_planner() -> None:
    class Planner(NoDrafts):
        withdrawn: list[DecodeSequence] = []  # noqa: RUF012 - of this test alone

        def plan(self, decoding: Sequence_[DecodeSequence], num_tokens: int) -> list[int]:
            return [5] * len(decoding)

        def withdraw(self, decoding: DecodeSequence) -> None:
            self.withdrawn.append(decoding)

    pool, planner = BlockPool(3), Planner()
    scheduler = DecodeScheduler(pool, max_running=4, planner=planner)
    first, second = received(pool, [1, 2, 3], 9), received(pool, [4, 5, 6], 9)
    for decoding in (first, second):
        scheduler.add(decoding)
    chunks = [scheduled.chunk for scheduled in scheduler.schedule(64)]
    # Five drafts behind 4 tokens need blocks 2 and 3 of the first sequence; one is free, for nobody then.
    assert [chunk.num_draft_tokens for chunk in chunks] == [0, 0]
    assert planner.withdrawn == [first, second]
    scheduler.remove(first)
    scheduler.complete([SampledToken(1), SampledToken(1)], NOTHING)
    assert [s.chunk.num_draft_tokens for s in scheduler.schedule(64)] == [5]


def test_planner_forgets_what_left_during_its_step() -> None:
    """After it has learnt of the step, or it would know the sequence for ever."""

    class Planner(NoDrafts):
        known: set[DecodeSequence] = set()  # noqa: RUF012 - of this test alone

        def plan(self, decoding: Sequence_[DecodeSequence], num_tokens: int) -> list[int]:
            self.known |= set(decoding)
            return [1] * len(decoding)

        def learn(
            self, results: Sequence_[tuple[DecodeSequence, Outcome]], output: StepOutput, *, was_mixed: bool
        ) -> None:
            self.known |= {decoding for decoding, _ in results}

        def forget(self, decoding: DecodeSequence) -> None:
            self.known.discard(decoding)

    pool, planner = BlockPool(8), Planner()
    scheduler = DecodeScheduler(pool, max_running=4, planner=planner)
    leaving, staying = received(pool, [1, 2, 3], 9), received(pool, [4, 5, 6], 9)
    for decoding in (leaving, staying):
        scheduler.add(decoding)
    scheduler.schedule(64)
    scheduler.remove(leaving)
    scheduler.complete([SampledToken(1), SampledToken(1)], NOTHING)
    assert planner.known == {staying}


def test_prompts_that_are_computed_here_do_not_wait_for_drafts() -> None:
    class Planner(NoDrafts):
        def plan(self, decoding: Sequence_[DecodeSequence], num_tokens: int) -> list[int]:
            return [num_tokens - 1] if decoding else []  # all it may have

    pool = BlockPool(64)
    scheduler = DecodeScheduler(pool, max_running=4, planner=Planner())
    scheduler.add(received(pool, [1, 2, 3], 60))
    assert [len(s.chunk.token_ids) + s.chunk.num_draft_tokens for s in scheduler.schedule(21)] == [21]
    scheduler.complete([SampledToken(1)], NOTHING)
    scheduler.add(local(list(range(50)), 3))
    chunks = [s.chunk for s in scheduler.schedule(21)]
    assert [(len(chunk.token_ids), chunk.num_draft_tokens) for chunk in chunks] == [(1, 10), (10, 0)]
    scheduler.complete([SampledToken(1), None], NOTHING)
    chunks = [s.chunk for s in scheduler.schedule(2)]
    assert [(len(chunk.token_ids), chunk.num_draft_tokens) for chunk in chunks] == [(1, 0), (1, 0)]


def test_prompts_of_another_scheduler_have_half_of_what_a_step_has_left() -> None:
    class Planner(NoDrafts):
        def plan(self, decoding: Sequence_[DecodeSequence], num_tokens: int) -> list[int]:
            return [num_tokens - 1]

    prompts_wait, pool = [False, True, False], BlockPool(64)
    scheduler = DecodeScheduler(pool, max_running=4, planner=Planner(), prompts_wait=lambda: prompts_wait.pop(0))
    scheduler.add(received(pool, [1, 2, 3], 60))
    for num_drafts in (20, 10, 20):
        assert [s.chunk.num_draft_tokens for s in scheduler.schedule(21)] == [num_drafts]
        scheduler.complete([SampledToken(1)], NOTHING)


def test_nobody_is_preempted_for_blocks_of_drafts_that_fell() -> None:
    class Planner(NoDrafts):
        def plan(self, decoding: Sequence_[DecodeSequence], num_tokens: int) -> list[int]:
            return [5 if each is guessing else 0 for each in decoding]

    pool = BlockPool(3)
    guessing, plain = received(pool, [1, 2], 9), received(pool, [4, 5, 6], 9)
    scheduler = DecodeScheduler(pool, max_running=4, planner=Planner())
    for decoding in (guessing, plain):
        scheduler.add(decoding)
    assert [s.chunk.num_draft_tokens for s in scheduler.schedule(64)] == [5, 0]
    assert [len(d.sequence.block_ids) for d in (guessing, plain)] == [2, 1]
    fallen = VerifiedDraft((SampledToken(7),), 5)
    scheduler.complete([fallen, SampledToken(7)], NOTHING)  # the second one needs another block now
    assert [s.chunk.num_draft_tokens for s in scheduler.schedule(64)] == [0, 0]
    assert [len(d.sequence.block_ids) for d in (guessing, plain)] == [1, 2]
    assert guessing.num_preemptions == plain.num_preemptions == 0


async def test_halted_sequence_stops_one_token_before_its_block_is_full_and_can_go_on() -> None:
    pool = BlockPool(16)
    scheduler = DecodeScheduler(pool, max_running=4)
    leaving, other = received(pool, [5, 6, 7, 8, 9], 20), received(pool, [1, 2, 3], 20)
    for decoding in (leaving, other):
        scheduler.add(decoding)
    step(scheduler)
    halt = scheduler.halt(leaving)
    assert not halt.at.done()
    assert [step(scheduler) for _ in range(3)] == [[1, 1], [1], [1]]  # 6 tokens have KV, and stand at 7
    assert (halt.at.result(), halt.reached.done()) == (7, True)
    assert leaving.sequence.num_computed_tokens == 7
    assert (scheduler.num_running, leaving.holds_blocks) == (2, True)
    with pytest.raises(FailedPrecondition, match="being handed over"):
        scheduler.halt(leaving)
    scheduler.go_on(leaving)
    while step(scheduler):
        pool.check_integrity()
    assert output(leaving) == plain_loop([5, 6, 7, 8, 9], 20)
    assert output(other) == plain_loop([1, 2, 3], 20)
    assert pool.num_used == 0
    with pytest.raises(FailedPrecondition, match="has ended"):
        scheduler.halt(leaving)


async def test_halted_sequence_drafts_no_more() -> None:
    """What it drafts could carry it past the place where it is to stop."""

    class Planner(NoDrafts):
        def plan(self, decoding: Sequence_[DecodeSequence], num_tokens: int) -> list[int]:
            return [2] * len(decoding)

    pool = BlockPool(16)
    scheduler = DecodeScheduler(pool, max_running=4, planner=Planner())
    old, leaving = received(pool, [1, 2, 3], 12), received(pool, [5, 6, 7, 8, 9], 12)
    for decoding in (old, leaving):
        scheduler.add(decoding)
    with pytest.raises(ResourceExhausted, match="waits here"):
        scheduler.halt(leaving)  # it is not even admitted
    step(scheduler)
    halt = scheduler.halt(leaving)
    seen = []
    while not halt.reached.done():
        scheduled = scheduler.schedule(64)
        seen += [s.chunk.num_draft_tokens for s in scheduled if s.chunk.history is leaving.sequence.token_ids]
        scheduler.complete([SampledToken(next_token(list(s.chunk.history))) for s in scheduled], NOTHING)
    assert set(seen) == {0}
    assert leaving.sequence.num_computed_tokens == halt.at.result() == 7


@pytest.mark.parametrize("is_reached", [False, True])
async def test_halt_is_told_of_the_end_and_of_the_hand_over(is_reached: bool) -> None:
    pool = BlockPool(16)
    scheduler = DecodeScheduler(pool, max_running=4)
    for end in (scheduler.remove, scheduler.handed_over):
        decoding = received(pool, [5, 6, 7, 8, 9], 20)
        scheduler.add(decoding)
        step(scheduler)
        halt = scheduler.halt(decoding)
        for _ in range(2 * is_reached):
            step(scheduler)
        end(decoding)
        assert halt.reached.done()
        assert (halt.reached.exception() is None) == is_reached
        assert (decoding.sequence.finish_reason, scheduler.num_running, pool.num_used) == (None, 0, 0)
