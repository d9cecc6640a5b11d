"""Greedy float32 tokens of the whole system equal a plain transformers loop; counters prove that KV was received."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace

import pytest
import pytest_asyncio
import torch

from deploy.local import ClusterConfig, LocalCluster
from protos.client import PdserveClient
from protos.values import Chunk, PromptChunk, Sampling, Summary
from router.choices import choice_seed
from tests.cluster.asking import Answered, ask, assert_at_rest
from tests.cluster.tiny_model import EOS, VOCAB_SIZE, TinyModel

pytestmark = pytest.mark.asyncio(loop_scope="module")

BLOCK_SIZE = 16
MAX_SHARED_TOKENS = 17 * 96  # of the 50 prompts: no more can have been held by the decode worker already
WORKER_ARGUMENTS = ("--dtype", "float32", "--num-blocks", "400", "--max-step-tokens", "96", "--max-running", "24")


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=[(1, 1), (2, 2)], ids=["1P1D", "2P2D"])
async def cluster(request: pytest.FixtureRequest, tiny_moe: TinyModel) -> AsyncIterator[LocalCluster]:
    num_prefill, num_decode = request.param
    config = ClusterConfig(
        model=str(tiny_moe.folder),
        num_prefill=num_prefill,
        num_decode=num_decode,
        num_threads=1,
        worker_arguments=WORKER_ARGUMENTS,
    )
    async with LocalCluster(config) as cluster:
        yield cluster


def mixed_requests() -> list[tuple[list[int], Sampling]]:
    """50 prompts: shorter than a block, exactly one, several; many share a prefix; some answers are one token."""
    rng = random.Random(7)
    shared = [rng.randrange(3, VOCAB_SIZE) for _ in range(96)]
    lengths = [1, 2, 5, 15, 16, 17, 31, 32, 33, 48, 64, 100, 150, 250, 333]
    requests = []
    for number in range(50):
        length = lengths[number % len(lengths)]
        prompt = [rng.randrange(3, VOCAB_SIZE) for _ in range(length)]
        if number % 3 == 0:
            prompt = [*shared[: rng.choice([16, 40, 96])], *prompt]
        max_tokens = 1 if number % 10 == 4 else rng.randrange(2, 40)
        requests.append((prompt, Sampling(temperature=0, max_tokens=max_tokens)))
    return requests


def assert_received(answered: Answered, prompt: list[int]) -> None:
    """Every prompt token was computed or cached on prefill, and received or held on decode; nothing was recomputed."""
    usage = answered.usage
    assert usage.prompt_tokens == len(prompt)
    assert usage.output_tokens == len(answered.token_ids)
    assert usage.prefill_computed_tokens + usage.prefill_cached_tokens == len(prompt)
    assert (usage.decode_computed_tokens, usage.decode_recomputed_tokens) == (0, 0)
    assert (usage.num_resumes, usage.num_retries, usage.num_preemptions) == (0, 0, 0)
    if len(answered.token_ids) > 1:
        assert usage.disaggregated
        assert usage.decode_received_tokens + usage.decode_cached_tokens == len(prompt)


async def test_fifty_mixed_prompts_at_once(cluster: LocalCluster, tiny_moe: TinyModel) -> None:
    requests = mixed_requests()
    async with PdserveClient(cluster.router_address) as client:
        answers = await asyncio.gather(*(ask(client, prompt, sampling) for prompt, sampling in requests))
    num_sent_at_least = -MAX_SHARED_TOKENS
    num_received = 0
    for (prompt, sampling), answered in zip(requests, answers, strict=True):
        tiny_moe.assert_greedy(prompt, answered.token_ids)
        assert EOS not in answered.token_ids[:-1]
        is_stopped = answered.token_ids[-1] == EOS
        assert answered.finish_reason == ("stop" if is_stopped else "length")
        assert is_stopped or len(answered.token_ids) == sampling.max_tokens
        assert_received(answered, prompt)
        num_received += answered.usage.decode_received_tokens
        num_sent_at_least += len(prompt) if len(answered.token_ids) > 1 else 0
    assert num_received >= num_sent_at_least > 1000
    await assert_at_rest(cluster)


@pytest.mark.parametrize("length", [9, 16, 40, 64])
async def test_second_time_decode_holds_the_prefix(cluster: LocalCluster, tiny_moe: TinyModel, length: int) -> None:
    """Each worker computes, or is sent, the full blocks of a prompt once at most, whichever is chosen when."""
    rng = random.Random(length)
    prompt = [rng.randrange(3, VOCAB_SIZE) for _ in range(length)]
    async with PdserveClient(cluster.router_address) as client:
        answers = [await ask(client, prompt, Sampling(temperature=0, max_tokens=6)) for _ in range(12)]
    num_full, num_reused = length // BLOCK_SIZE * BLOCK_SIZE, (length - 1) // BLOCK_SIZE * BLOCK_SIZE
    assert answers[0].usage.decode_received_tokens == length
    held = [answered.usage.decode_cached_tokens for answered in answers]
    cached = [answered.usage.prefill_cached_tokens for answered in answers]
    assert len(answers) - held.count(num_full) <= (cluster.config.num_decode if num_full else 0)
    assert len(answers) - cached.count(num_reused) <= (cluster.config.num_prefill if num_reused else 0)
    for answered in answers:
        assert answered.usage.decode_received_tokens == length - answered.usage.decode_cached_tokens
        tiny_moe.assert_greedy(prompt, answered.token_ids)
        assert_received(answered, prompt)
    await assert_at_rest(cluster)


@pytest.mark.parametrize("length", [40, 48])
async def test_answers_to_one_prompt_share_its_prefill(cluster: LocalCluster, length: int) -> None:
    """Each is what it would be alone with its seed; of all but the first only the prompt's last block is computed."""
    rng = random.Random(100 + length)
    prompt = [rng.randrange(3, VOCAB_SIZE) for _ in range(length)]
    sampling = Sampling(temperature=1, seed=9, max_tokens=12, ignore_eos=True)
    texts = [""] * 4
    async with PdserveClient(cluster.router_address) as client:
        async for part in client.generate(prompt, n=4, sampling=sampling):
            if isinstance(part, Summary):
                usage = part.usage
            else:
                texts[part.choice] += part.text
        alone = [await ask(client, prompt, replace(sampling, seed=choice_seed(9, choice))) for choice in range(4)]
    assert texts == [answered.text for answered in alone]
    assert len(set(texts)) == 4
    held_by_prefill = (length - 1) // BLOCK_SIZE * BLOCK_SIZE  # the last token's logits are wanted
    held_by_decode = length // BLOCK_SIZE * BLOCK_SIZE
    assert (usage.prompt_tokens, usage.output_tokens) == (length, 48)
    assert (usage.prefill_computed_tokens, usage.prefill_cached_tokens) == (
        length + 3 * (length - held_by_prefill),
        3 * held_by_prefill,
    )
    assert (usage.decode_received_tokens, usage.decode_cached_tokens) == (
        length + 3 * (length - held_by_decode),
        3 * held_by_decode,
    )
    await assert_at_rest(cluster)


@pytest.mark.parametrize("cuts", [(1, 7, 0), (11, 2, 10)])
async def test_answers_go_on_behind_what_is_known_of_them(cluster: LocalCluster, cuts: tuple[int, ...]) -> None:
    """Another router could be asked: text, logprobs and tokens join what there was."""
    rng = random.Random(7)
    prompt = [rng.randrange(3, VOCAB_SIZE) for _ in range(33)]
    sampling = Sampling(temperature=1, seed=9, max_tokens=12, ignore_eos=True, logprobs=3)
    async with PdserveClient(cluster.router_address) as client:
        parts = [part async for part in client.generate(prompt, n=3, sampling=sampling)]
        whole = [[part for part in parts if isinstance(part, Chunk) and part.choice == choice] for choice in range(3)]
        tokens = [[token for part in of_one for token in part.token_ids] for of_one in whole]
        emitted = [known[:cut] for known, cut in zip(tokens, cuts, strict=True)]
        parts = [part async for part in client.generate(prompt, n=3, sampling=sampling, emitted=emitted)]
    for choice, cut in enumerate(cuts):
        rest = [part for part in parts if isinstance(part, Chunk) and part.choice == choice]
        assert [token for part in rest for token in part.token_ids] == tokens[choice][cut:]
        before = [part for part in whole[choice] if part.output_index < cut]
        assert "".join(part.text for part in [*before, *rest]) == "".join(part.text for part in whole[choice])
        logprobs = [each for part in rest for each in part.logprobs]
        expected = [each for part in whole[choice] for each in part.logprobs][cut:]
        assert [each.token_id for each in logprobs] == [each.token_id for each in expected]
        assert [each.logprob for each in logprobs] == pytest.approx([each.logprob for each in expected], abs=1e-4)
    await assert_at_rest(cluster)


async def test_stop_on_the_first_token(cluster: LocalCluster, tiny_moe: TinyModel) -> None:
    rng = random.Random(3)
    async with PdserveClient(cluster.router_address) as client:
        for length in (5, 16, 50):
            prompt = [rng.randrange(3, VOCAB_SIZE) for _ in range(length)]
            first = tiny_moe.greedy(prompt, 1)[0]
            sampling = Sampling(temperature=0, max_tokens=20, stop_token_ids=[first])
            answered = await ask(client, prompt, sampling)
            assert answered.token_ids == [first]
            assert (answered.finish_reason, answered.text) == ("stop", "")
            assert_received(answered, prompt)
    await assert_at_rest(cluster)


async def test_min_tokens_holds_the_stop_back(cluster: LocalCluster, tiny_moe: TinyModel) -> None:
    prompt = [11, 12, 13, 14, 15]
    plain = tiny_moe.greedy(prompt, 12)
    async with PdserveClient(cluster.router_address) as client:
        stop = plain[3]
        sampling = Sampling(temperature=0, max_tokens=12, min_tokens=6, stop_token_ids=[stop], ignore_eos=True)
        answered = await ask(client, prompt, sampling)
    assert len(answered.token_ids) >= 6
    assert answered.token_ids[: plain.index(stop)] == plain[: plain.index(stop)]
    assert stop not in answered.token_ids[:5]


async def test_bias_moves_the_choice_and_not_the_logprobs(cluster: LocalCluster, tiny_moe: TinyModel) -> None:
    prompt = [31, 32, 33]
    rng = random.Random(4)
    bias = {token_id: rng.uniform(-6, 6) for token_id in range(0, VOCAB_SIZE, 2)}
    async with PdserveClient(cluster.router_address) as client:
        sampling = Sampling(temperature=0, max_tokens=12, logprobs=0, logit_bias=bias, ignore_eos=True)
        answered = await ask(client, prompt, sampling)
    own = tiny_moe.logprobs(prompt, answered.token_ids)
    added = torch.zeros(VOCAB_SIZE)
    added[list(bias)] = torch.tensor(list(bias.values()))
    assert answered.token_ids == (own + added).argmax(-1).tolist()
    assert answered.token_ids != own.argmax(-1).tolist()
    for each, reference in zip(answered.logprobs, own, strict=True):
        assert each.logprob == pytest.approx(float(reference[each.token_id]), abs=1e-3)


async def test_text_is_the_decoded_tokens(cluster: LocalCluster, tiny_moe: TinyModel) -> None:
    from model.tokenizer import Tokenizer

    tokenizer = Tokenizer.load(tiny_moe.folder)
    async with PdserveClient(cluster.router_address) as client:
        answered = await ask(client, "Grüße, 世界 🌍", Sampling(temperature=1, seed=5, max_tokens=60, ignore_eos=True))
    assert answered.text == tokenizer.decode(answered.token_ids)


@pytest.mark.parametrize("max_tokens", [1, 5])
async def test_prompt_is_scored_whole_whatever_the_caches_hold(
    cluster: LocalCluster, tiny_moe: TinyModel, max_tokens: int
) -> None:
    """In several steps of at most 96 tokens, and the second and third time although all its KV is there already."""
    rng = random.Random(max_tokens)
    prompt = [rng.randrange(3, VOCAB_SIZE) for _ in range(250)]
    expected = tiny_moe.logprobs(prompt[:1], prompt[1:])
    sampling = Sampling(temperature=0, max_tokens=max_tokens, prompt_logprobs=3, ignore_eos=True)
    async with PdserveClient(cluster.router_address) as client:
        for _ in range(3):
            *chunks, summary = [part async for part in client.generate(prompt, sampling=sampling)]
            assert isinstance(summary, Summary) and summary.usage.prefill_computed_tokens == 250
            assert_scored(chunks, prompt, expected)
            answer = [token for part in chunks if isinstance(part, Chunk) for token in part.token_ids]
            tiny_moe.assert_greedy(prompt, answer)
    await assert_at_rest(cluster)


def assert_scored(parts: Sequence[Chunk | Summary], prompt: list[int], expected: torch.Tensor) -> None:
    """Chunks of the prompt come first; its first token has no logprob."""
    chunks = [part for part in parts if isinstance(part, Chunk)]
    is_prompt = [chunk.prompt is not None for chunk in chunks]
    assert is_prompt == sorted(is_prompt, reverse=True)
    first, *scores = [each for chunk in chunks if chunk.prompt is not None for each in chunk.prompt.logprobs]
    assert first is None
    assert [each.token_id for each in scores if each is not None] == prompt[1:]
    for each, reference in zip(scores, expected, strict=True):
        assert each is not None
        assert each.logprob == pytest.approx(float(reference[each.token_id]), abs=1e-3)
        best = reference.topk(3)
        assert [logprob for _, logprob in each.top] == pytest.approx(best.values.tolist(), abs=1e-3)
        assert [float(reference[token]) for token, _ in each.top] == pytest.approx(best.values.tolist(), abs=1e-3)


async def test_echo_is_the_prompt_as_the_model_sees_it(cluster: LocalCluster, tiny_moe: TinyModel) -> None:
    from model.tokenizer import Tokenizer

    text = "Grüße, 世界 🌍"
    async with PdserveClient(cluster.router_address) as client:
        answer = client.generate(text, echo=True, n=2, sampling=Sampling(max_tokens=3, ignore_eos=True))
        first, *others = [part async for part in answer if not isinstance(part, Summary)]
    assert first.prompt == PromptChunk(tuple(Tokenizer.load(tiny_moe.folder).encode(text)), text)
    assert sum(len(chunk.token_ids) for chunk in others) == 6


async def test_logprobs_of_every_token(cluster: LocalCluster, tiny_moe: TinyModel) -> None:
    prompt = [21, 22, 23, 24]
    async with PdserveClient(cluster.router_address) as client:
        answered = await ask(client, prompt, Sampling(temperature=0, max_tokens=8, logprobs=3, ignore_eos=True))
    assert [each.token_id for each in answered.logprobs] == answered.token_ids
    expected = tiny_moe.logprobs(prompt, answered.token_ids)
    for each, reference in zip(answered.logprobs, expected, strict=True):
        assert each.logprob == pytest.approx(float(reference[each.token_id]), abs=1e-3)
        best = reference.topk(3)
        assert [token_id for token_id, _ in each.top] == best.indices.tolist()
        assert [logprob for _, logprob in each.top] == pytest.approx(best.values.tolist(), abs=1e-3)
