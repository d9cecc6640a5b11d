"""The prompt's logprobs on their way through the router: before the first token, once, whatever fails."""

from __future__ import annotations

import pytest

from protos.client import PdserveClient
from protos.values import Chunk, Sampling
from tests.router.asking import PROMPT, DieOnce, Once
from tests.router.fakes import FakeFleet, FakeWorker, plain_loop, running_fleet

SCORED = Sampling(max_tokens=6, prompt_logprobs=0)


async def chunks_of(client: PdserveClient, n: int = 1, sampling: Sampling = SCORED, echo: bool = False) -> list[Chunk]:
    answer = client.generate(PROMPT, n=n, sampling=sampling, echo=echo)
    return [part async for part in answer if isinstance(part, Chunk)]


def check(chunks: list[Chunk], num_tokens: int = 6) -> None:
    """Scores in order, each once, and all tokens behind them."""
    before = [chunk for chunk in chunks if chunk.prompt is not None]
    assert chunks[: len(before)] == before
    first, *scores = [each for chunk in before if chunk.prompt is not None for each in chunk.prompt.logprobs]
    assert first is None
    assert [(each.token_id, each.logprob) for each in scores if each is not None] == [
        (token, -place) for place, token in enumerate(PROMPT[1:], start=1)
    ]
    tokens = [token for chunk in chunks for token in chunk.token_ids if chunk.choice == 0]
    assert tokens == plain_loop(PROMPT, num_tokens)


@pytest.mark.parametrize("max_tokens", [1, 6])
async def test_they_come_before_the_first_token(fleet: FakeFleet, client: PdserveClient, max_tokens: int) -> None:
    check(await chunks_of(client, sampling=Sampling(max_tokens=max_tokens, prompt_logprobs=0)), max_tokens)


async def test_of_a_worker_that_does_it_all() -> None:
    async with running_fleet(num_both=2) as fleet, PdserveClient(fleet.router.address) as client:
        check(await chunks_of(client))
        dead = DieOnce(fleet, "w", "decode.scored")
        check(await chunks_of(client))
        assert dead.hit is not None


async def test_they_are_told_once_for_several_answers_and_behind_the_echo(
    fleet: FakeFleet, client: PdserveClient
) -> None:
    echo, *chunks = await chunks_of(client, n=3, echo=True)
    assert echo.prompt is not None and echo.prompt.token_ids == tuple(PROMPT)
    check(chunks)
    requests = [request for worker in fleet.workers.values() for request in worker.prefills]
    assert [request.sampling.HasField("prompt_logprobs") for request in requests] == [True, False, False]


@pytest.mark.parametrize("moment", ["prefill.scored", "decode.token"])
async def test_failures_do_not_double_them(fleet: FakeFleet, client: PdserveClient, moment: str) -> None:
    dead = DieOnce(fleet, moment[0], moment)
    check(await chunks_of(client))
    assert dead.hit is not None
    requests = [request for worker in fleet.workers.values() for request in worker.prefills]
    is_resumed = [len(request.token_ids) > len(PROMPT) for request in requests]
    assert [request.sampling.HasField("prompt_logprobs") for request in requests] == [not each for each in is_resumed]


class Never(Once):
    """Counts only."""

    async def act(self, worker: FakeWorker) -> None:
        return


async def test_not_asked_for_is_not_computed(fleet: FakeFleet, client: PdserveClient) -> None:
    scored = Never(fleet, "p", "prefill.scored")
    await chunks_of(client, sampling=Sampling(max_tokens=4))
    assert scored.hit is None
