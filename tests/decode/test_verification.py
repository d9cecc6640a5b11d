"""The batched code as the runner calls it: laws by chi-square, equality with plain loops, rows that do not mix."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from decode import verification
from decode.draft import Draft
from decode.verification import Method, Verdict, emitted, verify
from model.randomness import Purpose, uniforms
from model.runner import Chunk, SampledToken
from model.sampling import Row, sample
from model.sampling_params import SamplingParams
from tests.decode.markov import (
    PROMPT,
    Drafter,
    Markov,
    chunk_of,
    fixed_drafter,
    generate,
    law_of_outputs,
    plain_loop,
    random_drafter,
)

pytestmark = pytest.mark.usefixtures("one_thread")

SAMPLED = SamplingParams(max_tokens=100)
GREEDY = replace(SAMPLED, temperature=0.0)
PENALISED = replace(SAMPLED, repetition_penalty=1.4, presence_penalty=0.3, frequency_penalty=0.5)
KINDS = {
    "nothing": SAMPLED,
    "temperature": replace(SAMPLED, temperature=0.6),
    "top_k": replace(SAMPLED, top_k=2),
    "top_p": replace(SAMPLED, top_p=0.7),
    "min_p": replace(SAMPLED, min_p=0.3, temperature=1.5),
    "penalties": PENALISED,
    "min_tokens": replace(SAMPLED, min_tokens=2, stop_token_ids=(1, 3)),
    "all": replace(PENALISED, temperature=0.8, top_k=3, top_p=0.95, min_p=0.05, min_tokens=3, stop_token_ids=(2,)),
}
JUDGED = (Method.TOKEN, Method.BLOCK)
TARGET = Markov.random(4, seed=1)
CLOSE = TARGET.like(Markov.random(4, seed=2), 0.6)
FAR = Markov.random(4, seed=3)


def seeded(params: SamplingParams, count: int, first: int = 0) -> list[SamplingParams]:
    return [replace(params, seed=first + seed) for seed in range(count)]


def two(_: Chunk) -> int:
    return 2


def ragged(chunk: Chunk) -> int:
    return len(chunk.history) % 4


def assert_has_law(outputs: list[tuple[int, ...]], law: dict[tuple[int, ...], float]) -> None:
    """Nothing without mass, and a chi-square within five standard deviations (rare outputs are one cell)."""
    counts, rest = Counter(outputs), [0.0, 0.0]
    assert counts.keys() <= law.keys()
    cells: list[tuple[float, float]] = []
    for output, mass in law.items():
        if (expected := mass * len(outputs)) >= 10:
            cells.append((counts[output], expected))
        else:
            rest = [rest[0] + counts[output], rest[1] + expected]
    if rest[1] >= 5:
        cells.append((rest[0], rest[1]))
    statistic = sum((found - expected) ** 2 / expected for found, expected in cells)
    degrees = max(1, len(cells) - 1)
    assert statistic < degrees + 5 * math.sqrt(2 * degrees)


@pytest.mark.parametrize("method", Method)
@pytest.mark.parametrize("kind", KINDS)
def test_outputs_over_several_steps_have_the_law_of_plain_sampling(kind: str, method: Method) -> None:
    """Four tokens by drafts of up to three: laws of one step, and that steps are independent of each other."""
    drafter = random_drafter(CLOSE, method, ragged)
    outputs, _ = generate(TARGET, seeded(KINDS[kind], 1500), drafter, method, 4)
    assert_has_law(outputs, law_of_outputs(TARGET, KINDS[kind], 4))


@pytest.mark.parametrize("method", JUDGED)
def test_two_steps_one_after_the_other_draw_independently(method: Method) -> None:
    """Many outputs of two steps with drafts that often fall: noise used twice would show in the joint law."""
    drafter = random_drafter(FAR, method, two)
    outputs, verdicts = generate(TARGET, seeded(SAMPLED, 12000), drafter, method, 4)
    assert_has_law(outputs, law_of_outputs(TARGET, SAMPLED, 4))
    assert 0.2 < sum(v.num_accepted for v in verdicts) / (2 * len(verdicts)) < 0.8


@pytest.mark.parametrize("method", JUDGED)
def test_a_reduced_draft_vocabulary_keeps_the_law(method: Method) -> None:
    drafter = random_drafter(CLOSE, method, two, vocabulary=torch.tensor([1, 2]))
    outputs, verdicts = generate(TARGET, seeded(SAMPLED, 3000), drafter, method, 3)
    assert_has_law(outputs, law_of_outputs(TARGET, SAMPLED, 3))
    assert any(v.num_accepted == 2 for v in verdicts)


@pytest.mark.parametrize("method", JUDGED)
def test_no_verdict_uses_a_number_twice(method: Method, monkeypatch: pytest.MonkeyPatch) -> None:
    used: list[tuple[int, int, int, int]] = []

    def spy(seeds: Tensor, positions: Tensor, purpose: Purpose, indexes: Tensor) -> Tensor:
        pairs = zip(seeds.tolist(), positions.tolist(), strict=True)
        used.extend((seed, position, purpose, index) for seed, position in pairs for index in indexes.tolist())
        return uniforms(seeds, positions, purpose, indexes)

    monkeypatch.setattr(verification, "uniforms", spy)
    _, verdicts = generate(TARGET, seeded(SAMPLED, 5), random_drafter(FAR, method, two), method, 20)
    assert len(used) == len(set(used)) == 2 * len(verdicts)
    assert {purpose for _, _, purpose, _ in used} == {Purpose.VERDICT}


@pytest.mark.parametrize("method", JUDGED)
def test_the_token_behind_a_whole_draft_is_the_one_that_plain_sampling_draws_there(method: Method) -> None:
    chunks = [chunk_of(PROMPT, params) for params in seeded(SAMPLED, 200)]
    drafts = random_drafter(CLOSE, method, two)(chunks)
    verdicts = verify(TARGET.rows(chunks, drafts), chunks, drafts, method)
    whole = [(c, d, v) for c, d, v in zip(chunks, drafts, verdicts, strict=True) if v is not None and len(v.rows) == 3]
    assert len(whole) > 50
    for chunk, draft, verdict in whole:
        row = Row((*PROMPT, *draft.token_ids), len(PROMPT), Row.behind(chunk).sampling)
        (sampled,) = sample(TARGET.logits([row.history]), [row])
        assert isinstance(sampled, SampledToken)
        assert verdict.token_ids == (*draft.token_ids, sampled.token_id)


def test_block_accepts_at_least_as_many_as_token_on_the_same_drafts() -> None:
    accepted = {}
    for method in JUDGED:
        params = seeded(SAMPLED, 6000)
        chunks = [chunk_of(PROMPT, p) for p in params]
        drafts = random_drafter(CLOSE, method, lambda _: 3)(chunks)
        verdicts = verify(TARGET.rows(chunks, drafts), chunks, drafts, method)
        accepted[method] = sum(v.num_accepted for v in verdicts if v is not None)
    assert accepted[Method.BLOCK] > 1.01 * accepted[Method.TOKEN]


DRAFTERS: dict[str, Drafter] = {
    "none": fixed_drafter(()),
    "close": random_drafter(CLOSE, Method.COUPLED, two),
    "far": random_drafter(FAR, Method.COUPLED, lambda _: 4),
    "ragged": random_drafter(CLOSE, Method.COUPLED, ragged),
    "target itself": random_drafter(TARGET, Method.COUPLED, lambda _: 3),
    "reduced": random_drafter(CLOSE, Method.COUPLED, two, torch.tensor([1, 2])),
    "fixed": fixed_drafter((3, 1, 2)),
    "tree": fixed_drafter((0, 1, 2, 3, 0, 1), parents=(-1, -1, 0, 0, 1, 4)),
}


@pytest.mark.parametrize("name", DRAFTERS)
def test_coupled_is_plain_sampling_token_for_token(name: str) -> None:
    params = [replace(p, seed=seed) for seed in range(6) for p in KINDS.values()]
    outputs, verdicts = generate(TARGET, params, DRAFTERS[name], Method.COUPLED, 9)
    assert outputs == [plain_loop(TARGET, p, 9) for p in params]
    if name == "target itself":
        assert {v.num_accepted for v in verdicts} == {3}
    elif name != "none":
        assert {v.num_accepted for v in verdicts} >= {0, 2}


@pytest.mark.parametrize("method", JUDGED)
@pytest.mark.parametrize("name", ["none", "fixed", "tree"])
def test_deterministic_drafts_leave_plain_sampling_as_it_is(name: str, method: Method) -> None:
    params = [replace(p, seed=seed) for seed in range(6) for p in KINDS.values()]
    outputs, _ = generate(TARGET, params, DRAFTERS[name], method, 9)
    assert outputs == [plain_loop(TARGET, p, 9) for p in params]


@pytest.mark.parametrize("method", Method)
@pytest.mark.parametrize("name", DRAFTERS)
def test_greedy_is_the_plain_loop(name: str, method: Method) -> None:
    greedy = [replace(p, temperature=0.0, seed=1) for p in (*KINDS.values(), replace(SAMPLED, repetition_penalty=9.0))]
    outputs, verdicts = generate(TARGET, greedy, DRAFTERS[name], method, 12)
    assert outputs == [plain_loop(TARGET, p, 12) for p in greedy]
    assert len(set(outputs)) > 2
    if name != "none":
        assert any(v.num_accepted for v in verdicts)


def mixed_batch(*, only_judged: bool = False) -> tuple[list[Tensor], list[Chunk], list[Draft]]:
    """Greedy, sampled and processed, drafts of every kind and of 0 to 3 tokens, over 300 token ids."""
    vocab, generator = 300, torch.Generator().manual_seed(5)
    kinds = list(KINDS.values())
    if not only_judged:
        kinds += [GREEDY, replace(GREEDY, repetition_penalty=2.0), replace(SAMPLED, num_logprobs=2)]
    parts, chunks, drafts = [], [], []
    for index in range(4 * len(kinds)):
        chunks.append(chunk_of((*PROMPT, *range(index % 5)), replace(kinds[index % len(kinds)], seed=index)))
        length = 1 + index % 3 if only_judged else index % 4
        vocabulary = None if index % 3 else torch.arange(0, vocab, 2)
        size = vocab if vocabulary is None else len(vocabulary)
        law = (torch.randn(length, size, generator=generator) * 2).softmax(dim=-1)
        columns = law.multinomial(1, generator=generator).flatten() if length else torch.empty(0, dtype=torch.int64)
        path = columns.tolist() if vocabulary is None else vocabulary[columns].tolist()
        drafts.append(Draft(path, None if index % 5 == 0 and not only_judged else law, vocabulary))
        logits = torch.randn(length + 1, vocab, generator=generator) * 2
        logits[range(length), path] += 7.0  # so that drafts often stand
        parts.append(logits)
    return parts, chunks, drafts


batches = pytest.mark.parametrize("only_judged", [True, False])


@batches
@pytest.mark.parametrize("method", Method)
def test_no_verdict_depends_on_the_rest_of_the_batch(method: Method, only_judged: bool) -> None:
    parts, chunks, drafts = mixed_batch(only_judged=only_judged)
    together = verify(torch.cat(parts), chunks, drafts, method)
    assert {v.num_accepted for v in together if v is not None} == {0, 1, 2, 3}
    for part, chunk, draft, verdict in zip(parts, chunks, drafts, together, strict=True):
        assert verify(part, [chunk], [draft], method) == [verdict]
    order = list(reversed(range(3, len(chunks), 2)))
    shuffled = torch.cat([parts[i] for i in order])
    found = verify(shuffled, [chunks[i] for i in order], [drafts[i] for i in order], method)
    assert found == [together[i] for i in order]


@batches
@pytest.mark.parametrize("method", Method)
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_logits_that_are_not_finite_cost_their_own_sequence_its_verdict(
    bad: float, method: Method, only_judged: bool
) -> None:
    parts, chunks, drafts = mixed_batch(only_judged=only_judged)
    before = verify(torch.cat(parts), chunks, drafts, method)
    for victim in (6, 7, 8, 9):  # drafts of different lengths
        broken = [part.clone() for part in parts]
        broken[victim][0, 17] = bad
        found = verify(torch.cat(broken), chunks, drafts, method)
        assert found == [None if index == victim else verdict for index, verdict in enumerate(before)]
        assert emitted(torch.cat(broken), chunks, drafts, found)[victim] == ()


@batches
@pytest.mark.parametrize("method", Method)
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_draft_whose_own_logits_are_not_finite_does_not_stand(bad: float, method: Method, only_judged: bool) -> None:
    """It is a guess: where plain decoding goes on without an error, so does this, with the tokens that that draws."""
    parts, chunks, drafts = mixed_batch(only_judged=only_judged)
    before = verify(torch.cat(parts), chunks, drafts, method)
    num_cut = 0
    for victim in range(len(chunks)):
        last = len(drafts[victim].token_ids)
        broken = [part.clone() for part in parts]
        broken[victim][last, 17] = bad
        verdicts = verify(torch.cat(broken), chunks, drafts, method)
        found, was, without = verdicts.pop(victim), before[victim], [v for v in before if v is not before[victim]]
        assert verdicts == without
        if last:
            assert found is not None and was is not None and last not in found.rows
            plain = verify(torch.cat(parts), chunks, drafts, Method.COUPLED)[victim]
            assert plain is not None and found.token_ids == plain.token_ids[: len(found.rows)]
            num_cut += last in was.rows
        else:
            assert found is None
    assert num_cut > 3


@batches
@pytest.mark.parametrize("method", Method)
def test_logits_are_left_alone_and_any_float_type_will_do(method: Method, only_judged: bool) -> None:
    parts, chunks, drafts = mixed_batch(only_judged=only_judged)
    logits = torch.cat(parts).bfloat16()
    before = logits.clone()
    verdicts = verify(logits, chunks, drafts, method)
    emitted(logits, chunks, drafts, verdicts)
    assert torch.equal(logits, before)
    wide = logits.float()
    assert verify(wide, chunks, drafts, method) == verdicts
    assert torch.equal(wide, before.float())


def test_logprobs_are_of_the_raw_logits_of_the_row_that_chose() -> None:
    harsh = replace(GREEDY, repetition_penalty=1.5, num_logprobs=2)
    generator = torch.Generator().manual_seed(8)
    logits = torch.randn(9, 20, generator=generator)
    chunks = [chunk_of(PROMPT, harsh), chunk_of(PROMPT, GREEDY), chunk_of(PROMPT, replace(SAMPLED, num_logprobs=0))]
    drafts = [Draft((4, 5, 6, 7), parents=(-1, -1, 1, 2)), Draft((4, 5)), Draft()]
    verdicts = [Verdict((5, 6, 9), (0, 2, 3)), Verdict((4, 8), (0, 1)), Verdict((3,), (0,))]
    found = emitted(logits, chunks, drafts, verdicts)
    reference = logits.double().log_softmax(dim=-1)
    assert [[token.token_id for token in tokens] for tokens in found] == [[5, 6, 9], [4, 8], [3]]
    for token, row in zip((*found[0], *found[2]), (0, 2, 3, 8), strict=True):
        assert token.logprobs is not None
        assert token.logprobs.chosen == pytest.approx(float(reference[row, token.token_id]), abs=1e-5)
        assert [top for top, _ in token.logprobs.top] == reference[row].topk(2).indices.tolist()[: 2 if row < 8 else 0]
    assert [token.logprobs for token in found[1]] == [None, None]


def test_nothing_to_verify_is_no_verdict() -> None:
    assert verify(torch.empty(0, 5), [], [], Method.BLOCK) == []
    assert emitted(torch.empty(0, 5), [], [], []) == []
