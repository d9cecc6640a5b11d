"""What is timed is pure decode of a full batch, and gives the answers that decoding one prompt after another gives."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from bench.decode_run import DecodeRun, PrefilledPrompts, SaidOutlooks
from bench.speculation_cell import Contest, Effort
from decode.draft import DraftShape
from decode.draft_model import DraftModelDrafter
from decode.draft_planner import AdaptiveDrafts, DraftPlanner, FixedDrafts, NoDrafts
from decode.draft_policy import DraftPolicy
from decode.drafter import Drafter
from decode.eagle import EagleDrafter
from decode.medusa import MedusaDrafter
from decode.ngram import NgramDrafter
from decode.speculative_runner import SpeculativeRunner
from decode.verification import Method
from model.block_pool import BlockPool
from model.checkpoint import map_weights
from model.runner import Chunk, SampledToken
from model.sampling_params import SamplingParams
from model.torch_runner import TorchRunner
from tests.decode.test_speculative_runner import random_head
from tests.model.tiny_models import build

pytestmark = pytest.mark.usefixtures("one_thread")

BLOCK_SIZE = 4
CONTEXT = 128
SAMPLING = SamplingParams(max_tokens=20, temperature=0.0, stop_token_ids=(21, 53))
PROMPTS = [[5, 9, 5, 9, 5, 9, 5, 9], [7] * 3, list(range(3, 20)), [11, 12, 13, 14], [40, 41], [33, 8, 60, 21, 8]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    build("mixtral", folder, seed=1)
    return folder


def load(folder: Path, num_draft_layers: int) -> TorchRunner:
    return TorchRunner.load(
        folder, num_blocks=400, block_size=BLOCK_SIZE, max_context_tokens=CONTEXT, num_draft_layers=num_draft_layers
    )


@pytest.fixture(scope="module")
def target(folder: Path) -> TorchRunner:
    return load(folder, num_draft_layers=1)


def drafter(kind: str, target: TorchRunner) -> Drafter:
    if kind == "ngram":
        return NgramDrafter()
    head = random_head("medusa" if kind == "medusa" else "eagle", target)
    if kind == "medusa":
        return MedusaDrafter(target, head, Method.BLOCK)
    return EagleDrafter(target, head, Method.BLOCK, DraftShape.TREE if kind == "tree" else DraftShape.CHAIN)


def answer(target: TorchRunner, prompt: list[int]) -> tuple[int, ...]:
    """One at a time, the whole text computed anew for each token."""
    tokens = list(prompt)
    while len(tokens) < len(prompt) + SAMPLING.max_tokens:
        blocks = range(target.layout.num_blocks(len(tokens)))
        (outcome,) = target.execute([Chunk(tokens, 0, blocks, SAMPLING, tokens, len(prompt))]).sampled
        assert isinstance(outcome, SampledToken)
        tokens.append(outcome.token_id)
        if outcome.token_id in SAMPLING.stop_token_ids:
            break
    return tuple(tokens[len(prompt) :])


def planner_for(outlooks: SaidOutlooks, num_drafts: int) -> DraftPlanner:
    return FixedDrafts(num_drafts, CONTEXT, outlooks) if num_drafts else NoDrafts()


def run_for(
    target: TorchRunner, kind: str, num_drafts: int, batch: int, num_tokens: int
) -> tuple[DecodeRun, BlockPool]:
    runner = SpeculativeRunner(target, drafter(kind, target), Method.BLOCK)
    pool = BlockPool(target.num_blocks)
    prompts = PrefilledPrompts(target, runner, pool, PROMPTS, SAMPLING)
    outlooks = SaidOutlooks(runner.outlook)
    run = DecodeRun(runner, planner_for(outlooks, num_drafts), prompts, batch, outlooks)
    run.advance(num_tokens)
    return run, pool


@pytest.mark.parametrize("kind", ["ngram", "eagle", "tree", "medusa"])
@pytest.mark.parametrize(("num_drafts", "batch"), [(0, 2), (3, 1), (3, 4)])
def test_answers_are_those_of_plain_decoding(target: TorchRunner, kind: str, num_drafts: int, batch: int) -> None:
    expected = [answer(target, prompt) for prompt in PROMPTS]
    assert len({len(tokens) for tokens in expected}) > 1  # some end by themselves
    run, _ = run_for(target, kind, num_drafts, batch, 300)
    assert len(run.answers) > len(PROMPTS)  # round and round
    for index, tokens in run.answers.items():
        assert tokens == expected[index % len(PROMPTS)], index


def test_drafts_are_told_apart_by_grade(target: TorchRunner) -> None:
    """The text repeats more and more, so its matches get longer."""
    run, _ = run_for(target, "ngram", 3, 2, 200)
    drafts = [draft for step in run.steps for draft in step.drafts]
    assert {draft.grade for draft in drafts} > {0}


@pytest.mark.parametrize("kind", ["ngram", "eagle", "tree"])
def test_every_step_is_of_a_full_batch_and_every_token_is_counted(target: TorchRunner, kind: str) -> None:
    run, pool = run_for(target, kind, 3, 4, 200)
    assert run.num_tokens == sum(step.num_tokens for step in run.steps) >= 200
    for step in run.steps:
        assert step.num_sequences == 4
        assert step.num_tokens <= step.num_rows <= 4 * (1 + 3)
        assert step.num_tokens == 4 + sum(draft.num_accepted for draft in step.drafts)
        assert 0.0 < step.draft_s < step.seconds
        assert all(draft.num_drafted == draft.num_asked > 0 for draft in step.drafts)  # only what is there is asked for
        assert step.num_distinct_experts is not None and 2 <= step.num_distinct_experts <= 5
    held = sum(-(-len(prompt) // BLOCK_SIZE) for prompt in PROMPTS)
    run.close()
    assert pool.num_used == held  # of the prompts alone
    # Now those are there too that had not ended; of each, the first token came from prefill.
    assert sum(len(tokens) - 1 for tokens in run.answers.values()) == run.num_tokens
    pool.check_integrity()


def test_a_prompt_is_prefilled_once_for_all(target: TorchRunner) -> None:
    runner = SpeculativeRunner(target, drafter("eagle", target), Method.BLOCK)
    pool = BlockPool(target.num_blocks)
    prompts = PrefilledPrompts(target, runner, pool, PROMPTS, SAMPLING)
    runs = [DecodeRun(runner, planner_for(SaidOutlooks(runner.outlook), count), prompts, 2) for count in (1, 3)]
    for round_number in range(1, 8):  # in turns, on the same cache
        for run in runs:
            run.advance(round_number * 12)
    expected = [answer(target, prompt) for prompt in PROMPTS]
    for run in runs:
        assert run.answers
        assert all(tokens == expected[index % len(PROMPTS)] for index, tokens in run.answers.items())


def test_the_drafter_starts_from_what_prefill_left(folder: Path) -> None:
    """The target drafts for itself, so that every guess is right as long as its own KV is that of the prompt."""
    target = load(folder, num_draft_layers=2)
    itself = DraftModelDrafter(target, target.config, map_weights(folder, target.config), "itself", Method.BLOCK)
    runner = SpeculativeRunner(target, itself, Method.BLOCK)
    endless = replace(SAMPLING, stop_token_ids=())
    prompts = PrefilledPrompts(target, runner, BlockPool(target.num_blocks), PROMPTS, endless)
    run = DecodeRun(runner, planner_for(SaidOutlooks(runner.outlook), 3), prompts, 2)
    run.advance(200)
    drafts = [draft for step in run.steps for draft in step.drafts]
    assert len(drafts) > 40
    assert all(draft.num_accepted == draft.num_drafted == draft.num_asked for draft in drafts)


def test_an_answer_that_ends_at_once_is_passed_over(target: TorchRunner) -> None:
    first = answer(target, PROMPTS[0])[0]
    others = [prompt for prompt in PROMPTS if answer(target, prompt)[0] != first]
    assert others
    sampling = replace(SAMPLING, stop_token_ids=(first,))
    pool = BlockPool(target.num_blocks)
    run = DecodeRun(target, NoDrafts(), PrefilledPrompts(target, target, pool, [PROMPTS[0], *others], sampling), 1)
    run.advance(60)
    assert run.answers and all(index % (1 + len(others)) != 0 for index in run.answers)
    nothing = DecodeRun(target, NoDrafts(), PrefilledPrompts(target, target, pool, [PROMPTS[0]], sampling), 1)
    with pytest.raises(RuntimeError, match="first token"):
        nothing.advance(1)


def test_too_few_blocks_are_not_measured(target: TorchRunner) -> None:
    pool = BlockPool(6)
    run = DecodeRun(target, NoDrafts(), PrefilledPrompts(target, target, pool, PROMPTS[1:2], SAMPLING), 3)
    with pytest.raises(RuntimeError, match="blocks"):
        run.advance(100)


def test_a_cell_has_a_figure_for_every_way(target: TorchRunner) -> None:
    runner = SpeculativeRunner(target, drafter("ngram", target), Method.BLOCK)
    outlooks = SaidOutlooks(runner.outlook)
    adaptive = AdaptiveDrafts(DraftPolicy(7), 7, CONTEXT, outlooks)
    contest = Contest(target, runner, adaptive, outlooks, (1, 3), CONTEXT, SAMPLING)
    effort = Effort(0.0, least_rounds=3, warm_up_tokens=8)
    figures = contest.measure(PROMPTS, 2, effort, warm_up=True)
    assert figures.fixed.keys() == figures.predicted.keys() == figures.verify_cost.keys() == {1, 3}
    assert min(figures.fixed.values()) > 0 and figures.adaptive > 0 and figures.plain_tokens_per_s > 0
    assert figures.alike == 1.0
    assert 2 <= figures.experts[2] <= 4
