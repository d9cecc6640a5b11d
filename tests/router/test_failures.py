"""Workers that fail or die at every stage of a request: the client sees one unbroken answer, or one clear error."""

from __future__ import annotations

import asyncio
import time

import pytest

from kvtransfer.errors import CorruptBlocks
from protos import workers_pb2
from protos.client import PdserveClient
from protos.errors import (
    AttemptsExhausted,
    Internal,
    InvalidArgument,
    NoWorker,
    ResourceExhausted,
    ServiceError,
    Unavailable,
)
from protos.values import Sampling
from router.config import RelayPolicy
from tests.router.asking import PROMPT, DieOnce, FailOnce, all_workers, answer
from tests.router.fakes import POLICY, FakeFleet, FakeWorker, plain_loop, ready_load, running_fleet


@pytest.mark.parametrize("moment", ["prefill.start", "prefill.first"])
async def test_prefill_worker_dies(fleet: FakeFleet, client: PdserveClient, moment: str) -> None:
    death = DieOnce(fleet, "p", moment)
    tokens, _, summary = await answer(client, Sampling(max_tokens=6))
    assert death.hit is not None
    assert tokens == plain_loop(PROMPT, 6)
    is_after = moment == "prefill.first"
    assert (summary.usage.num_retries, summary.usage.num_resumes) == ((0, 1) if is_after else (1, 0))
    (other,) = [worker for worker in all_workers(fleet, "p") if worker is not death.hit]
    assert [len(request.token_ids) for request in other.prefills] == [len(PROMPT) + is_after]
    assert other.prefills[0].num_prompt_tokens == len(PROMPT)


@pytest.mark.parametrize("num_emitted", [1, 2, 5, 7])
async def test_decode_worker_dies_and_the_answer_goes_on(
    fleet: FakeFleet, client: PdserveClient, num_emitted: int
) -> None:
    """1: between the first token and decode's first; 7: before the last."""
    death = DieOnce(fleet, "d", "decode.token", len(PROMPT) + num_emitted)
    tokens, _, summary = await answer(client, Sampling(max_tokens=8))
    assert death.hit is not None
    assert tokens == plain_loop(PROMPT, 8)
    assert (summary.usage.num_retries, summary.usage.num_resumes) == (0, 1)
    requests = [request for worker in all_workers(fleet, "p") for request in worker.prefills]
    resumed = max(requests, key=lambda request: len(request.token_ids))
    assert list(resumed.token_ids) == PROMPT + tokens[:num_emitted]
    assert resumed.num_prompt_tokens == len(PROMPT)
    assert resumed.HasField("decode") == (num_emitted < 7)


async def test_both_pools_lose_a_worker_under_many_streams(fleet: FakeFleet, client: PdserveClient) -> None:
    DieOnce(fleet, "d", "decode.token", len(PROMPT) + 9)
    DieOnce(fleet, "p", "prefill.first", len(PROMPT) + 1)  # while it resumes one of them
    prompts = [[*PROMPT[:-1], 50 + index] for index in range(16)]
    answers = await asyncio.gather(*(answer(client, Sampling(max_tokens=20), prompt=prompt) for prompt in prompts))
    assert [tokens for tokens, _, _ in answers] == [plain_loop(prompt, 20) for prompt in prompts]


@pytest.mark.parametrize("letter, moment", [("p", "prefill.start"), ("d", "decode.start")])
@pytest.mark.parametrize(
    "error", [Internal("out of memory"), ResourceExhausted("full"), Unavailable("gone"), CorruptBlocks("bits")]
)
async def test_a_leg_that_fails_with_words_is_tried_elsewhere(
    fleet: FakeFleet, client: PdserveClient, letter: str, moment: str, error: ServiceError
) -> None:
    failure = FailOnce(error, fleet, letter, moment)
    tokens, _, summary = await answer(client, Sampling(max_tokens=6))
    assert tokens == plain_loop(PROMPT, 6)
    assert summary.usage.num_retries + summary.usage.num_resumes == 1  # prefill may be quicker than decode's refusal
    assert failure.hit is not None and failure.hit.num_open == 0


async def test_prefill_that_fails_after_the_first_token_ends_the_wait_for_the_hand_over(
    fleet: FakeFleet, client: PdserveClient
) -> None:
    FailOnce(Unavailable("the writes failed"), fleet, "p", "prefill.first")
    started_at = time.monotonic()
    tokens, _, summary = await answer(client, Sampling(max_tokens=6))
    assert tokens == plain_loop(PROMPT, 6)
    assert summary.usage.num_resumes == 1
    assert time.monotonic() - started_at < 1


async def test_prefill_that_dies_after_the_hand_over_does_no_harm(fleet: FakeFleet, client: PdserveClient) -> None:
    async def some_time(attempt_id: str, num_tokens: int) -> None:
        await asyncio.sleep(0.002)

    for worker in all_workers(fleet, "d"):
        worker.hooks["decode.token"] = some_time

    class DieLater(DieOnce):
        async def act(self, worker: FakeWorker) -> None:
            await asyncio.sleep(0.02)
            await super().act(worker)

    DieLater(fleet, "p", "prefill.committed")
    tokens, _, summary = await answer(client, Sampling(max_tokens=40))
    assert tokens == plain_loop(PROMPT, 40)
    assert (summary.usage.num_retries, summary.usage.num_resumes) == (0, 0)


async def test_what_a_worker_calls_invalid_is_told_to_the_client(fleet: FakeFleet, client: PdserveClient) -> None:
    FailOnce(InvalidArgument("too long for this cache", field="token_ids"), fleet, "p", "prefill.start")
    with pytest.raises(InvalidArgument, match="too long for this cache") as caught:
        await answer(client, Sampling(max_tokens=6))
    assert caught.value.field == "token_ids"


async def test_gives_up_when_the_budget_is_spent(fleet: FakeFleet, client: PdserveClient) -> None:
    async def fail(attempt_id: str, num_tokens: int) -> None:
        raise Unavailable("the cache is on fire")

    for worker in all_workers(fleet, "p"):
        worker.hooks["prefill.start"] = fail
    with pytest.raises(AttemptsExhausted, match=r"4 attempts failed.*the cache is on fire"):
        await answer(client, Sampling(max_tokens=6))
    assert sum(len(worker.prefills) for worker in all_workers(fleet, "p")) == POLICY.max_attempts
    assert sum(len(worker.decodes) for worker in all_workers(fleet, "d")) == POLICY.max_attempts


async def test_failed_workers_are_avoided(fleet: FakeFleet, client: PdserveClient) -> None:
    """The second attempt goes to the other worker, though the first one looks better by its load."""
    fleet.workers["p1"].report(ready_load(queued_prefill_tokens=10_000))
    async with asyncio.timeout(5):
        while not any(worker.num_queued_tokens for worker in fleet.router.table.snapshot()):
            await asyncio.sleep(0.001)
    failure = FailOnce(Internal("broken"), fleet, "p", "prefill.start")
    await answer(client, Sampling(max_tokens=6))
    assert failure.hit is fleet.workers["p0"]
    assert [len(fleet.workers[name].prefills) for name in ("p0", "p1")] == [1, 1]


async def test_colocated_worker_dies() -> None:
    async with running_fleet(num_both=2) as fleet, PdserveClient(fleet.router.address) as client:
        DieOnce(fleet, "w", "decode.token", len(PROMPT) + 3)
        tokens, _, summary = await answer(client, Sampling(max_tokens=6))
        assert tokens == plain_loop(PROMPT, 6)
        assert summary.usage.num_resumes == 1
        await fleet.settled()


@pytest.mark.parametrize("there_is_another", [True, False])
async def test_answer_does_not_go_on_where_it_is_too_long(there_is_another: bool) -> None:
    """Its request was taken before a worker came that takes shorter sequences only."""
    length = len(PROMPT) + 6
    async with running_fleet(num_both=1) as fleet, PdserveClient(fleet.router.address) as client:
        first = fleet.workers["w0"]

        async def replace(attempt_id: str, num_tokens: int) -> None:
            if num_tokens == len(PROMPT) + 3:
                await fleet.add("narrow", workers_pb2.ROLE_BOTH, max_context_tokens=length - 1)
                if there_is_another:
                    await fleet.add("wide", workers_pb2.ROLE_BOTH, max_context_tokens=length)
                dying.append(asyncio.create_task(first.die()))
                await asyncio.sleep(5)  # cancelled by its own death

        dying: list[asyncio.Task[None]] = []
        first.hooks["decode.token"] = replace
        if there_is_another:
            tokens, _, summary = await answer(client, Sampling(max_tokens=6))
            assert tokens == plain_loop(PROMPT, 6)
            assert summary.usage.num_resumes == len(fleet.workers["wide"].decodes) == 1
        else:
            with pytest.raises(NoWorker, match=f"--max-context below the {length} tokens"):
                await answer(client, Sampling(max_tokens=6))
        assert fleet.workers["narrow"].decodes == []
        await dying[0]
        await fleet.settled()


async def test_waits_for_a_worker_that_comes_back() -> None:
    policy = RelayPolicy(retry_delay_s=0.001, wait_for_worker_s=5.0)
    async with running_fleet(1, 1, policy=policy) as fleet, PdserveClient(fleet.router.address) as client:
        DieOnce(fleet, "d", "decode.token", len(PROMPT) + 3)
        reading = asyncio.create_task(answer(client, Sampling(max_tokens=6)))
        await asyncio.sleep(0.05)
        assert not reading.done()
        await fleet.add("d0", workers_pb2.ROLE_DECODE, epoch="e2")
        tokens, _, summary = await reading
        assert tokens == plain_loop(PROMPT, 6)
        assert summary.usage.num_resumes == 1
        await fleet.settled()


async def test_worker_that_cannot_be_reached_gets_nothing_new_until_it_reports(
    fleet: FakeFleet, client: PdserveClient
) -> None:
    """Its registration lives, its services do not answer: the next request must not have to find that out again."""
    unreachable = fleet.workers["d0"]
    await unreachable.server.stop()
    for name in ("p0", "d1"):  # so that it is chosen first
        fleet.workers[name].report(ready_load(queued_prefill_tokens=9_000, num_running=50))
    async with asyncio.timeout(5):
        while sum(worker.num_active for worker in fleet.router.table.snapshot()) < 100:
            await asyncio.sleep(0.001)
    failures = []
    for _ in range(3):
        tokens, _, summary = await answer(client, Sampling(max_tokens=4))
        assert tokens == plain_loop(PROMPT, 4)
        failures.append(summary.usage.num_retries + summary.usage.num_resumes)
    assert failures == [1, 0, 0]
    ready = {worker.id.name: worker.is_ready for worker in fleet.router.table.snapshot()}
    assert ready == {"p0": True, "p1": True, "d0": False, "d1": True}
    unreachable.report(ready_load())
    async with asyncio.timeout(5):
        while not all(worker.is_ready for worker in fleet.router.table.snapshot()):
            await asyncio.sleep(0.001)
