"""More requests than the workers have room for, and workers that fail, through a real router over real gRPC."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from protos import inference_pb2 as pb
from protos.caller import Caller, Limits, current_caller
from protos.client import PdserveClient
from protos.errors import (
    Aborted,
    AttemptsExhausted,
    DeadlineExceeded,
    Internal,
    InvalidArgument,
    LimitExceeded,
    NoWorker,
    Overloaded,
    ServiceError,
    Unavailable,
)
from protos.values import Chunk, Sampling, Summary
from router.breaker import BreakerState
from router.config import AdmissionPolicy, LimitPolicy, PlacementPolicy
from tests.router.asking import PROMPT, DieOnce, all_workers, answer
from tests.router.fakes import FakeFleet, plain_loop, running_fleet

ONE_EACH = PlacementPolicy(limits=LimitPolicy(max_sequences=1))
SHORT = Sampling(max_tokens=4)


@pytest.fixture
async def narrow() -> AsyncIterator[FakeFleet]:
    """Two decode workers, with room for one request each; none has an end until `go_on`."""
    async with running_fleet(2, 2, admission=AdmissionPolicy(max_queued=5), placement=ONE_EACH) as fleet:
        yield fleet
        await fleet.settled()


@pytest.fixture
async def client(narrow: FakeFleet) -> AsyncIterator[PdserveClient]:
    async with PdserveClient(narrow.router.address) as client:
        yield client


def held(fleet: FakeFleet) -> asyncio.Event:
    """Nobody decodes until it is set."""
    go_on = asyncio.Event()

    async def wait(attempt_id: str, num_tokens: int) -> None:
        await go_on.wait()

    for worker in all_workers(fleet, "d"):
        worker.hooks["decode.token"] = wait
    return go_on


Answering = asyncio.Task[tuple[list[int], list[Chunk], Summary]]


def asked(client: PdserveClient, number: int, deadline_s: float | None = None) -> list[Answering]:
    return [
        asyncio.create_task(answer(client, SHORT, prompt=[*PROMPT[:-1], 50 + index], deadline_s=deadline_s))
        for index in range(number)
    ]


async def waiting(fleet: FakeFleet, number: int) -> None:
    async with asyncio.timeout(5):
        while fleet.router.inference.num_waiting != number:
            await asyncio.sleep(0.001)


def num_decoding(fleet: FakeFleet) -> list[int]:
    return [len(worker.decodes) for worker in all_workers(fleet, "d")]


async def decoding_in_all(fleet: FakeFleet, number: int) -> None:
    async with asyncio.timeout(5):
        while sum(num_decoding(fleet)) != number:
            await asyncio.sleep(0.001)


async def decoding(fleet: FakeFleet, numbers: list[int]) -> None:
    async with asyncio.timeout(5):
        while num_decoding(fleet) != numbers:
            await asyncio.sleep(0.001)


async def test_what_finds_no_room_waits_and_all_are_answered(narrow: FakeFleet, client: PdserveClient) -> None:
    go_on = held(narrow)
    answers = asked(client, 6)
    await waiting(narrow, 4)
    await decoding(narrow, [1, 1])
    status = await client.get_status()
    assert (status.num_requests_in_flight, status.num_requests_waiting) == (6, 4)
    go_on.set()
    done = await asyncio.gather(*answers)
    assert [tokens for tokens, _, _ in done] == [plain_loop([*PROMPT[:-1], 50 + index], 4) for index in range(6)]
    stages = [[stage.name for stage in summary.timeline.stages] for _, _, summary in done]
    without, with_wait = ["tokenize", "queue", "prefill", "handover", "decode"], ["tokenize", "wait", "queue"]
    assert sum(names == without for names in stages) == 2
    assert sum(names[:3] == with_wait for names in stages) == 4
    for _, _, summary in done:
        for stage in summary.timeline.stages:
            if stage.name == "wait":
                assert stage.worker_id == "" and 0 < stage.duration_s < summary.timeline.ttft_s


async def test_full_queue_refuses_with_a_delay(narrow: FakeFleet, client: PdserveClient) -> None:
    go_on = held(narrow)
    answers = asked(client, 2)
    await decoding(narrow, [1, 1])
    answers += asked(client, 4)
    await waiting(narrow, 4)
    with pytest.raises(Overloaded, match="4 requests wait already") as caught:
        await answer(client, SHORT)
    assert caught.value.retry_after_s is not None and caught.value.retryable
    assert narrow.router.inference.num_in_flight == 6
    go_on.set()
    await asyncio.gather(*answers)


async def test_deadline_that_passes_in_the_queue_reaches_no_worker(narrow: FakeFleet, client: PdserveClient) -> None:
    go_on = held(narrow)
    answers = asked(client, 2)
    await decoding(narrow, [1, 1])
    late = asked(client, 1, deadline_s=0.2)
    with pytest.raises(DeadlineExceeded):
        await late[0]
    await waiting(narrow, 0)
    go_on.set()
    await asyncio.gather(*answers)
    assert sum(num_decoding(narrow)) == 2


async def test_client_that_leaves_the_queue_reaches_no_worker(narrow: FakeFleet, client: PdserveClient) -> None:
    go_on = held(narrow)
    answers = asked(client, 2)
    await decoding(narrow, [1, 1])
    leaving = asked(client, 2)
    await waiting(narrow, 2)
    for each in leaving:
        each.cancel()
    await waiting(narrow, 0)
    go_on.set()
    await asyncio.gather(*answers)
    assert sum(num_decoding(narrow)) == 2


async def test_resumed_answer_does_not_wait_behind_new_ones(narrow: FakeFleet, client: PdserveClient) -> None:
    go_on = held(narrow)
    answers = asked(client, 5)
    await waiting(narrow, 3)
    await decoding(narrow, [1, 1])
    dying, staying = all_workers(narrow, "d")
    await dying.die()
    async with asyncio.timeout(5):
        while len(staying.decodes) < 2:
            await asyncio.sleep(0.001)
    assert staying.decodes[1].request_id == dying.decodes[0].request_id
    assert narrow.router.inference.num_waiting == 3
    go_on.set()
    done = await asyncio.gather(*answers)
    assert sum(summary.usage.num_resumes + summary.usage.num_retries for _, _, summary in done) == 1


async def several(client: PdserveClient, num_choices: int) -> list[list[int]]:
    tokens: list[list[int]] = [[] for _ in range(num_choices)]
    async for part in client.generate(PROMPT, n=num_choices, sampling=SHORT):
        if isinstance(part, Chunk):
            tokens[part.choice] += part.token_ids
    return tokens


async def test_answers_to_one_request_do_not_wait_behind_others(narrow: FakeFleet, client: PdserveClient) -> None:
    """The other three begin on the pair of the first while others wait for it."""
    go_on = held(narrow)
    asking = asyncio.create_task(several(client, 4))
    await decoding_in_all(narrow, 1)
    answers = asked(client, 3)
    await waiting(narrow, 2)
    go_on.set()
    assert await asking == [plain_loop(PROMPT, 4)] * 4
    done = await asyncio.gather(*answers)
    assert all(len(tokens) == 4 for tokens, _, _ in done)


async def test_answer_of_several_that_is_resumed_does_not_wait(narrow: FakeFleet, client: PdserveClient) -> None:
    asking = asyncio.create_task(several(client, 3))
    go_on, dying = asyncio.Event(), asyncio.Event()

    async def wait(attempt_id: str, num_tokens: int) -> None:
        if num_tokens > len(PROMPT) + 1:
            dying.set()
            await go_on.wait()

    for worker in all_workers(narrow, "d"):
        worker.hooks["decode.token"] = wait
    await dying.wait()
    (source,) = [worker for worker in all_workers(narrow, "d") if worker.decodes]
    (other,) = [worker for worker in all_workers(narrow, "d") if worker is not source]
    while len(source.decodes) < 3:
        await asyncio.sleep(0.001)
    answers = asked(client, 3)  # one on the other worker, two wait
    await waiting(narrow, 2)
    await source.die()
    async with asyncio.timeout(5):
        while len(other.decodes) < 4:
            await asyncio.sleep(0.001)
    assert narrow.router.inference.num_waiting == 2
    go_on.set()
    assert await asking == [plain_loop(PROMPT, 4)] * 3
    await asyncio.gather(*answers)


async def test_burst_is_taken_by_one_pair_with_the_defaults() -> None:
    async with running_fleet(1, 1) as fleet, PdserveClient(fleet.router.address) as client:
        done = await asyncio.gather(*asked(client, 64))
        assert [len(tokens) for tokens, _, _ in done] == [4] * 64
        await fleet.settled()


def request(**fields: object) -> pb.GenerateRequest:
    message = pb.GenerateRequest(token_ids=pb.TokenIds(ids=PROMPT), sampling=pb.SamplingParams(max_tokens=4))
    message.MergeFrom(pb.GenerateRequest(**fields))  # type: ignore[arg-type]
    return message


async def answered_to(fleet: FakeFleet, caller: Caller, message: pb.GenerateRequest | None = None) -> int:
    """As a door asks; how many messages came."""
    token = current_caller.set(caller)
    try:
        messages = fleet.router.inference.generate(message or request(), None)
    finally:
        current_caller.reset(token)
    return len([message async for message in messages])


async def test_limits_are_those_of_the_key_that_asked(fleet: FakeFleet) -> None:
    limited = Caller("k1", "acme", limits=Limits(requests_per_minute=2))
    assert await answered_to(fleet, limited) == 5
    assert await answered_to(fleet, limited) == 5
    with pytest.raises(LimitExceeded, match="the key 'k1' may make 2 requests per minute"):
        await answered_to(fleet, limited)
    assert await answered_to(fleet, Caller("k2", "acme", limits=limited.limits)) == 5


async def test_tokens_that_an_answer_did_not_have_are_given_back(fleet: FakeFleet) -> None:
    """Of 60, the first takes 51 and uses 22; then 51 are too many, and 25 are not."""
    limited = Caller("k1", "acme", limits=Limits(tokens_per_minute=60))
    (stop,) = plain_loop(PROMPT, 1)
    long = request(sampling=pb.SamplingParams(max_tokens=30, stop_token_ids=[stop]))
    assert await answered_to(fleet, limited, long) == 2
    with pytest.raises(LimitExceeded, match="22 of them are used, and this request may take 51"):
        await answered_to(fleet, limited, long)
    assert await answered_to(fleet, limited) == 5


async def test_all_answers_to_a_request_count_for_its_key(fleet: FakeFleet) -> None:
    """Of 60, three answers may take 21 and 3 times 13, and take 21 and 3 times 1: 24 in all."""
    limited = Caller("k1", "acme", limits=Limits(tokens_per_minute=60))
    (stop,) = plain_loop(PROMPT, 1)
    three = request(n=3, sampling=pb.SamplingParams(max_tokens=13, stop_token_ids=[stop]))
    assert await answered_to(fleet, limited, three) == 4
    with pytest.raises(LimitExceeded, match="24 of them are used, and this request may take 60"):
        await answered_to(fleet, limited, three)


def fails(fleet: FakeFleet, name: str, error: ServiceError) -> None:
    async def fail(attempt_id: str, num_tokens: int) -> None:
        raise error

    fleet.workers[name].hooks["prefill.start"] = fail


async def test_worker_that_fails_again_and_again_is_left_alone() -> None:
    async with running_fleet(2, 1) as fleet, PdserveClient(fleet.router.address) as client:
        fails(fleet, "p0", Internal("out of memory"))
        for _ in range(40):
            await answer(client, SHORT)
        assert len(fleet.workers["p0"].prefills) == 5
        assert len(fleet.workers["p1"].prefills) == 40
        (sick,) = [worker.id for worker in fleet.router.table.snapshot() if worker.id.name == "p0"]
        breakers = fleet.router._relay.breakers
        assert breakers.state(sick, asyncio.get_running_loop().time()) is BreakerState.OPEN
        await fleet.settled()


async def test_worker_that_fails_is_better_than_none() -> None:
    async with running_fleet(1, 1) as fleet, PdserveClient(fleet.router.address) as client:
        fails(fleet, "p0", Internal("out of memory"))
        for _ in range(2):
            with pytest.raises(AttemptsExhausted, match="out of memory"):
                await answer(client, SHORT)
        fleet.workers["p0"].hooks.clear()
        tokens, _, _ = await answer(client, SHORT)
        assert tokens == plain_loop(PROMPT, 4)
        await fleet.settled()


async def test_what_the_client_did_wrong_is_no_failure_of_a_worker() -> None:
    async with running_fleet(1, 1) as fleet, PdserveClient(fleet.router.address) as client:
        fails(fleet, "p0", InvalidArgument("too long"))
        for _ in range(10):
            with pytest.raises(InvalidArgument):
                await answer(client, SHORT)
        assert fleet.router._relay.breakers.avoided(asyncio.get_running_loop().time()) == set()


@pytest.mark.parametrize("error", [Unavailable("the sender is gone"), Aborted("the ticket has ended")])
async def test_what_happened_to_its_peer_is_no_failure_of_a_worker(error: ServiceError) -> None:
    """A worker that dies takes all that it was handing over with it: those who tell of it must not be avoided."""
    async with running_fleet(1, 1) as fleet, PdserveClient(fleet.router.address) as client:
        fails(fleet, "p0", error)
        for _ in range(2):
            with pytest.raises(AttemptsExhausted):
                await answer(client, SHORT)
        assert fleet.router._relay.breakers.avoided(asyncio.get_running_loop().time()) == set()


async def test_sick_cluster_is_not_asked_many_times_as_much() -> None:
    async with running_fleet(2, 1) as fleet, PdserveClient(fleet.router.address) as client:
        for name in ("p0", "p1"):
            fails(fleet, name, Internal("out of memory"))
        reasons = []
        for _ in range(50):
            with pytest.raises(AttemptsExhausted) as caught:
                await answer(client, SHORT)
            reasons.append(str(caught.value))
        num_attempts = sum(len(worker.prefills) for worker in all_workers(fleet, "p"))
        assert num_attempts <= 50 + 10 + 0.2 * 50 + 1  # the floor, the share, and the one that runs
        assert reasons[0].startswith("4 attempts failed")
        assert "too many requests are being tried again for this one to be" in reasons[-1]
        await fleet.settled()


async def test_death_of_a_worker_is_within_the_budget() -> None:
    async with running_fleet(1, 2) as fleet, PdserveClient(fleet.router.address) as client:
        go_on = held(fleet)
        answers = asked(client, 60)
        async with asyncio.timeout(5):
            while sum(num_decoding(fleet)) < 60:
                await asyncio.sleep(0.001)
        await fleet.workers["d0"].die()
        go_on.set()
        done = await asyncio.gather(*answers)
        again = [summary.usage.num_resumes + summary.usage.num_retries for _, _, summary in done]
        assert sum(again) == len(fleet.workers["d0"].decodes) > 20 and max(again) == 1
        await fleet.settled()


async def test_hand_over_of_a_running_sequence_has_its_requests_deadline() -> None:
    async with running_fleet(1, 2) as fleet, PdserveClient(fleet.router.address) as client:
        messages = client.generate(PROMPT, sampling=Sampling(max_tokens=200), deadline_s=8.0)
        await anext(messages)
        (source,) = [worker for worker in all_workers(fleet, "d") if worker.num_open]

        async def some_time(attempt_id: str, num_tokens: int) -> None:
            await asyncio.sleep(0.005)

        source.hooks["decode.token"] = some_time
        source.deadlines_s.clear()
        await client.set_draining(source.name, True)
        async with asyncio.timeout(5):
            assert len([part async for part in messages]) > 1
        assert len(source.departures) >= 1
        assert all(deadline is not None and deadline <= 9.0 for deadline in source.deadlines_s)  # gRPC rounds up


async def test_resume_without_a_worker_ends_with_the_deadline() -> None:
    async with running_fleet(1, 1) as fleet, PdserveClient(fleet.router.address) as client:
        DieOnce(fleet, "d", "decode.token", len(PROMPT) + 2)
        with pytest.raises((DeadlineExceeded, NoWorker)):
            await answer(client, Sampling(max_tokens=6), deadline_s=0.15)
        await fleet.settled()
