"""Drafting changes how fast tokens come, never which: every drafter against the plain runner, on the real forward."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from decode.decoding import DecodeSequence
from decode.draft import Draft, DraftShape
from decode.draft_head import DraftHead, HeadCard
from decode.draft_log import DraftReport
from decode.draft_model import DraftModelDrafter
from decode.drafter import Drafter, Observed
from decode.eagle import EagleDrafter
from decode.lookup_first import LookupFirst
from decode.medusa import MedusaDrafter
from decode.ngram import NgramDrafter
from decode.outbox import Outbox
from decode.outlook import ANYTHING, NOTHING, Outlook
from decode.scheduler import DecodeScheduler
from decode.speculative_runner import SpeculativeRunner
from decode.verification import Method
from model.block_pool import BlockPool
from model.checkpoint import map_weights
from model.runner import Chunk, DraftingState, ModelRunner, Outcome, StepOutput
from model.sampling_params import SamplingParams
from model.sequence import Sequence as TokenSequence
from model.torch_runner import TorchRunner
from model.transformer import ForwardOutput
from tests.cluster.draft_heads import TAPS, random_weights
from tests.model.tiny_models import VOCAB_SIZE, build

pytestmark = pytest.mark.usefixtures("one_thread")

NUM_BLOCKS, BLOCK_SIZE = 64, 4
GREEDY = SamplingParams(max_tokens=24, temperature=0.0)
REQUESTS = [
    GREEDY,
    replace(GREEDY, repetition_penalty=1.3),
    SamplingParams(max_tokens=17, temperature=0.8, top_p=0.9, seed=3),
    SamplingParams(max_tokens=9, temperature=1.2, top_k=20, seed=4, num_logprobs=2),
    replace(GREEDY, max_tokens=1),
]
PROMPTS = [[5, 9, 5, 9, 5, 9, 5, 9], [7] * 3, list(range(3, 20)), [11, 12, 13, 14], [40, 41]]


@pytest.fixture(scope="module", params=["llama", "mixtral"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp(request.param)
    build(request.param, folder, seed=1)
    return folder


class Oracle:
    """Knows what plain sampling says, and lies at every third place."""

    name, num_layers, taps = "", 0, ()

    def __init__(self, answers: dict[tuple[int, ...], list[int]]) -> None:
        self._answers = answers

    def outlook(self, drafting: DraftingState, token_ids: Sequence[int]) -> Outlook:
        return ANYTHING

    def propose(self, chunks: Sequence[Chunk]) -> list[Draft]:
        return [Draft(self._guess(chunk)) for chunk in chunks]

    def _guess(self, chunk: Chunk) -> tuple[int, ...]:
        prompt = tuple(chunk.history[: chunk.num_prompt_tokens])
        place = len(chunk.history) - len(prompt)
        truth = self._answers[prompt][place : place + chunk.num_draft_tokens]
        return tuple(3 if (place + i) % 3 == 2 else token for i, token in enumerate(truth))

    def observe(self, observed: Sequence[Observed], output: ForwardOutput) -> None: ...

    def export(self, drafting: DraftingState) -> Tensor | None:
        return None

    def restore(self, drafting: DraftingState, num_computed_tokens: int, state: Tensor) -> None: ...


class Always:
    """A planner: so many drafts, for everybody, in every step; counts what became of them."""

    def __init__(self, num_drafts: int) -> None:
        self._num_drafts = num_drafts
        self.num_steps = 0

    def plan(self, decoding: Sequence[DecodeSequence], num_tokens: int) -> list[int]:
        return [self._num_drafts] * len(decoding)

    def learn(self, results: Sequence[tuple[DecodeSequence, Outcome]], output: StepOutput, *, was_mixed: bool) -> None:
        self.num_steps += 1

    def withdraw(self, decoding: DecodeSequence) -> None: ...

    def forget(self, decoding: DecodeSequence) -> None: ...

    reason = ""

    def reports(self) -> Sequence[DraftReport]:
        return ()


def random_head(kind: str, target: TorchRunner, seed: int = 0) -> DraftHead:
    weights = random_weights(kind, target.config, seed)
    vocabulary = torch.arange(0, VOCAB_SIZE, 2)
    return DraftHead(f"{kind}:test", HeadCard(kind, {}, taps=TAPS if kind == "eagle" else ()), weights, vocabulary)


FOLDERS: dict[int, Path] = {}


def load(folder: Path, num_draft_layers: int = 0) -> TorchRunner:
    runner = TorchRunner.load(
        folder, num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE, num_draft_layers=num_draft_layers, max_context_tokens=64
    )
    FOLDERS[id(runner)] = folder
    return runner


def own_copy(target: TorchRunner, method: Method) -> DraftModelDrafter:
    """The target drafts for itself: with coupled noise, or greedily, every guess is right."""
    weights = map_weights(FOLDERS[id(target)], target.config)
    return DraftModelDrafter(target, target.config, weights, "itself", method)


NUM_DRAFT_LAYERS = {"ngram": 0, "medusa": 0, "eagle": 1, "tree": 1, "eagle+ngram": 1, "tree+ngram": 1, "model": 2}


def drafters() -> dict[str, Callable[[TorchRunner, Method], Drafter]]:
    return {
        "model": own_copy,
        "ngram": lambda target, method: NgramDrafter(),
        "eagle": lambda target, method: EagleDrafter(target, random_head("eagle", target), method, DraftShape.CHAIN),
        "tree": lambda target, method: EagleDrafter(target, random_head("eagle", target), method, DraftShape.TREE),
        "medusa": lambda target, method: MedusaDrafter(target, random_head("medusa", target), method),
        "eagle+ngram": lambda target, method: LookupFirst(
            EagleDrafter(target, random_head("eagle", target), method, DraftShape.CHAIN)
        ),
        "tree+ngram": lambda target, method: LookupFirst(
            EagleDrafter(target, random_head("eagle", target), method, DraftShape.TREE)
        ),
    }


def answer_all(
    runner: ModelRunner,
    requests: Sequence[SamplingParams],
    planner: Always | None = None,
    num_blocks: int = NUM_BLOCKS,
    num_step_tokens: int = 40,
) -> list[DecodeSequence]:
    pool = BlockPool(num_blocks)
    scheduler = DecodeScheduler(pool, max_running=8, planner=planner)
    sequences = [
        DecodeSequence(TokenSequence(str(index), list(prompt), len(prompt), sampling, BLOCK_SIZE), Outbox())
        for index, (prompt, sampling) in enumerate(zip(PROMPTS, requests, strict=True))
    ]
    for decoding in sequences:
        scheduler.add(decoding)
    while chunks := [scheduled.chunk for scheduled in scheduler.schedule(num_step_tokens)]:
        output = runner.execute(chunks)
        scheduler.complete(output.sampled, output)
    assert pool.num_free == num_blocks
    return sequences


def tokens(sequences: Sequence[DecodeSequence]) -> list[list[int]]:
    return [decoding.sequence.token_ids[decoding.sequence.num_prompt_tokens :] for decoding in sequences]


@pytest.mark.parametrize("name", ["ngram", "eagle", "medusa", "model", "eagle+ngram", "tree+ngram"])
@pytest.mark.parametrize("num_drafts", [1, 3, 7])
def test_greedy_tokens_are_those_without_drafts(folder: Path, name: str, num_drafts: int) -> None:
    requests = [replace(params, temperature=0.0, top_p=1.0, top_k=0) for params in REQUESTS]
    expected = tokens(answer_all(load(folder), requests))
    target = load(folder, num_draft_layers=NUM_DRAFT_LAYERS[name])
    runner = SpeculativeRunner(target, drafters()[name](target, Method.BLOCK), Method.BLOCK)
    found = answer_all(runner, requests, Always(num_drafts))
    assert tokens(found) == expected
    num_drafted, num_accepted = (
        sum(getattr(d, f"num_{what}_tokens") for d in found) for what in ("drafted", "accepted")
    )
    assert num_drafted > 0
    if name == "model":  # a draft may reach beyond the answer's end, and what stands there is not taken
        assert num_accepted >= num_drafted - num_drafts * len(found)


@pytest.mark.parametrize("name", ["ngram", "eagle", "medusa", "model", "eagle+ngram", "tree+ngram"])
def test_coupled_sampling_gives_the_text_without_drafts(folder: Path, name: str) -> None:
    expected = tokens(answer_all(load(folder), REQUESTS))
    target = load(folder, num_draft_layers=NUM_DRAFT_LAYERS[name])
    runner = SpeculativeRunner(target, drafters()[name](target, Method.COUPLED), Method.COUPLED)
    assert tokens(answer_all(runner, REQUESTS, Always(3))) == expected


def test_drafts_that_are_right_save_steps(folder: Path) -> None:
    plain_planner, planner = Always(0), Always(4)
    plain = answer_all(load(folder), REQUESTS, plain_planner)
    answers = {tuple(prompt): answer for prompt, answer in zip(PROMPTS, tokens(plain), strict=True)}
    runner = SpeculativeRunner(load(folder), Oracle(answers), Method.BLOCK)
    found = answer_all(runner, REQUESTS, planner)
    assert tokens(found) == tokens(plain)
    assert planner.num_steps < 0.55 * plain_planner.num_steps  # two of three guesses are right
    assert all(d.num_accepted_tokens <= d.num_drafted_tokens for d in found)
    longest = found[0]
    assert longest.num_accepted_tokens + longest.num_steps == len(answers[tuple(PROMPTS[0])])
    outbox = found[3].outbox._tokens  # every token has the logprobs that were asked for
    expected = plain[3].outbox._tokens
    assert [token.token_id for token in outbox] == [token.token_id for token in expected]
    for mine, theirs in zip(outbox, expected, strict=True):
        assert mine.logprobs is not None and theirs.logprobs is not None
        assert mine.logprobs.chosen == pytest.approx(theirs.logprobs.chosen, abs=1e-4)


@pytest.mark.parametrize("name", ["ngram", "eagle", "model"])
def test_preemption_changes_nothing(folder: Path, name: str) -> None:
    requests = [replace(params, temperature=0.0, top_p=1.0, top_k=0) for params in REQUESTS]
    expected = tokens(answer_all(load(folder), requests))
    target = load(folder, num_draft_layers=NUM_DRAFT_LAYERS[name])
    runner = SpeculativeRunner(target, drafters()[name](target, Method.BLOCK), Method.BLOCK)
    found = answer_all(runner, requests, Always(3), num_blocks=16)
    assert sum(decoding.num_preemptions for decoding in found) > 0
    assert tokens(found) == expected


def test_a_drafter_that_fails_is_left_out(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    class Failing(NgramDrafter):
        def propose(self, chunks: Sequence[Chunk]) -> list[Draft]:
            raise RuntimeError("broken")

    expected = tokens(answer_all(load(folder), REQUESTS))
    runner = SpeculativeRunner(load(folder), Failing(), Method.BLOCK)
    found = answer_all(runner, REQUESTS, Always(3))
    assert tokens(found) == expected
    assert all(decoding.sequence.drafting.failed for decoding in found[:4])
    assert "drafting for" in caplog.text


def test_a_drafter_that_cannot_say_what_it_has_is_left_out(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    class Failing(NgramDrafter):
        def outlook(self, drafting: DraftingState, token_ids: Sequence[int]) -> Outlook:
            raise RuntimeError("broken")

    runner = SpeculativeRunner(load(folder), Failing(), Method.BLOCK)
    drafting = DraftingState()
    assert runner.outlook(drafting, [5, 9]) == NOTHING and drafting.failed
    assert "the drafter could not say" in caplog.text
    chunk = Chunk([5, 9], 0, [0], GREEDY, [5, 9], 2, 3, drafting)
    assert [runner.execute([chunk]).num_failed_drafts for _ in range(2)] == [1, 0]


@pytest.mark.parametrize("name", ["ngram", "eagle", "medusa", "model", "eagle+ngram", "tree+ngram"])
def test_what_a_drafter_says_it_has_is_what_it_proposes(folder: Path, name: str) -> None:
    """Of every step of all sequences, before which it was asked."""
    target = load(folder, num_draft_layers=NUM_DRAFT_LAYERS[name])
    drafter = drafters()[name](target, Method.BLOCK)
    runner = SpeculativeRunner(target, drafter, Method.BLOCK)
    said: dict[DraftingState, int] = {}
    told: list[tuple[int, int]] = []

    class Asking(Always):
        def plan(self, decoding: Sequence[DecodeSequence], num_tokens: int) -> list[int]:
            for each in decoding:
                sequence = each.sequence
                said[sequence.drafting] = runner.outlook(sequence.drafting, sequence.token_ids).num_tokens
            return super().plan(decoding, num_tokens)

    def propose(chunks: Sequence[Chunk], original: Callable[..., list[Draft]] = drafter.propose) -> list[Draft]:
        drafts = original(chunks)
        told.extend(
            (len(draft.token_ids), min(chunk.num_draft_tokens, said[chunk.drafting]))
            for chunk, draft in zip(chunks, drafts, strict=True)
        )
        return drafts

    setattr(drafter, "propose", propose)  # noqa: B010 - of this drafter alone
    answer_all(runner, REQUESTS, Asking(5))
    assert len(told) > 8 and sum(num_drafted for num_drafted, _ in told) > 0
    assert all(num_drafted == num_said for num_drafted, num_said in told)
