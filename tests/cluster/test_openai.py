"""OpenAI's client through the whole system: the tokens of a plain loop, from KV that was handed over."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import openai
import pytest
import pytest_asyncio

from deploy.local import ClusterConfig, LocalCluster
from model.chat_template import ChatMessage
from model.tokenizer import Tokenizer
from protos.client import PdserveClient
from protos.values import Chunk, Sampling
from tests.cluster.asking import assert_at_rest
from tests.cluster.tiny_model import TinyModel

pytestmark = pytest.mark.asyncio(loop_scope="module")

WORKER_ARGUMENTS = ("--dtype", "float32", "--num-blocks", "200")
PROMPT = [40 + index * 7 % 50 for index in range(37)]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster(tiny_moe: TinyModel) -> AsyncIterator[LocalCluster]:
    config = ClusterConfig(model=str(tiny_moe.folder), http_port=0, num_threads=1, worker_arguments=WORKER_ARGUMENTS)
    async with LocalCluster(config) as cluster:
        yield cluster


@pytest_asyncio.fixture(loop_scope="module")
async def client(cluster: LocalCluster) -> AsyncIterator[openai.AsyncOpenAI]:
    """Afterwards no block is held."""
    url = f"http://{cluster.http_address}/v1"
    async with openai.AsyncOpenAI(base_url=url, api_key="any", max_retries=0) as client:
        yield client
    await assert_at_rest(cluster)


@pytest.fixture(scope="module")
def tokenizer(tiny_moe: TinyModel) -> Tokenizer:
    return Tokenizer.load(tiny_moe.folder)


async def test_completion_is_that_of_a_plain_loop(
    client: openai.AsyncOpenAI, cluster: LocalCluster, tiny_moe: TinyModel, tokenizer: Tokenizer
) -> None:
    expected = tiny_moe.greedy(PROMPT, 12)
    model = (await client.models.list()).data[0].id
    assert model == str(tiny_moe.folder)
    for num_cached in (0, 32):  # two whole blocks of the first time's
        answer = await client.completions.create(
            model=model, prompt=PROMPT, temperature=0, max_tokens=12, logprobs=1, extra_body={"ignore_eos": True}
        )
        told = answer.choices[0].logprobs
        assert answer.choices[0].text == tokenizer.decode(expected)
        assert answer.choices[0].finish_reason == "length" and told is not None
        reference = tiny_moe.logprobs(PROMPT, expected)
        wanted = [float(row[token]) for row, token in zip(reference, expected, strict=True)]
        assert told.token_logprobs == pytest.approx(wanted, abs=1e-3)
        assert answer.usage is not None and (details := answer.usage.prompt_tokens_details) is not None
        assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (37, 12)
        assert details.cached_tokens == num_cached


async def test_streamed_chats_at_once(client: openai.AsyncOpenAI, tiny_moe: TinyModel, tokenizer: Tokenizer) -> None:
    async def ask(question: str) -> tuple[str, str | None]:
        stream = await client.chat.completions.create(
            model=str(tiny_moe.folder),
            messages=[{"role": "user", "content": question}],
            temperature=0,
            max_completion_tokens=10,
            stream=True,
        )
        chunks = [chunk.choices[0] async for chunk in stream]
        return "".join(chunk.delta.content or "" for chunk in chunks), chunks[-1].finish_reason

    questions = [f"question {number}" for number in range(12)]
    for question, (text, reason) in zip(questions, await asyncio.gather(*map(ask, questions)), strict=True):
        greedy = tiny_moe.greedy(tokenizer.encode_chat([ChatMessage("user", question)]), 10)
        ended = next((index for index, token in enumerate(greedy) if token in tokenizer.eos_token_ids), None)
        assert text == tokenizer.decode(greedy[:ended])
        assert reason == ("length" if ended is None else "stop")


async def test_sync_client_and_the_same_answer_through_both_doors(
    client: openai.AsyncOpenAI, cluster: LocalCluster, tiny_moe: TinyModel
) -> None:
    def ask() -> str:
        with openai.OpenAI(base_url=str(client.base_url), api_key="any") as plain:
            stream = plain.completions.create(
                model=str(tiny_moe.folder), prompt="Grüße, 世界 🌍", seed=5, max_tokens=40, stream=True
            )
            return "".join(chunk.choices[0].text for chunk in stream)

    said = await asyncio.to_thread(ask)
    async with PdserveClient(cluster.router_address) as ours:
        parts = [part async for part in ours.generate("Grüße, 世界 🌍", sampling=Sampling(seed=5, max_tokens=40))]
    assert said == "".join(part.text for part in parts if isinstance(part, Chunk)) != ""


async def test_leaving_early_frees_everything(client: openai.AsyncOpenAI, tiny_moe: TinyModel) -> None:
    long = {"model": str(tiny_moe.folder), "prompt": PROMPT, "max_tokens": 400}
    async with await client.completions.create(**long, stream=True, extra_body={"ignore_eos": True}) as stream:  # type: ignore[call-overload]
        await anext(stream)
    waiting = asyncio.create_task(client.completions.create(**long, extra_body={"ignore_eos": True}))  # type: ignore[call-overload]
    await asyncio.sleep(0.2)  # it is somewhere on its way
    waiting.cancel()


async def test_errors(client: openai.AsyncOpenAI, tiny_moe: TinyModel) -> None:
    with pytest.raises(openai.NotFoundError, match=str(tiny_moe.folder)):
        await client.completions.create(model="gpt-4", prompt="hi")
    with pytest.raises(openai.BadRequestError, match="max_tokens is 100000; it must be at most") as caught:
        await client.chat.completions.create(
            model=str(tiny_moe.folder), messages=[{"role": "user", "content": "hi"}], max_tokens=100_000
        )
    assert caught.value.param == "max_tokens"
