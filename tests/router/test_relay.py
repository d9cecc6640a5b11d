"""Requests through a real router to fake workers over real gRPC, with every kind of failure on the way."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import aclosing

import pytest

from protos import workers_pb2
from protos.client import PdserveClient
from protos.errors import (
    AlreadyExists,
    AttemptsExhausted,
    DeadlineExceeded,
    Internal,
    InvalidArgument,
    NoWorker,
    ResourceExhausted,
    ServiceError,
    Unavailable,
)
from protos.values import Chunk, Sampling, Summary
from router.config import RelayPolicy
from tests.router.fakes import POLICY, FakeFleet, FakeWorker, plain_loop, running_fleet

PROMPT = list(range(20, 41))


@pytest.fixture
async def fleet() -> AsyncIterator[FakeFleet]:
    """Two prefill and two decode workers."""
    async with running_fleet(num_prefill=2, num_decode=2) as fleet:
        yield fleet
        await fleet.settled()


@pytest.fixture
async def client(fleet: FakeFleet) -> AsyncIterator[PdserveClient]:
    async with PdserveClient(fleet.router.address) as client:
        yield client


async def answer(
    client: PdserveClient, sampling: Sampling, *, prompt: list[int] = PROMPT, deadline_s: float | None = None
) -> tuple[list[int], list[Chunk], Summary]:
    chunks: list[Chunk] = []
    async with aclosing(client.generate(prompt, sampling=sampling, deadline_s=deadline_s)) as parts:
        async for part in parts:
            if isinstance(part, Summary):
                return [token for chunk in chunks for token in chunk.token_ids], chunks, part
            chunks.append(part)
    raise AssertionError("no summary")


def all_workers(fleet: FakeFleet, letter: str) -> list[FakeWorker]:
    return [worker for name, worker in fleet.workers.items() if name.startswith(letter)]


class Once:
    """A hook that does something at one moment of the first attempt that reaches it, and nothing later."""

    def __init__(self, fleet: FakeFleet, letter: str, moment: str, num_tokens: int | None = None) -> None:
        self.hit: FakeWorker | None = None
        self._num_tokens = num_tokens
        for worker in all_workers(fleet, letter):
            worker.hooks[moment] = self._hook_of(worker)

    async def act(self, worker: FakeWorker) -> None:
        raise NotImplementedError

    def _hook_of(self, worker: FakeWorker):  # type: ignore[no-untyped-def]
        async def hook(attempt_id: str, num_tokens: int) -> None:
            if self.hit is None and self._num_tokens in (None, num_tokens):
                self.hit = worker
                await self.act(worker)

        return hook


class DieOnce(Once):
    async def act(self, worker: FakeWorker) -> None:
        asyncio.get_running_loop().create_task(worker.die()).add_done_callback(lambda task: task.result())
        await asyncio.sleep(5)  # cancelled by its own death


class FailOnce(Once):
    def __init__(self, error: ServiceError, fleet: FakeFleet, letter: str, moment: str, num_tokens: int | None = None):
        super().__init__(fleet, letter, moment, num_tokens)
        self._error = error

    async def act(self, worker: FakeWorker) -> None:
        raise self._error


async def test_tokens_are_those_of_a_plain_loop(fleet: FakeFleet, client: PdserveClient) -> None:
    tokens, chunks, summary = await answer(client, Sampling(max_tokens=8))
    assert tokens == plain_loop(PROMPT, 8)
    assert "".join(chunk.text for chunk in chunks) == "".join(f"<{token}>" for token in tokens)
    assert [chunk.finish_reason for chunk in chunks] == [None] * 7 + ["length"]
    usage = summary.usage
    assert (usage.prompt_tokens, usage.output_tokens, usage.disaggregated) == (21, 8, True)
    assert (usage.prefill_computed_tokens, usage.prefill_cached_tokens) == (20, 1)
    assert (usage.decode_received_tokens, usage.decode_cached_tokens) == (20, 1)
    assert (usage.num_retries, usage.num_resumes) == (0, 0)


async def test_timeline_names_stages_and_workers_in_order(fleet: FakeFleet, client: PdserveClient) -> None:
    _, _, summary = await answer(client, Sampling(max_tokens=8))
    stages = summary.timeline.stages
    assert [stage.name for stage in stages] == ["tokenize", "queue", "prefill", "handover", "decode"]
    assert [stage.worker_id[:1] for stage in stages] == ["", "p", "p", "p", "d"]
    assert [stage.duration_s for stage in stages[1:4]] == [0.001, 0.002, 0.0005]
    timeline = summary.timeline
    assert 0 < timeline.ttft_s <= timeline.total_s
    assert timeline.ttft_s + 7 * timeline.tpot_s <= timeline.total_s


async def test_workers_get_resolved_sampling_and_each_other(fleet: FakeFleet, client: PdserveClient) -> None:
    await answer(client, Sampling(max_tokens=3, stop_token_ids=[7]))
    (prefill,) = [request for worker in all_workers(fleet, "p") for request in worker.prefills]
    (decode,) = [request for worker in all_workers(fleet, "d") for request in worker.decodes]
    target = fleet.workers[prefill.decode.worker_id]
    assert (prefill.decode.address, prefill.decode.epoch) == (target.server.address, "e1")
    assert target.decodes == [decode]
    assert prefill.attempt_id == decode.attempt_id
    assert prefill.request_id == decode.request_id != ""
    assert prefill.sampling == decode.sampling
    assert list(prefill.sampling.stop_token_ids) == [7, 2]
    present = {field.name for field, _ in prefill.sampling.ListFields()}
    assert {field.name for field in prefill.sampling.DESCRIPTOR.fields} - present == {"logprobs"}


async def test_first_token_comes_before_decodes_bytes_that_were_quicker(
    fleet: FakeFleet, client: PdserveClient
) -> None:
    """Prefill says its first token only when decode has already sent all of its tokens."""
    all_sent = asyncio.Event()

    async def committed_at_once(attempt_id: str, num_tokens: int) -> None:
        fleet._hand_over.of(attempt_id).set_result(None)
        await all_sent.wait()

    async def last_token(attempt_id: str, num_tokens: int) -> None:
        if num_tokens == len(PROMPT) + 4:
            asyncio.get_running_loop().call_later(0.02, all_sent.set)

    async def nothing_left_to_commit(attempt_id: str, num_tokens: int) -> None:
        fleet._hand_over._commits.pop(attempt_id)

    for worker in all_workers(fleet, "p"):
        worker.hooks = {"prefill.start": committed_at_once, "prefill.first": nothing_left_to_commit}
    for worker in all_workers(fleet, "d"):
        worker.hooks["decode.token"] = last_token
    tokens, _, _ = await answer(client, Sampling(max_tokens=5))
    assert tokens == plain_loop(PROMPT, 5)


async def test_first_token_does_not_wait_for_the_hand_over(fleet: FakeFleet, client: PdserveClient) -> None:
    has_token, was_late = asyncio.Event(), []

    async def until_client_has_token(attempt_id: str, num_tokens: int) -> None:
        await asyncio.wait_for(has_token.wait(), 5)
        was_late.append(False)

    for worker in all_workers(fleet, "p"):
        worker.hooks["prefill.first"] = until_client_has_token
    async for _ in client.generate(PROMPT, sampling=Sampling(max_tokens=4)):
        has_token.set()
    assert was_late == [False]


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
@pytest.mark.parametrize("error", [Internal("out of memory"), ResourceExhausted("full"), Unavailable("gone")])
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
    """The second attempt goes to the other pair, whatever the load."""
    failure = FailOnce(Internal("broken"), fleet, "p", "prefill.start")
    await answer(client, Sampling(max_tokens=6))
    assert sorted(len(worker.prefills) for worker in all_workers(fleet, "p")) == [1, 1]
    assert failure.hit is not None


async def test_one_token_needs_no_decode_worker(fleet: FakeFleet, client: PdserveClient) -> None:
    tokens, chunks, summary = await answer(client, Sampling(max_tokens=1))
    assert tokens == plain_loop(PROMPT, 1)
    assert chunks[-1].finish_reason == "length"
    assert summary.usage.prefill_computed_tokens == 20
    assert not summary.usage.disaggregated
    assert not any(worker.decodes for worker in all_workers(fleet, "d"))


async def test_stop_on_the_first_token_leaves_decode(fleet: FakeFleet, client: PdserveClient) -> None:
    (first,) = plain_loop(PROMPT, 1)
    tokens, chunks, summary = await answer(client, Sampling(max_tokens=50, stop_token_ids=[first]))
    assert tokens == [first]
    assert chunks[-1].finish_reason == "stop"
    assert summary.usage.prefill_computed_tokens == 20
    assert not summary.usage.disaggregated
    await fleet.settled()


async def test_stop_while_decoding(fleet: FakeFleet, client: PdserveClient) -> None:
    expected = plain_loop(PROMPT, 5)
    tokens, chunks, _ = await answer(client, Sampling(max_tokens=50, stop_token_ids=[expected[-1]]))
    assert tokens == expected
    assert chunks[-1].finish_reason == "stop"


@pytest.mark.parametrize("num_read", [0, 1, 5])
async def test_client_that_leaves_cancels_both_legs(fleet: FakeFleet, client: PdserveClient, num_read: int) -> None:
    blocked = asyncio.Event()

    async def block(attempt_id: str, num_tokens: int) -> None:
        if num_tokens >= len(PROMPT) + num_read:
            blocked.set()
            await asyncio.sleep(30)

    for worker in fleet.workers.values():
        worker.hooks = {"prefill.start": block, "prefill.committed": block, "decode.token": block}

    async def read() -> None:
        await answer(client, Sampling(max_tokens=100))

    reading = asyncio.create_task(read())
    await asyncio.wait_for(blocked.wait(), 5)
    assert fleet.num_open >= 1
    reading.cancel()
    await asyncio.wait([reading])
    await fleet.settled()


async def test_many_that_leave_at_random_moments(fleet: FakeFleet, client: PdserveClient) -> None:
    async def some_time(attempt_id: str, num_tokens: int) -> None:
        await asyncio.sleep(0.001)

    for worker in fleet.workers.values():
        worker.hooks = {"prefill.start": some_time, "decode.token": some_time}
    for index in range(60):
        reading = asyncio.create_task(answer(client, Sampling(max_tokens=200)))
        await asyncio.sleep(index * 0.0004)
        reading.cancel()
        await asyncio.wait([reading])
    await fleet.settled()


async def test_deadline_ends_both_legs(fleet: FakeFleet, client: PdserveClient) -> None:
    async def block(attempt_id: str, num_tokens: int) -> None:
        await asyncio.sleep(30)

    for worker in all_workers(fleet, "d"):
        worker.hooks["decode.token"] = block
    with pytest.raises(DeadlineExceeded):
        await answer(client, Sampling(max_tokens=100), deadline_s=0.1)
    await fleet.settled()


async def test_request_id_is_unique_in_flight_and_free_afterwards(fleet: FakeFleet, client: PdserveClient) -> None:
    go_on = asyncio.Event()

    async def wait(attempt_id: str, num_tokens: int) -> None:
        await go_on.wait()

    for worker in all_workers(fleet, "d"):
        worker.hooks["decode.token"] = wait
    first = client.generate(PROMPT, sampling=Sampling(max_tokens=3), request_id="mine")
    await anext(first)
    with pytest.raises(AlreadyExists, match="'mine' is in flight"):
        await anext(client.generate(PROMPT, request_id="mine"))
    go_on.set()
    parts = [part async for part in first]
    assert isinstance(parts[-1], Summary) and parts[-1].request_id == "mine"
    await answer_with_id(client, "mine")


async def answer_with_id(client: PdserveClient, request_id: str) -> None:
    parts = [part async for part in client.generate(PROMPT, sampling=Sampling(max_tokens=2), request_id=request_id)]
    assert isinstance(parts[-1], Summary)


async def test_colocated_worker_does_it_all() -> None:
    async with running_fleet(num_both=2) as fleet, PdserveClient(fleet.router.address) as client:
        tokens, _, summary = await answer(client, Sampling(max_tokens=6))
        assert tokens == plain_loop(PROMPT, 6)
        assert summary.usage.prefill_computed_tokens == 21
        assert not summary.usage.disaggregated
        assert [stage.name for stage in summary.timeline.stages] == ["tokenize", "prefill", "decode"]
        assert not any(worker.prefills for worker in fleet.workers.values())


async def test_colocated_worker_dies() -> None:
    async with running_fleet(num_both=2) as fleet, PdserveClient(fleet.router.address) as client:
        DieOnce(fleet, "w", "decode.token", len(PROMPT) + 3)
        tokens, _, summary = await answer(client, Sampling(max_tokens=6))
        assert tokens == plain_loop(PROMPT, 6)
        assert summary.usage.num_resumes == 1
        await fleet.settled()


async def test_no_worker_says_which_role_is_missing() -> None:
    async with running_fleet(num_prefill=1) as fleet, PdserveClient(fleet.router.address) as client:
        with pytest.raises(NoWorker, match="no worker can decode"):
            await answer(client, Sampling(max_tokens=6))
        tokens, _, _ = await answer(client, Sampling(max_tokens=1))
        assert tokens == plain_loop(PROMPT, 1)


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


async def test_role_flip_takes_effect_from_the_next_request_on() -> None:
    async with running_fleet(2, 1) as fleet, PdserveClient(fleet.router.address) as client:
        await client.set_role("p0", "decode")
        await client.set_role("d0", "prefill")
        for _ in range(4):
            tokens, _, _ = await answer(client, Sampling(max_tokens=4))
            assert tokens == plain_loop(PROMPT, 4)
        assert len(fleet.workers["p0"].decodes) == 4
        assert not fleet.workers["p0"].prefills and not fleet.workers["d0"].decodes
        async with asyncio.timeout(5):
            while fleet.workers["p0"].commands != [workers_pb2.ROLE_PREFILL, workers_pb2.ROLE_DECODE]:
                await asyncio.sleep(0.001)


async def test_draining_router_finishes_what_runs_and_takes_nothing_new() -> None:
    async with running_fleet(1, 1) as fleet, PdserveClient(fleet.router.address) as client:

        async def some_time(attempt_id: str, num_tokens: int) -> None:
            await asyncio.sleep(0.01)

        fleet.workers["d0"].hooks["decode.token"] = some_time
        reading = asyncio.create_task(answer(client, Sampling(max_tokens=10)))
        await asyncio.sleep(0.03)
        draining = asyncio.create_task(fleet.router.drain())
        await asyncio.sleep(0.01)
        with pytest.raises(Unavailable):
            await answer(client, Sampling(max_tokens=2))
        tokens, _, _ = await reading
        assert tokens == plain_loop(PROMPT, 10)
        await asyncio.wait_for(draining, 5)
