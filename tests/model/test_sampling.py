from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import (
    MinNewTokensLengthLogitsProcessor,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from model.runner import NonFiniteLogits, SampledToken
from model.sampling import COLDEST, Row, largest, processed_scores, sample
from model.sampling_params import (
    LEAST_REPETITION_PENALTY,
    MAX_TEMPERATURE,
    MOST_REPETITION_PENALTY,
    SamplingParams,
)
from tests.model.sampling_cases import FILTERS, GREEDY, SAMPLED, VOCAB, mixed_rows, random_logits, row

pytestmark = pytest.mark.usefixtures("one_thread")


def sampled_tokens(logits: Tensor, rows: list[Row]) -> list[SampledToken]:
    outcomes = sample(logits, rows)
    tokens = [outcome for outcome in outcomes if isinstance(outcome, SampledToken)]
    assert len(tokens) == len(outcomes) == len(rows)
    return tokens


def tokens(logits: Tensor, rows: list[Row]) -> list[int]:
    return [sampled.token_id for sampled in sampled_tokens(logits, rows)]


def processed(logits: Tensor, chunk: Row) -> Tensor:
    """What transformers and OpenAI's formula make of one row of logits, [V]."""
    params = chunk.sampling
    ids, scores = torch.LongTensor([chunk.history]), logits.clone().unsqueeze(0)
    if params.logit_bias:
        bias = {(token,): value for token, value in params.logit_bias if token < len(logits)}
        scores = SequenceBiasLogitsProcessor(bias)(ids, scores)
    if params.repetition_penalty != 1.0:
        scores = RepetitionPenaltyLogitsProcessor(params.repetition_penalty)(ids, scores)
    for token, count in Counter(chunk.history[chunk.num_prompt_tokens :]).items():
        scores[0, token] -= params.frequency_penalty * count + params.presence_penalty
    if params.min_tokens and params.stop_token_ids:
        stop = MinNewTokensLengthLogitsProcessor(
            chunk.num_prompt_tokens, params.min_tokens, list(params.stop_token_ids), device="cpu"
        )
        scores = stop(ids, scores)
    if params.temperature not in (0.0, 1.0):
        scores = TemperatureLogitsWarper(params.temperature)(ids, scores)
    if params.top_k:
        scores = TopKLogitsWarper(params.top_k)(ids, scores)
    if params.top_p < 1.0:
        scores = TopPLogitsWarper(params.top_p)(ids, scores)
    if params.min_p:
        scores = MinPLogitsWarper(params.min_p)(ids, scores)
    return scores[0]


def draws(logits: Tensor, chunk: Row, num_draws: int) -> Counter[int]:
    """Of the same row under different seeds."""
    rows = [replace(chunk, sampling=replace(chunk.sampling, seed=seed)) for seed in range(num_draws)]
    return Counter(tokens(logits.expand(num_draws, -1), rows))


def assert_drawn_from(counts: Counter[int], probs: Tensor) -> None:
    """No token without mass, and a chi-square within five standard deviations (rare tokens are one cell)."""
    num_draws = counts.total()
    assert all(probs[token] > 0 for token in counts), "a token was drawn that the filters exclude"
    cells: list[tuple[float, float]] = []
    rest_found, rest_expected = 0.0, 0.0
    for token, prob in enumerate(probs.tolist()):
        if prob * num_draws >= 10:
            cells.append((counts[token], prob * num_draws))
        else:
            rest_found, rest_expected = rest_found + counts[token], rest_expected + prob * num_draws
    if rest_expected >= 5:
        cells.append((rest_found, rest_expected))
    statistic = sum((found - expected) ** 2 / expected for found, expected in cells)
    degrees = max(1, len(cells) - 1)
    assert statistic < degrees + 5 * math.sqrt(2 * degrees)


@pytest.mark.parametrize("name", FILTERS)
def test_draws_come_from_the_distribution_of_the_reference(name: str) -> None:
    logits = random_logits(1, seed=3)[0]
    likeliest = logits.topk(6).indices.tolist()
    chunk = row(FILTERS[name], history=[5, 6, likeliest[0], 7, likeliest[1], likeliest[1], 9], num_prompt_tokens=4)
    logits[2] = 4.0  # a stop token that would often be drawn
    assert_drawn_from(draws(logits, chunk, 2000), processed(logits, chunk).softmax(dim=-1))


@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    temperature=st.sampled_from([0.2, 1.0, 4.0]),
    top_k=st.integers(0, 20),
    top_p=st.floats(0.01, 1.0),
    min_p=st.sampled_from([0.0, 0.001, 0.2]),
    repetition=st.sampled_from([0.5, 1.0, 1.5]),
    history=st.lists(st.integers(0, 19), min_size=1, max_size=12),
)
def test_what_passes_the_filters_is_what_passes_the_references(
    seed: int, temperature: float, top_k: int, top_p: float, min_p: float, repetition: float, history: list[int]
) -> None:
    """On 20 tokens, the 200 draws of a row cover whatever has a fair mass, and never touch what has none."""
    params = SamplingParams(
        max_tokens=99, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, repetition_penalty=repetition
    )
    logits = random_logits(1, seed, vocab=20)[0]
    chunk = row(params, history)
    probs = processed(logits, chunk).softmax(dim=-1)
    counts = draws(logits, chunk, 200)
    sure = {token for token, prob in enumerate(probs.tolist()) if prob > 0.1}
    assert sure <= set(counts)
    borderline = probs[sorted(counts)] == 0
    assert not borderline.any()


def test_greedy_is_the_argmax_after_penalties() -> None:
    logits = random_logits(4, seed=9)
    histories = [logits[index].topk(3).indices.tolist() for index in range(4)]
    plain = [row(GREEDY, history) for history in histories]
    assert tokens(logits, plain) == logits.argmax(dim=-1).tolist()
    penalised = [row(replace(GREEDY, repetition_penalty=3.0, presence_penalty=1.0), h) for h in histories]
    expected = [int(processed(logits[index], chunk).argmax()) for index, chunk in enumerate(penalised)]
    assert tokens(logits, penalised) == expected
    assert expected != logits.argmax(dim=-1).tolist()


def test_bias_comes_before_penalties_and_counts_in_greedy_rows_too() -> None:
    logits = torch.tensor([[1.0, 2.0, 3.0, 4.0]])
    pushed = replace(GREEDY, logit_bias=((0, 4.0), (3, -1.5)))
    assert not row(pushed).is_plain_greedy
    assert tokens(logits, [row(pushed)]) == [0]
    penalised = replace(pushed, repetition_penalty=2.0)  # of (1 + 4) / 2 and 3
    assert tokens(logits, [row(penalised, [0])]) == [2]
    torch.testing.assert_close(processed_scores(logits, [row(penalised, [0])]), torch.tensor([[2.5, 2.0, 3.0, 2.5]]))


def test_penalties_count_prompt_and_output_apart() -> None:
    logits = torch.zeros(1, 8)
    logits[0, :3] = torch.tensor([2.0, 1.9, 1.8])
    presence = replace(GREEDY, presence_penalty=1.0)
    assert tokens(logits, [row(presence, [0, 1, 2], num_prompt_tokens=3)]) == [0]  # prompt does not count
    assert tokens(logits, [row(presence, [0, 0, 1], num_prompt_tokens=1)]) == [2]  # 1.0, 0.9, 1.8
    frequency = replace(GREEDY, frequency_penalty=0.06)
    assert tokens(logits, [row(frequency, [5, 0], num_prompt_tokens=1)]) == [0]  # 1.94
    assert tokens(logits, [row(frequency, [5, 0, 0], num_prompt_tokens=1)]) == [1]  # 1.88
    repetition = replace(GREEDY, repetition_penalty=1.07)
    assert tokens(logits, [row(repetition, [0, 5], num_prompt_tokens=2)]) == [1]  # prompt counts; 1.87


def test_repetition_pushes_a_negative_logit_further_down() -> None:
    logits = torch.tensor([[-1.0, -1.1, -9.0]])
    assert tokens(logits, [row(replace(GREEDY, repetition_penalty=1.2), [0])]) == [1]


def test_min_tokens_forbids_stops_until_so_many_tokens_are_out() -> None:
    logits = torch.tensor([[0.0, 5.0, 3.0, 1.0]])
    params = replace(GREEDY, min_tokens=2, stop_token_ids=(1, 2, 1000))
    assert tokens(logits, [row(params, [0], num_prompt_tokens=1)]) == [3]
    assert tokens(logits, [row(params, [0, 3], num_prompt_tokens=1)]) == [3]
    assert tokens(logits, [row(params, [0, 3, 3], num_prompt_tokens=1)]) == [1]


def test_ties_at_the_edge_of_a_filter_all_stay() -> None:
    logits = torch.tensor([2.0, 1.0, 1.0, 1.0, -30.0])
    for params in (replace(SAMPLED, top_k=2), replace(SAMPLED, top_p=0.6)):
        counts = draws(logits, row(params), 2000)
        assert_drawn_from(counts, torch.tensor([2.0, 1.0, 1.0, 1.0, -math.inf]).softmax(dim=-1))


def test_top_p_is_exact_where_the_nucleus_is_larger_than_the_first_look() -> None:
    """4,000 nearly equal tokens, half the mass: what is drawn must be the upper half, every part of it alike."""
    logits = torch.linspace(0.0, 1e-3, 4000)[torch.randperm(4000, generator=torch.Generator().manual_seed(1))]
    kept = TopPLogitsWarper(0.5)(torch.tensor([[1]]), logits.unsqueeze(0))[0] > -math.inf
    counts = draws(logits, row(replace(SAMPLED, top_p=0.5)), 600)
    drawn = torch.tensor(sorted(counts))
    outside = drawn[~kept[drawn]]
    assert len(outside) <= 1  # float32 sums of 2,000 terms may disagree on the very last token
    assert len(counts) > 450


def test_a_row_gets_the_same_token_in_any_batch() -> None:
    logits, rows = random_logits(20, seed=5), mixed_rows(20)
    together = tokens(logits, rows)
    assert [tokens(logits[index : index + 1], [rows[index]])[0] for index in range(20)] == together
    order = [7, 3, 11, 0, 2]
    assert tokens(logits[order], [rows[index] for index in order]) == [together[index] for index in order]


def test_noise_is_keyed_by_seed_and_position_only() -> None:
    logits = torch.zeros(1, VOCAB)
    first = tokens(logits, [row(replace(SAMPLED, seed=4), [1, 2, 3])])
    assert tokens(logits, [row(replace(SAMPLED, seed=4), [9, 9, 9], num_prompt_tokens=3)]) == first
    assert tokens(logits, [row(replace(SAMPLED, seed=5), [1, 2, 3])]) != first
    assert tokens(logits, [row(replace(SAMPLED, seed=4), [1, 2, 3, 4])]) != first
    assert tokens(logits, [row(replace(SAMPLED, seed=4, top_p=0.999999), [1, 2, 3])]) == first  # filters keep the noise


def test_greedy_and_sampled_rows_mix() -> None:
    logits = random_logits(64, seed=2)
    rows = [row(GREEDY if index % 2 else replace(SAMPLED, seed=index)) for index in range(64)]
    found, likeliest = tokens(logits, rows), logits.argmax(dim=-1).tolist()
    assert found[1::2] == likeliest[1::2]
    assert found[::2] != likeliest[::2]


def test_any_temperature_is_safe() -> None:
    logits = random_logits(1, seed=6)
    for temperature in (5e-324, 1e-30, COLDEST):
        assert tokens(logits, [row(replace(SAMPLED, temperature=temperature))]) == logits.argmax(dim=-1).tolist()
    hot = draws(logits[0], row(replace(SAMPLED, temperature=MAX_TEMPERATURE)), 3000)
    assert_drawn_from(hot, (logits[0] / MAX_TEMPERATURE).softmax(dim=-1))


def test_logprobs_are_of_the_untouched_logits() -> None:
    logits = random_logits(3, seed=8)
    harsh = replace(FILTERS["all"], min_tokens=0, num_logprobs=4, seed=3)
    results = sampled_tokens(logits, [row(harsh, [1, 2, 3]), row(GREEDY), row(replace(GREEDY, num_logprobs=0))])
    reference = logits.double().log_softmax(dim=-1)
    assert results[1].logprobs is None
    for index, count in ((0, 4), (2, 0)):
        logprobs = results[index].logprobs
        assert logprobs is not None
        assert logprobs.chosen == pytest.approx(float(reference[index, results[index].token_id]), abs=1e-5)
        values, ids = reference[index].topk(max(count, 1))
        assert [token for token, _ in logprobs.top] == ids.tolist()[:count]
        assert [value for _, value in logprobs.top] == pytest.approx(values.tolist()[:count], abs=1e-5)


def test_logits_are_left_alone_and_any_float_type_will_do() -> None:
    logits = random_logits(2, seed=4).bfloat16()
    before = logits.clone()
    rows = [row(FILTERS["all"], [1, 2]), row(replace(GREEDY, num_logprobs=2))]
    found = tokens(logits, rows)
    assert torch.equal(logits, before)
    assert tokens(logits.float(), rows) == found


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("params", [GREEDY, SAMPLED, FILTERS["all"]])
def test_rows_that_are_not_finite_have_no_token_and_leave_the_others_theirs(bad: float, params: SamplingParams) -> None:
    rows = [row(replace(params, seed=seed, num_logprobs=1)) for seed in range(5)]
    logits = random_logits(5)
    expected = sampled_tokens(logits, rows)
    logits[1, 17] = bad
    logits[4] = -math.inf
    found = sample(logits, rows)
    assert [isinstance(outcome, NonFiniteLogits) for outcome in found] == [False, True, False, False, True]
    assert [found[index] for index in (0, 2, 3)] == [expected[index] for index in (0, 2, 3)]
    assert [type(outcome) for outcome in sample(logits[[1, 4]], [rows[1], rows[4]])] == [NonFiniteLogits] * 2


def test_a_forbidden_token_is_never_drawn_and_no_error() -> None:
    logits = torch.full((1, 8), -math.inf)
    logits[0, 5] = -3.0
    for params in (GREEDY, SAMPLED, replace(SAMPLED, top_p=0.5, top_k=3, min_p=0.1)):
        assert tokens(logits, [row(params)]) == [5]
    assert isinstance(sample(torch.full((1, 8), -math.inf), [row(GREEDY)])[0], NonFiniteLogits)


@pytest.mark.parametrize("name", FILTERS)
def test_processed_scores_are_the_references_up_to_a_constant(name: str) -> None:
    logits = random_logits(3, seed=11)
    likeliest = logits[0].topk(3).indices.tolist()
    rows = [row(FILTERS[name], [5, 6, *likeliest], 3), row(GREEDY, [1, 2]), row(SAMPLED, [3])]
    rows.append(replace(rows[0], history=[5, 6, likeliest[0]], drafted=tuple(likeliest[1:])))  # all the same
    logits = torch.cat([logits, logits[:1]])
    before = logits.clone()
    found = processed_scores(logits, rows)
    assert torch.equal(logits, before)
    assert torch.equal(found[3], found[0])
    assert rows[3].position == rows[0].position == 5
    for index in range(3):
        expected = processed(logits[index], rows[index])
        assert torch.equal(found[index].isinf(), expected.isinf())
        torch.testing.assert_close(found[index].softmax(dim=-1), expected.softmax(dim=-1), rtol=1e-4, atol=1e-7)


def test_processed_scores_of_greedy_rows_keep_their_argmax() -> None:
    logits = random_logits(2, seed=9)
    history = logits[0].topk(3).indices.tolist()
    rows = [row(replace(GREEDY, repetition_penalty=3.0), history), row(replace(SAMPLED, top_k=5))]
    assert processed_scores(logits, rows)[0].argmax() == tokens(logits, rows)[0]
    torch.testing.assert_close(processed_scores(logits, rows)[0], processed(logits[0], rows[0]))


@pytest.mark.parametrize("penalty", [LEAST_REPETITION_PENALTY, MOST_REPETITION_PENALTY])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_penalties_that_overflow_end_nobodys_step(penalty: float, temperature: float) -> None:
    """The likeliest of the tokens that are rewarded beyond measure comes; other rows are as without it."""
    logits = torch.tensor([[0.0, 1e37, 3e37, -2e37, 2e37]] * 2)
    plain = SamplingParams(max_tokens=9, temperature=temperature, top_p=0.9, seed=5)
    rows = [Row([0, 1, 3], 2, replace(plain, repetition_penalty=penalty)), Row([0, 1, 3], 2, plain)]
    found = sample(logits, rows)
    assert found[1:] == sample(logits[1:], rows[1:])
    assert isinstance(found[0], SampledToken)
    assert (found[0].token_id == 1) is (penalty < 1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_largest_is_the_first_of_those_that_tie(dtype: torch.dtype) -> None:
    """Over lengths on both sides of every vector width; NaN counts as the largest, so that it is seen."""
    generator = torch.Generator().manual_seed(0)
    for vocab_size in (1, 3, 16, 17, 63, 257, 1000):
        scores = torch.randint(-3, 4, (40, vocab_size), generator=generator).to(dtype)  # many ties
        scores[1] = -math.inf
        scores[2, vocab_size // 2] = math.inf
        scores[3, vocab_size // 2 :] = math.nan
        values, indexes = largest(scores)
        rows = scores.double().tolist()
        rows[3] = [math.inf if math.isnan(score) else score for score in rows[3]]
        assert indexes.tolist() == [row.index(max(row)) for row in rows]
        assert torch.equal(values.nan_to_num(7.0), scores.amax(dim=-1).nan_to_num(7.0))
    assert [tuple(found.shape) for found in largest(torch.empty(0, 5))] == [(0,), (0,)]
