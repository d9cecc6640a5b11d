"""Several answers to one prompt: where and when they run, what is said of them together, and how they end."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from itertools import count

import pytest

from model.sampling_params import SamplingParams
from protos import inference_pb2 as pb
from protos import prefill_pb2
from protos.caller import ANYONE
from protos.client import PdserveClient
from protos.errors import AttemptsExhausted, ResourceExhausted
from protos.values import Chunk, Sampling, Summary
from router.account import Account
from router.choices import Choices, choice_seed
from router.progress import Progress
from router.rate_limits import RateLimits
from router.request import Request
from router.timeline import RequestClock
from tests.router.asking import PROMPT, DieOnce, FailOnce, all_workers, answer
from tests.router.fakes import FakeFleet, plain_loop, running_fleet

SEEDED = Sampling(max_tokens=6, seed=2**64 - 1)


async def answers(
    client: PdserveClient, n: int, sampling: Sampling = SEEDED
) -> tuple[list[list[int]], list[Chunk], Summary]:
    """By choice; the client checks that each is without a gap."""
    tokens: list[list[int]] = [[] for _ in range(n)]
    chunks: list[Chunk] = []
    async with aclosing(client.generate(PROMPT, n=n, sampling=sampling)) as parts:
        async for part in parts:
            if isinstance(part, Summary):
                return tokens, chunks, part
            tokens[part.choice] += part.token_ids
            chunks.append(part)
    raise AssertionError("no summary")


def prefills(fleet: FakeFleet) -> list[prefill_pb2.PrefillRequest]:
    return [request for worker in all_workers(fleet, "p") for request in worker.prefills]


async def test_each_answer_is_whole_and_all_run_on_one_pair(fleet: FakeFleet, client: PdserveClient) -> None:
    tokens, chunks, summary = await answers(client, 4)
    assert tokens == [plain_loop(PROMPT, 6)] * 4
    for choice in range(4):
        assert [chunk.finish_reason for chunk in chunks if chunk.choice == choice] == [None] * 5 + ["length"]
    assert sorted(len(worker.decodes) for worker in all_workers(fleet, "d")) == [0, 4]
    assert sorted(len(worker.prefills) for worker in all_workers(fleet, "p")) == [0, 4]
    usage = summary.usage
    assert (usage.prompt_tokens, usage.output_tokens, usage.disaggregated) == (21, 24, True)
    assert (usage.prefill_computed_tokens, usage.prefill_cached_tokens) == (4 * 20, 4 * 1)
    assert (usage.decode_received_tokens, usage.decode_cached_tokens, usage.num_steps) == (4 * 20, 4 * 1, 4)
    assert [stage.name for stage in summary.timeline.stages] == ["tokenize", "queue", "prefill", "handover", "decode"]
    assert 0 < summary.timeline.ttft_s <= summary.timeline.total_s
    assert summary.timeline.tpot_s > 0


async def test_seeds_are_the_requests_own_and_others_that_follow_from_it(
    fleet: FakeFleet, client: PdserveClient
) -> None:
    await answer(client, SEEDED)
    await answers(client, 3)
    await answers(client, 3)
    alone, *several = [request.sampling.seed for request in prefills(fleet)]
    seeds = [choice_seed(2**64 - 1, choice) for choice in range(3)]
    assert sorted(several) == sorted(seeds * 2)
    assert alone == seeds[0] == 2**64 - 1
    every = {choice_seed(seed, choice) for seed in range(500) for choice in range(16)}
    assert len(every) == 500 * 16 and all(0 <= seed < 2**64 for seed in every)


async def test_others_wait_until_the_first_is_handed_over(fleet: FakeFleet, client: PdserveClient) -> None:
    is_waiting, go_on = asyncio.Event(), asyncio.Event()

    async def wait(attempt_id: str, num_tokens: int) -> None:
        is_waiting.set()
        await go_on.wait()

    for worker in all_workers(fleet, "d"):
        worker.hooks["decode.token"] = wait
    asking = asyncio.create_task(answers(client, 3))
    await is_waiting.wait()
    assert len(prefills(fleet)) == 1
    assert sorted(worker.dispatches.num_decoding for worker in fleet.router.table.workers()) == [0, 0, 0, 3]
    go_on.set()
    tokens, _, _ = await asking
    assert tokens == [plain_loop(PROMPT, 6)] * 3


async def test_answers_of_one_token_need_no_hand_over(fleet: FakeFleet, client: PdserveClient) -> None:
    tokens, _, summary = await answers(client, 3, Sampling(max_tokens=1))
    assert tokens == [plain_loop(PROMPT, 1)] * 3
    assert (summary.usage.output_tokens, summary.usage.disaggregated, summary.timeline.tpot_s) == (3, False, 0.0)
    assert not any(worker.decodes for worker in all_workers(fleet, "d"))


async def test_one_worker_that_does_it_all() -> None:
    async with running_fleet(num_both=2) as fleet, PdserveClient(fleet.router.address) as client:
        tokens, _, summary = await answers(client, 3)
        assert tokens == [plain_loop(PROMPT, 6)] * 3
        assert sorted(len(worker.decodes) for worker in fleet.workers.values()) == [0, 3]
        assert (summary.usage.prompt_tokens, summary.usage.prefill_computed_tokens) == (21, 3 * 21)


@pytest.mark.parametrize("moment", ["prefill.start", "decode.token"])
async def test_answers_whose_worker_dies_go_on_elsewhere(fleet: FakeFleet, client: PdserveClient, moment: str) -> None:
    dead = DieOnce(fleet, moment[0], moment, len(PROMPT) + (3 if moment == "decode.token" else 0))
    tokens, _, summary = await answers(client, 3)
    assert dead.hit is not None
    assert tokens == [plain_loop(PROMPT, 6)] * 3
    assert summary.usage.num_retries + summary.usage.num_resumes >= 1
    assert summary.usage.output_tokens == 18


async def test_one_that_fails_for_good_ends_them_all(fleet: FakeFleet, client: PdserveClient) -> None:
    async def fail(attempt_id: str, num_tokens: int) -> None:
        if sum(len(worker.decodes) for worker in all_workers(fleet, "d")) > 1:
            raise ResourceExhausted("nothing left")

    for worker in all_workers(fleet, "d"):
        worker.hooks["decode.token"] = fail
    with pytest.raises(AttemptsExhausted, match="nothing left"):
        await answers(client, 3)
    await fleet.settled()


async def test_failure_that_a_retry_mends_is_not_seen(fleet: FakeFleet, client: PdserveClient) -> None:
    failed = FailOnce(ResourceExhausted("full"), fleet, "d", "decode.start")
    tokens, _, summary = await answers(client, 3)
    assert failed.hit is not None
    assert tokens == [plain_loop(PROMPT, 6)] * 3
    assert summary.usage.num_retries + summary.usage.num_resumes == 1


@pytest.mark.parametrize("num_read", [1, 7])
async def test_client_that_leaves_cancels_them_all(fleet: FakeFleet, client: PdserveClient, num_read: int) -> None:
    parts = client.generate(PROMPT, n=5, sampling=Sampling(max_tokens=200))
    for _ in range(num_read):
        await anext(parts)
    await parts.aclose()
    await fleet.settled()


async def test_client_that_leaves_before_the_others_begin_leaves_no_load(
    fleet: FakeFleet, client: PdserveClient
) -> None:
    is_waiting = asyncio.Event()

    async def wait(attempt_id: str, num_tokens: int) -> None:
        is_waiting.set()
        await asyncio.sleep(30)

    for worker in all_workers(fleet, "d"):
        worker.hooks["decode.token"] = wait
    async with aclosing(client.generate(PROMPT, n=5, sampling=Sampling(max_tokens=200))) as parts:
        await anext(parts)
        await is_waiting.wait()
        assert sum(worker.dispatches.num_decoding for worker in fleet.router.table.workers()) == 5
    await fleet.settled()


class Endless:
    """A relay of answers without an end."""

    def __init__(self) -> None:
        self.num_said = 0

    async def answer(self, progress: Progress) -> AsyncGenerator[bytes, None]:
        for index in count():
            self.num_said += 1
            yield pb.GenerateResponse(output_index=index, token_ids=[7]).SerializeToString()


async def test_what_a_slow_reader_leaves_is_bounded() -> None:
    endless = Endless()
    request = Request("r", (5,), SamplingParams(max_tokens=99), num_choices=16)
    with RateLimits().claimed(ANYONE) as allowance:
        account = Account(allowance)
    choices = Choices(endless, request, RequestClock(), None, account)  # type: ignore[arg-type]
    async with aclosing(choices.messages()) as messages:
        for num_read in range(1, 200):
            await anext(messages)
            for _ in range(20):
                await asyncio.sleep(0)
            assert endless.num_said <= num_read + 64 + 16
    assert endless.num_said > 200
