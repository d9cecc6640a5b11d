"""Trees on the real forward: the tokens of plain decoding, and afterwards a cache as if there had been no tree."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from decode.acceptance import DraftOutcome
from decode.decoding import DecodeSequence
from decode.draft import Draft, DraftShape
from decode.draft_planner import AdaptiveDrafts, FixedDrafts, outcomes
from decode.draft_policy import DraftPolicy
from decode.drafter import Observed
from decode.eagle import EagleDrafter
from decode.lookup_first import LookupFirst
from decode.outbox import Outbox
from decode.outlook import ANYTHING, Outlook
from decode.scheduler import DecodeScheduler
from decode.speculative_runner import SpeculativeRunner
from decode.verification import Method
from model.block_pool import BlockPool
from model.runner import Chunk, DraftingState, ModelRunner, Outcome, SampledToken, StepOutput, VerifiedDraft
from model.sampling_params import SamplingParams
from model.sequence import Sequence as TokenSequence
from model.torch_runner import TorchRunner
from model.transformer import ForwardOutput
from tests.decode.test_speculative_runner import (
    BLOCK_SIZE,
    GREEDY,
    PROMPTS,
    REQUESTS,
    Always,
    answer_all,
    load,
    random_head,
    tokens,
)
from tests.model.tiny_models import VOCAB_SIZE, build

MAX_CONTEXT = 64
GREEDY_REQUESTS = [replace(params, temperature=0.0, top_p=1.0, top_k=0) for params in REQUESTS]
LONG = [
    SamplingParams(max_tokens=MAX_CONTEXT - len(prompt), temperature=temperature, seed=7)
    for prompt, temperature in zip(PROMPTS, (0.0, 0.9, 0.0, 0.6, 0.0), strict=True)
]


@pytest.fixture(scope="module", params=["llama", "mixtral"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp(request.param)
    build(request.param, folder, seed=1)
    return folder


class Grove:
    """Knows what plain sampling says: hides up to four tokens of it among nodes that are anything, anywhere."""

    name, num_layers, taps = "", 0, ()

    def __init__(self, answers: dict[tuple[int, ...], list[int]]) -> None:
        self._answers = answers
        self._random = random.Random(5)
        self.observed: list[tuple[int, list[int]]] = []

    def outlook(self, drafting: DraftingState, token_ids: Sequence[int]) -> Outlook:
        return ANYTHING

    def propose(self, chunks: Sequence[Chunk]) -> list[Draft]:
        return [self._tree(chunk) for chunk in chunks]

    def _tree(self, chunk: Chunk) -> Draft:
        prompt = tuple(chunk.history[: chunk.num_prompt_tokens])
        place = len(chunk.history) - len(prompt)
        num_nodes = chunk.num_draft_tokens
        truth = iter(self._answers[prompt][place : place + 4])
        turns = self._random.sample(range(num_nodes), min(self._random.randrange(5), num_nodes))
        edges: dict[tuple[int, int], int] = {}  # from parent and token to the node
        at = -1
        for node in range(num_nodes):
            true = next(truth, None) if node in turns else None
            if true is not None:
                at = edges.setdefault((at, true), len(edges))
            else:
                parent = self._random.randrange(-1, len(edges))
                edges.setdefault((parent, self._random.randrange(VOCAB_SIZE)), len(edges))
        return Draft([token for _, token in edges], parents=[parent for parent, _ in edges])

    def observe(self, observed: Sequence[Observed], output: ForwardOutput) -> None:
        for seen in observed:
            if isinstance(seen.rows, list):
                first = seen.rows[0]
                self.observed.append((len(seen.emitted_ids), [row - first for row in seen.rows]))

    def export(self, drafting: DraftingState) -> Tensor | None:
        return None

    def restore(self, drafting: DraftingState, num_computed_tokens: int, state: Tensor) -> None: ...


def grove_runner(folder: Path, requests: Sequence[SamplingParams], method: Method = Method.BLOCK) -> SpeculativeRunner:
    answers = tokens(answer_all(load(folder), requests))
    known = {tuple(prompt): answer for prompt, answer in zip(PROMPTS, answers, strict=True)}
    return SpeculativeRunner(load(folder), Grove(known), method)


def eagle_runner(folder: Path, shape: DraftShape = DraftShape.TREE, method: Method = Method.BLOCK) -> SpeculativeRunner:
    target = load(folder, num_draft_layers=1)
    return SpeculativeRunner(target, EagleDrafter(target, random_head("eagle", target), method, shape), method)


RUNNERS: dict[str, Callable[[Path, Sequence[SamplingParams], Method], SpeculativeRunner]] = {
    "grove": grove_runner,
    "eagle": lambda folder, requests, method: eagle_runner(folder, method=method),
}


@pytest.mark.parametrize("num_drafts", range(1, 17))
@pytest.mark.parametrize("name", RUNNERS)
def test_greedy_tokens_are_those_without_drafts(folder: Path, name: str, num_drafts: int) -> None:
    expected = tokens(answer_all(load(folder), GREEDY_REQUESTS))
    found = answer_all(RUNNERS[name](folder, GREEDY_REQUESTS, Method.BLOCK), GREEDY_REQUESTS, Always(num_drafts))
    assert tokens(found) == expected
    assert sum(decoding.num_drafted_tokens for decoding in found) > 0
    if name == "grove" or num_drafts > 8:
        assert sum(decoding.num_accepted_tokens for decoding in found) > 0


@pytest.mark.parametrize("method", Method)
@pytest.mark.parametrize("name", RUNNERS)
@pytest.mark.parametrize("num_drafts", [3, 10])
def test_sampled_tokens_are_those_without_drafts(folder: Path, name: str, num_drafts: int, method: Method) -> None:
    """Under every method: a tree is deterministic."""
    expected = tokens(answer_all(load(folder), REQUESTS))
    assert tokens(answer_all(RUNNERS[name](folder, REQUESTS, method), REQUESTS, Always(num_drafts))) == expected


@pytest.mark.parametrize("name", RUNNERS)
def test_preemption_changes_nothing(folder: Path, name: str) -> None:
    expected = tokens(answer_all(load(folder), GREEDY_REQUESTS))
    runner = RUNNERS[name](folder, GREEDY_REQUESTS, Method.BLOCK)
    found = answer_all(runner, GREEDY_REQUESTS, Always(5), num_blocks=16)
    assert sum(decoding.num_preemptions for decoding in found) > 0
    assert tokens(found) == expected


@pytest.mark.parametrize("name", RUNNERS)
def test_answers_that_fill_the_context(folder: Path, name: str) -> None:
    expected = tokens(answer_all(load(folder), LONG))
    runner = RUNNERS[name](folder, LONG, Method.BLOCK)
    planner = FixedDrafts(12, MAX_CONTEXT, runner.outlook)
    found = answer_all(runner, LONG, planner)  # type: ignore[arg-type]
    assert tokens(found) == expected
    assert {decoding.sequence.num_tokens for decoding in found} == {MAX_CONTEXT}


@pytest.mark.parametrize("name", RUNNERS)
def test_a_stop_token_within_the_path(folder: Path, name: str) -> None:
    plain = tokens(answer_all(load(folder), [GREEDY] * 5))
    requests = [replace(GREEDY, stop_token_ids=(answer[9],)) for answer in plain]
    found = answer_all(RUNNERS[name](folder, [GREEDY] * 5, Method.BLOCK), requests, Always(9))
    assert tokens(found) == [answer[: answer.index(answer[9]) + 1] for answer in plain]


def test_paths_are_moved_in_most_steps(folder: Path) -> None:
    """Or the tests here would show little: tokens stand that were not drafted one behind another."""
    runner = grove_runner(folder, REQUESTS)
    answer_all(runner, REQUESTS, Always(8))
    observed = runner._drafter.observed  # type: ignore[attr-defined]
    assert all(num_emitted == len(rows) for num_emitted, rows in observed)
    scattered = [rows for _, rows in observed if rows != list(range(len(rows)))]
    assert len(scattered) > 15 and max(map(len, scattered)) >= 4


class Kept:
    """A runner with a pool whose blocks stay findable, and the answers to all requests."""

    def __init__(self, runner: ModelRunner, requests: Sequence[SamplingParams], num_drafts: int) -> None:
        self.pool = BlockPool(runner.num_blocks)
        scheduler = DecodeScheduler(self.pool, max_running=8, planner=Always(num_drafts))
        self.sequences = [
            DecodeSequence(TokenSequence(str(index), list(prompt), len(prompt), sampling, BLOCK_SIZE), Outbox())
            for index, (prompt, sampling) in enumerate(zip(PROMPTS, requests, strict=True))
        ]
        for decoding in self.sequences:
            scheduler.add(decoding)
        while chunks := [scheduled.chunk for scheduled in scheduler.schedule(40)]:
            output = runner.execute(chunks)
            scheduler.complete(output.sampled, output)

    def published(self, memory: Tensor) -> list[list[Tensor]]:
        """By sequence, [L, H, 2, B, D] of each block that others find by the hashes of its tokens."""
        return [
            [memory[:, block] for block in self.pool.match_prefix(decoding.sequence.block_hashes)]
            for decoding in self.sequences
        ]


@pytest.mark.parametrize("num_drafts", [4, 11])
@pytest.mark.parametrize("name", RUNNERS)
def test_blocks_that_others_find_hold_the_kv_of_plain_decoding(folder: Path, name: str, num_drafts: int) -> None:
    """Draft layer included: next to nothing is left of the tree."""
    plain = load(folder) if name == "grove" else eagle_runner(folder, DraftShape.CHAIN)
    runner = RUNNERS[name](folder, REQUESTS, Method.BLOCK)
    expected = Kept(plain, REQUESTS, 0).published(memory_of(plain))
    kept = Kept(runner, REQUESTS, num_drafts)
    found = kept.published(memory_of(runner))
    assert list(map(len, found)) == list(map(len, expected))
    assert sum(map(len, found)) > 15
    for mine, theirs in zip(found, expected, strict=True):
        for block, other in zip(mine, theirs, strict=True):
            torch.testing.assert_close(block, other, atol=1e-4, rtol=0)


def memory_of(runner: TorchRunner | SpeculativeRunner) -> Tensor:
    return (runner._target if isinstance(runner, SpeculativeRunner) else runner).cache.memory


def test_a_sequence_goes_on_elsewhere_as_it_would_have_here(tmp_path: Path) -> None:
    """Handed over in the middle of a block, right after a tree of which some stood."""
    build("llama", tmp_path, seed=1)
    here, there = eagle_runner(tmp_path), eagle_runner(tmp_path)
    state, heir = DraftingState(), DraftingState()
    history, num_known, num_new = list(PROMPTS[2]), 0, 0
    while num_known % BLOCK_SIZE == 0 or num_new < 2:
        before = len(history)
        history, num_known = step(here, history, num_known, state)
        num_new = len(history) - before
    there._target.cache.memory.copy_(here._target.cache.memory)
    there.restore_drafting(heir, num_known, here.export_drafting(state))
    expected = followed(here, history, num_known, state)
    assert followed(there, history, num_known, heir) == expected
    assert {len(draft.token_ids) for draft in expected[1]} == {9}


def followed(
    runner: SpeculativeRunner, history: list[int], num_known: int, drafting: DraftingState
) -> tuple[list[int], list[Draft]]:
    """The text after five steps, and what was drafted in them."""
    drafts: list[Draft] = []
    propose = runner._drafter.propose

    def proposed(chunks: Sequence[Chunk]) -> list[Draft]:
        made = propose(chunks)
        drafts.extend(made)
        return made

    runner._drafter.propose = proposed  # type: ignore[method-assign]
    for _ in range(5):
        history, num_known = step(runner, history, num_known, drafting)
    return history, drafts


def step(
    runner: SpeculativeRunner, history: list[int], num_known: int, drafting: DraftingState
) -> tuple[list[int], int]:
    """The text after it and how much of that has KV; with nine drafts, unless it computes the prompt."""
    num_drafts = 9 if num_known else 0
    num_prompt_tokens = len(PROMPTS[2])
    chunk = Chunk(
        history[num_known:], num_known, range(60), GREEDY, history, num_prompt_tokens, num_drafts, drafting=drafting
    )
    (outcome,) = runner.execute([chunk]).sampled
    assert isinstance(outcome, SampledToken | VerifiedDraft)
    emitted = outcome.tokens if isinstance(outcome, VerifiedDraft) else (outcome,)
    return [*history, *(token.token_id for token in emitted)], len(history) + len(emitted) - 1


def test_outcome_tells_which_nodes_stood(folder: Path) -> None:
    """By their places in the draft: parents before children, the tokens those that were emitted."""
    runner = grove_runner(folder, REQUESTS)
    drafts: list[Draft] = []
    propose = runner._drafter.propose

    def proposed(chunks: Sequence[Chunk]) -> list[Draft]:
        drafts[:] = propose(chunks)
        return drafts

    runner._drafter.propose = proposed  # type: ignore[method-assign]
    history, num_known, state, num_stood = list(PROMPTS[0]), 0, DraftingState(), 0
    for _ in range(8):
        drafts.clear()
        num_drafts = 9 if num_known else 0
        chunk = Chunk(
            history[num_known:], num_known, range(60), REQUESTS[0], history, len(PROMPTS[0]), num_drafts, drafting=state
        )
        (outcome,) = runner.execute([chunk]).sampled
        emitted = [outcome] if isinstance(outcome, SampledToken) else list(outcome.tokens)  # type: ignore[union-attr]
        if isinstance(outcome, VerifiedDraft):
            (draft,) = drafts
            assert outcome.nodes is not None and draft.parents is not None
            path = [-1, *outcome.nodes]
            assert [draft.parents[node] for node in outcome.nodes] == path[:-1]
            assert [draft.token_ids[node] for node in outcome.nodes] == [each.token_id for each in emitted[:-1]]
            num_stood += len(outcome.nodes)
        history += [each.token_id for each in emitted]
        num_known = len(history) - 1
    assert num_stood > 3


def test_chains_have_no_nodes(folder: Path) -> None:
    runner, state = eagle_runner(folder, DraftShape.CHAIN), DraftingState()
    history, num_known = step(runner, list(PROMPTS[2]), 0, state)
    chunk = Chunk(history[num_known:], num_known, range(60), GREEDY, history, len(PROMPTS[2]), 3, drafting=state)
    (outcome,) = runner.execute([chunk]).sampled
    assert isinstance(outcome, VerifiedDraft) and outcome.nodes is None


@pytest.mark.parametrize("method", [Method.BLOCK, Method.COUPLED])
def test_adaptive_trees_beside_look_ups(folder: Path, method: Method) -> None:
    """As a worker drafts by itself: grade 0 are trees, look-ups are chains, and the tokens are those of no drafts."""
    expected = tokens(answer_all(load(folder), REQUESTS))
    target = load(folder, num_draft_layers=1)
    eagle = EagleDrafter(target, random_head("eagle", target), method, DraftShape.TREE)
    runner = SpeculativeRunner(target, LookupFirst(eagle), method)
    policy = DraftPolicy(7)
    planner = Told(policy, 7, MAX_CONTEXT, runner.outlook)
    for _ in range(4):
        assert tokens(answer_all(runner, REQUESTS, planner)) == expected  # type: ignore[arg-type]
    shapes = {(outcome.grade == 0, outcome.is_free, outcome.nodes is None) for outcome in planner.outcomes}
    assert (True, False, False) in shapes
    assert shapes <= {(True, False, False), (False, True, True)}


class Told(AdaptiveDrafts):
    """Keeps what became of the drafts that were made."""

    outcomes: list[DraftOutcome]

    def learn(self, results: Sequence[tuple[DecodeSequence, Outcome]], output: StepOutput, *, was_mixed: bool) -> None:
        drafts = outcomes(results, self._asked, self._outlooks)
        self.outcomes = [*getattr(self, "outcomes", []), *(draft for draft in drafts if draft.num_drafted)]
        super().learn(results, output, was_mixed=was_mixed)
