"""The prompt before the answer: in order, in parts that are not too large, once, and not before there is an answer."""

from __future__ import annotations

import pytest

from protos.client import PdserveClient
from protos.errors import NoWorker
from protos.values import Chunk, Sampling
from tests.router.asking import PROMPT, DieOnce, all_workers, answer
from tests.router.fakes import FakeFleet, FakeTokenizer, plain_loop, running_fleet

EVEN = list(range(20, 40))  # whose text is ten characters, of two tokens each


@pytest.fixture(autouse=True)
def halves(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each token is half a character: an even one and an odd one behind it are a whole one."""

    def token_bytes(tokenizer: FakeTokenizer, token_id: int) -> bytes:
        return "é".encode()[token_id % 2 : token_id % 2 + 1]

    monkeypatch.setattr(FakeTokenizer, "token_bytes", token_bytes)


async def chunks_of(client: PdserveClient, prompt: list[int], n: int = 1) -> list[Chunk]:
    answer = client.generate(prompt, n=n, echo=True, sampling=Sampling(max_tokens=4))
    return [part async for part in answer if isinstance(part, Chunk)]


@pytest.mark.parametrize("n", [1, 3])
async def test_prompt_comes_once_before_all_tokens(fleet: FakeFleet, client: PdserveClient, n: int) -> None:
    first, *others = await chunks_of(client, EVEN, n)
    assert first.prompt is not None
    assert (first.prompt.token_ids, first.prompt.text) == (tuple(EVEN), "é" * 10)
    assert (first.token_ids, first.text, first.output_index) == ((), "", 0)
    assert all(chunk.prompt is None for chunk in others)
    assert [token for chunk in others for token in chunk.token_ids if chunk.choice == 0] == plain_loop(EVEN, 4)
    assert sum(len(chunk.token_ids) for chunk in others) == 4 * n


async def test_long_prompt_comes_in_parts_of_whole_characters(
    fleet: FakeFleet, client: PdserveClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("router.echo.MAX_TOKENS", 7)
    parts = [chunk.prompt for chunk in await chunks_of(client, [*EVEN, 50]) if chunk.prompt is not None]
    assert [len(part.token_ids) for part in parts] == [7, 7, 7]
    assert [part.text for part in parts] == ["é" * 3, "é" * 4, "é" * 3 + "\ufffd"]


async def test_not_asked_for_is_not_told(client: PdserveClient) -> None:
    _, chunks, _ = await answer(client, Sampling(max_tokens=4))
    assert all(chunk.prompt is None for chunk in chunks)


async def test_refusal_comes_before_any_prompt() -> None:
    async with running_fleet() as fleet, PdserveClient(fleet.router.address) as client:
        with pytest.raises(NoWorker):
            await anext(client.generate(PROMPT, echo=True))


async def test_retry_and_resume_do_not_tell_it_again(fleet: FakeFleet, client: PdserveClient) -> None:
    dead = DieOnce(fleet, "d", "decode.token", len(EVEN) + 3)
    chunks = await chunks_of(client, EVEN)
    assert dead.hit is not None and len(all_workers(fleet, "d")) == 2
    assert [chunk.prompt is not None for chunk in chunks] == [True, *[False] * 4]
