"""Prefill policy as decisions: order, chunks, tickets, and which blocks are sent when."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtransfer.outgoing import Outgoing
from model.block_pool import BlockPool
from model.runner import NonFiniteLogits, SampledToken, StepOutput
from model.sampling_params import SamplingParams
from model.sequence import Sequence
from prefill.scheduler import PrefillPolicy, PrefillScheduler, PrefillSequence

BLOCK_SIZE = 4
NUM_LAYERS = 2


@dataclass
class Recorder:
    """Stands where an Outgoing stands and notes (layer, absolute block index, local block) of every write."""

    held: list[int] = field(default_factory=list)
    writes: list[tuple[int, int, int]] = field(default_factory=list)
    failed: Exception | None = None

    def hold(self, block_ids: list[int]) -> None:
        self.held = list(block_ids)

    def write(self, layer: int, first_block: int, local_block_ids: list[int]) -> None:
        self.writes += [(layer, first_block + index, block_id) for index, block_id in enumerate(local_block_ids)]

    def write_all_layers(self, first_block: int, local_block_ids: list[int]) -> None:
        for layer in range(NUM_LAYERS):
            self.write(layer, first_block, local_block_ids)


class Setup:
    def __init__(self, num_blocks: int = 64, policy: PrefillPolicy | None = None) -> None:
        self.now = 0.0
        self.pool = BlockPool(num_blocks)
        self.asked: list[PrefillSequence] = []
        self.done: dict[str, SampledToken | Exception] = {}
        self.scheduler = PrefillScheduler(
            self.pool, ask_for_ticket=self.asked.append, policy=policy, clock=lambda: self.now
        )

    def add(self, name: str, prompt: list[int], *, decode: str | None = None) -> PrefillSequence:
        sequence = Sequence(name, list(prompt), len(prompt), SamplingParams(8), BLOCK_SIZE)
        prefilling = PrefillSequence(sequence, decode, lambda result: self.done.__setitem__(name, result), self.now)
        self.scheduler.add(prefilling)
        return prefilling

    def grant(self, prefilling: PrefillSequence) -> Recorder:
        recorder = Recorder()
        self.scheduler.grant(prefilling, cast(Outgoing, recorder))
        return recorder

    def step(self, num_tokens: int) -> list[tuple[int, int]]:
        """Runs one step; returns (start, tokens) of each chunk."""
        scheduled = self.scheduler.schedule(num_tokens)
        for layer in range(NUM_LAYERS):
            for part in scheduled:
                if part.layer_done is not None:
                    part.layer_done(layer)
        sampled = [SampledToken(7) if part.chunk.sampling is not None else None for part in scheduled]
        self.scheduler.complete(sampled, StepOutput(()))
        return [(part.chunk.start, len(part.chunk.token_ids)) for part in scheduled]


def test_prompt_is_cut_by_the_budget_and_samples_at_its_end() -> None:
    setup = Setup()
    prefilling = setup.add("a", list(range(10)))
    assert [setup.step(4) for _ in range(4)] == [[(0, 4)], [(4, 4)], [(8, 2)], []]
    assert setup.done == {"a": SampledToken(7)}
    assert setup.pool.num_used == 3
    setup.scheduler.remove(prefilling)
    assert setup.pool.num_used == 0


def test_shortest_remaining_goes_first_and_budget_flows_on() -> None:
    setup = Setup()
    setup.add("long", list(range(20)))
    setup.add("short", list(range(100, 105)))
    assert setup.step(8) == [(0, 5), (0, 3)]
    assert setup.done.keys() == {"short"}


def test_a_prompt_that_has_waited_overtakes_shorter_ones() -> None:
    setup = Setup(policy=PrefillPolicy(ageing_tokens_per_s=10))
    setup.add("long", list(range(20)))
    setup.now = 2.0
    setup.add("short", list(range(100, 105)))
    assert setup.step(8) == [(0, 8)]


def test_nothing_starts_without_its_ticket_but_others_go_on() -> None:
    setup = Setup()
    waiting = setup.add("waiting", [1, 2], decode="d")
    setup.add("free", [3, 4, 5])
    assert setup.asked == [waiting]
    assert setup.step(8) == [(0, 3)]
    setup.grant(waiting)
    assert setup.step(8) == [(0, 2)]


def test_tickets_are_asked_for_only_as_far_as_the_lookahead() -> None:
    setup = Setup(policy=PrefillPolicy(lookahead_tokens=10))
    names = [setup.add(str(index), list(range(8)), decode="d") for index in range(4)]
    assert setup.asked == names[:2]
    setup.grant(names[0])
    setup.step(8)
    setup.step(8)
    assert setup.asked == names[:3]


def test_a_full_decode_worker_keeps_back_only_what_goes_to_it() -> None:
    setup = Setup(policy=PrefillPolicy(lookahead_tokens=10))
    full = [setup.add(f"full{index}", list(range(8)), decode="full") for index in range(3)]
    other = setup.add("other", list(range(8)), decode="other")
    assert setup.asked == [*full[:2], other]


def test_a_sequence_holds_its_blocks_when_it_asks_and_none_while_it_is_refused() -> None:
    """Two workers that prefill for each other must not wait for each other's blocks while they hold some."""
    setup = Setup(num_blocks=4)
    refused = setup.add("refused", list(range(12)), decode="d")
    other = setup.add("other", list(range(20, 32)), decode="e")
    assert (setup.asked, setup.pool.num_used) == ([refused], 3)
    setup.scheduler.refuse(refused)
    assert setup.pool.num_used == 0
    assert setup.step(16) == []
    assert (setup.asked, setup.pool.num_used) == ([refused, other], 3)
    setup.scheduler.remove(other)
    setup.scheduler.ask_again(refused)
    assert setup.step(16) == []
    assert setup.asked == [refused, other, refused]
    setup.grant(refused)
    assert setup.step(16) == [(0, 12)]


def test_what_cannot_be_handed_over_any_more_is_not_computed() -> None:
    setup = Setup()
    lost = setup.add("lost", list(range(12)), decode="d")
    recorder = setup.grant(lost)
    assert setup.step(4) == [(0, 4)]
    recorder.failed = ConnectionError("the decode worker is gone")
    assert setup.step(4) == []
    assert setup.done == {"lost": recorder.failed}
    setup.scheduler.remove(lost)
    assert setup.pool.num_used == 0


def test_nobody_asks_for_a_ticket_behind_one_that_was_refused() -> None:
    """Or short prompts would take every block that a long one waits for."""
    setup = Setup(policy=PrefillPolicy(ageing_tokens_per_s=1000))
    large = setup.add("large", list(range(30)), decode="d")
    setup.scheduler.refuse(large)
    setup.now = 1.0
    small = setup.add("small", [1, 2], decode="d")
    elsewhere = setup.add("elsewhere", [1, 2], decode="e")
    assert setup.asked == [large, elsewhere]
    setup.grant(large)
    setup.step(64)
    assert setup.asked == [large, elsewhere, small]


def test_nobody_asks_for_a_ticket_behind_one_that_is_asking_again() -> None:
    setup = Setup(policy=PrefillPolicy(ageing_tokens_per_s=1000))
    large = setup.add("large", list(range(30)), decode="d")
    setup.scheduler.refuse(large)
    setup.now = 1.0
    setup.scheduler.ask_again(large)
    small = setup.add("small", [1, 2], decode="d")
    assert setup.asked == [large, large]
    setup.grant(large)
    setup.step(64)
    assert setup.asked == [large, large, small]


def test_one_that_was_refused_asks_again_while_a_step_runs() -> None:
    """A step may take longer than the decode worker keeps its place."""
    setup = Setup()
    setup.add("long", list(range(40)))
    refused = setup.add("refused", list(range(50, 60)), decode="d")
    setup.scheduler.refuse(refused)
    setup.scheduler.schedule(4)
    setup.scheduler.ask_again(refused)
    assert setup.asked == [refused, refused]
    assert refused.holds_blocks


def test_prompts_that_have_started_go_on_when_a_shorter_one_finds_no_blocks() -> None:
    """They hold the blocks that it waits for."""
    setup = Setup(num_blocks=7, policy=PrefillPolicy(ageing_tokens_per_s=0))
    large = setup.add("large", list(range(20)))
    assert setup.step(4) == [(0, 4)]
    setup.add("shorter", list(range(50, 62)))
    assert setup.step(64) == [(4, 16)]
    setup.scheduler.remove(large)
    assert setup.step(64) == [(0, 12)]


def test_a_prompt_that_finds_no_blocks_is_not_overtaken() -> None:
    setup = Setup(num_blocks=4)
    first = setup.add("first", list(range(9)))
    setup.step(16)
    setup.add("large", list(range(50, 59)))
    setup.now = 1.0
    setup.add("small", [1])
    assert setup.step(16) == []
    setup.scheduler.remove(first)
    assert setup.step(16) == [(0, 9), (0, 1)]


def test_full_blocks_are_sent_when_filled_and_the_partial_one_at_the_end() -> None:
    setup = Setup()
    prefilling = setup.add("a", list(range(10)), decode="d")
    recorder = setup.grant(prefilling)

    setup.step(6)
    assert sorted({index for _, index, _ in recorder.writes}) == [0]
    setup.step(6)
    assert sorted({index for _, index, _ in recorder.writes}) == [0, 1, 2]
    assert recorder.held == prefilling.sequence.block_ids


def test_cached_blocks_are_sent_at_the_start() -> None:
    setup = Setup()
    first = setup.add("a", list(range(10)))
    setup.step(16)
    setup.scheduler.remove(first)
    again = setup.add("b", list(range(10)), decode="d")
    recorder = setup.grant(again)
    scheduled = setup.scheduler.schedule(16)
    assert again.sequence.num_cached_tokens == 8
    assert len(scheduled[0].chunk.token_ids) == 2
    assert [(layer, index) for layer, index, _ in recorder.writes] == [(0, 0), (0, 1), (1, 0), (1, 1)]


def test_sequence_removed_during_a_step_keeps_its_blocks_until_the_step_is_over() -> None:
    setup = Setup()
    prefilling = setup.add("a", list(range(10)))
    setup.scheduler.schedule(4)
    setup.scheduler.remove(prefilling)
    assert setup.pool.num_used == 3
    setup.scheduler.complete([None], StepOutput(()))
    assert setup.pool.num_used == 0


def test_failed_step_fails_its_sequences_only() -> None:
    setup = Setup()
    failing = setup.add("failing", list(range(4)))
    setup.add("waiting", list(range(100, 108)))
    setup.scheduler.schedule(4)
    error = RuntimeError("no")
    setup.scheduler.fail(error)
    setup.scheduler.remove(failing)
    assert setup.done == {"failing": error}
    setup.step(8)
    assert setup.done["waiting"] == SampledToken(7)


def test_sequence_without_finite_logits_fails_alone_and_its_blocks_are_not_found_again() -> None:
    setup = Setup()
    failing, other = setup.add("failing", list(range(9))), setup.add("other", list(range(100, 110)))
    assert setup.step(8) == [(0, 8)]
    error = NonFiniteLogits("the logits are not finite")
    setup.scheduler.schedule(11)
    setup.scheduler.complete([error, SampledToken(7)], StepOutput(()))
    assert setup.done == {"failing": error, "other": SampledToken(7)}
    setup.scheduler.remove(failing)
    setup.scheduler.remove(other)
    assert setup.pool.num_used == 0
    assert setup.pool.match_prefix(failing.sequence.block_hashes) == []
    assert len(setup.pool.match_prefix(other.sequence.block_hashes)) == 2
    setup.pool.check_integrity()


@settings(max_examples=200, deadline=None)
@given(
    prompts=st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=20), min_size=1, max_size=6),
    budget=st.integers(1, 12),
)
def test_every_block_of_every_layer_is_sent_exactly_once(prompts: list[list[int]], budget: int) -> None:
    setup = Setup()
    recorders = []
    for number, prompt in enumerate(prompts):
        prefilling = setup.add(str(number), prompt, decode="d")
        recorders.append((prefilling, setup.grant(prefilling)))
        setup.step(budget)
    for _ in range(200):
        if not setup.step(budget):
            break
    assert setup.done.keys() == {str(number) for number in range(len(prompts))}
    for prefilling, recorder in recorders:
        expected = [
            (layer, index, block_id)
            for layer in range(NUM_LAYERS)
            for index, block_id in enumerate(prefilling.sequence.block_ids)
        ]
        assert sorted(recorder.writes) == expected
        setup.scheduler.remove(prefilling)
    assert setup.pool.num_used == 0
    setup.pool.check_integrity()


def test_large_prompt_never_starves() -> None:
    setup = Setup(policy=PrefillPolicy(ageing_tokens_per_s=100))
    setup.add("large", list(range(40)))
    for number in range(50):
        setup.now += 0.1
        small = setup.add(f"small{number}", [number, number, number, number])
        setup.step(4)
        if "large" in setup.done:
            return
        if f"small{number}" in setup.done:
            setup.scheduler.remove(small)
    pytest.fail("the large prompt was starved")
