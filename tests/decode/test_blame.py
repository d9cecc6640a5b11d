"""A drafter that raises for some sequences of a batch: those alone draft no more, and no other is touched."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from decode.blame import mark_failing
from decode.decoding import DecodeSequence
from decode.draft import Draft
from decode.outbox import Outbox
from decode.scheduler import DecodeScheduler
from decode.speculative_runner import SpeculativeRunner
from model.block_pool import BlockPool, hash_blocks
from model.runner import Chunk, DraftingState
from model.sampling_params import SamplingParams
from model.sequence import Sequence as TokenSequence
from tests.decode.test_drafting_states import SAMPLINGS, blocks, draft, load, prefill
from tests.decode.test_speculative_runner import BLOCK_SIZE, Always
from tests.model.tiny_models import build


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("llama")
    build("llama", folder, seed=1)
    return folder


@dataclass(slots=True)
class Counter:
    count: int = 0


class Calls:
    """Counts in each state, then raises if a sequence that is broken is among those asked for."""

    def __init__(self, states: Sequence[DraftingState], broken: set[int], *, most: int = 1000) -> None:
        self.states, self.broken, self.most = states, broken, most
        self.num_calls = 0

    def __call__(self, indexes: Sequence[int]) -> None:
        self.num_calls += 1
        for index in indexes:
            state = self.states[index]
            state.value = state.value or Counter()
            state.value.count += 1
        if self.broken.intersection(indexes) or len(indexes) > self.most:
            raise RuntimeError("broken")


def states_of(count: int) -> list[DraftingState]:
    """Every other one has been seen before."""
    return [DraftingState(Counter(5) if index % 2 else None) for index in range(count)]


@pytest.mark.parametrize(
    ("broken", "most_calls"), [(set(), 1), ({0}, 9), ({15}, 9), ({3, 4}, 15), (set(range(16)), 31)]
)
def test_those_that_fail_alone_are_marked_and_nothing_is_done_twice(broken: set[int], most_calls: int) -> None:
    """Halves of 16: one broken sequence costs the first call and two for each of four levels."""
    states = states_of(16)
    calls = Calls(states, broken)
    assert mark_failing("counting", calls, states) == len(broken)
    assert {index for index, state in enumerate(states) if state.failed} == broken
    assert calls.num_calls <= most_calls
    for index, state in enumerate(states):
        before = 5 if index % 2 else 0
        expected = before if index in broken else before + 1
        assert (state.value.count if state.value else 0) == expected


def test_a_batch_that_fails_though_each_alone_would_not_is_given_up(caplog: pytest.LogCaptureFixture) -> None:
    states = states_of(4)
    assert mark_failing("counting", Calls(states, set(), most=2), states) == 4
    assert all(state.failed for state in states)
    assert caplog.messages == ["counting 4 sequences failed; 4 go on without drafts"]


def test_nobody_at_all() -> None:
    assert mark_failing("counting", Calls([], set()), []) == 0


def spied(runner: SpeculativeRunner, monkeypatch: pytest.MonkeyPatch) -> list[dict[int, Draft]]:
    """The drafts of every step, by the first block of their sequence."""
    made: list[dict[int, Draft]] = []
    propose: Callable[..., tuple[list[Draft], int]] = runner._propose

    def spy(chunks: Sequence[Chunk]) -> tuple[list[Draft], int]:
        drafts, num_failed = propose(chunks)
        made.append({chunk.block_ids[0]: draft for chunk, draft in zip(chunks, drafts, strict=True)})
        return drafts, num_failed

    monkeypatch.setattr(runner, "_propose", spy)
    return made


def drafts_of_healthy_steps(folder: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> list[dict[int, Draft]]:
    runner = load(folder, kind)
    states = prefill(runner)
    made = spied(runner, monkeypatch)
    draft(runner, states, num_steps=5)
    assert all(len(drafted.token_ids) == 3 for step in made for drafted in step.values())
    return made


def breaking(method: Callable[..., Any], broken: set[int]) -> Callable[..., Any]:
    """Raises where slots of these sequences are run, when their states have long been changed."""

    def run(slots: Sequence[Chunk], *rest: Any) -> Any:
        if broken & {slot.block_ids[0] for slot in slots}:
            raise RuntimeError("broken")
        return method(slots, *rest)

    return run


@pytest.mark.parametrize("kind", ["eagle", "model"])
@pytest.mark.parametrize("broken_places", [(2,), (0, 3), (0, 1, 2, 3)])
def test_who_drafts_on_drafts_the_same(
    folder: Path, kind: str, broken_places: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the failing call had changed, the features that wait for their slots above all, is as it was before."""
    expected = drafts_of_healthy_steps(folder, kind, monkeypatch)

    runner = load(folder, kind)
    states = prefill(runner)
    broken = {blocks(place)[0] for place in broken_places}
    run: Callable[..., Any] = runner._drafter._run  # type: ignore[attr-defined]
    monkeypatch.setattr(runner._drafter, "_run", breaking(run, broken))
    made = spied(runner, monkeypatch)
    _, num_failed = draft(runner, states, num_steps=5)
    assert num_failed == len(broken)
    assert [state.failed for state in states] == [blocks(place)[0] in broken for place in range(len(SAMPLINGS))]
    for found, right in zip(made, expected, strict=True):
        for first_block, drafted in found.items():
            assert drafted.token_ids == (() if first_block in broken else right[first_block].token_ids)


def test_who_cannot_be_followed_drafts_no_more_and_the_others_do_the_same(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The slots of a block that is complete cannot be stored."""
    expected = drafts_of_healthy_steps(folder, "eagle", monkeypatch)

    runner = load(folder, "eagle")
    broken = {blocks(1)[0]}
    step: Callable[..., Any] = runner._drafter._step  # type: ignore[attr-defined]
    monkeypatch.setattr(runner._drafter, "_step", breaking(step, broken))
    states = prefill(runner)  # which fills two blocks
    assert [state.failed for state in states] == [False, True, False, False]
    made = spied(runner, monkeypatch)
    draft(runner, states, num_steps=5)
    for found, right in zip(made, expected, strict=True):
        assert all(
            drafted.token_ids == right[first].token_ids for first, drafted in found.items() if first not in broken
        )


@pytest.mark.parametrize(("kind", "num_found"), [("eagle", 2), ("model", 2), ("medusa", 5), ("ngram", 5)])
def test_blocks_that_a_failed_drafter_has_not_filled_are_not_for_others(
    folder: Path, kind: str, num_found: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It fails behind a prompt of two blocks. One without layers leaves no gaps."""
    runner = load(folder, kind)
    monkeypatch.setattr(runner._drafter, "propose", always_raising)
    assert blocks_found_behind_one_answer(runner) == num_found


@pytest.mark.parametrize(("kind", "num_found"), [("eagle", 0), ("model", 0), ("medusa", 5)])
def test_nor_are_those_of_the_step_in_which_it_failed(
    folder: Path, kind: str, num_found: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = load(folder, kind)
    monkeypatch.setattr(runner._drafter, "observe", always_raising)
    assert blocks_found_behind_one_answer(runner) == num_found


def always_raising(*arguments: Any) -> Any:
    raise RuntimeError("broken")


def blocks_found_behind_one_answer(runner: SpeculativeRunner) -> int:
    """Of nine tokens of prompt and twelve of answer, the last of which has no KV: five full blocks."""
    pool = BlockPool(runner.num_blocks)
    scheduler = DecodeScheduler(pool, max_running=2, planner=Always(2))
    prompt = [5, 9, 11, 4, 7, 30, 31, 8, 2]
    sequence = TokenSequence("a", list(prompt), len(prompt), SamplingParams(max_tokens=12, temperature=0.0), BLOCK_SIZE)
    scheduler.add(DecodeSequence(sequence, Outbox()))
    while chunks := [scheduled.chunk for scheduled in scheduler.schedule(20)]:
        output = runner.execute(chunks)
        scheduler.complete(output.sampled, output)
    assert sequence.num_tokens == 21
    return len(pool.match_prefix(hash_blocks(sequence.token_ids[:-1], BLOCK_SIZE)))
