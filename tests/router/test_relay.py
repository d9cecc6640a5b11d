"""Requests through a real router to fake workers over real gRPC, when nothing fails but clients may leave."""

from __future__ import annotations

import asyncio

import pytest

from protos import inference_pb2 as pb
from protos import workers_pb2
from protos.client import PdserveClient
from protos.errors import (
    AlreadyExists,
    DeadlineExceeded,
    FailedPrecondition,
    NoWorker,
    Unavailable,
)
from protos.values import Sampling, Summary
from tests.router.asking import PROMPT, all_workers, answer
from tests.router.fakes import FakeFleet, plain_loop, running_fleet


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


async def test_a_deadline_that_is_out_of_sight_is_none(fleet: FakeFleet) -> None:
    """A client may send one of 11,000 years; as a timeout of a call to a worker it would be over at once."""
    request = pb.GenerateRequest(token_ids=pb.TokenIds(ids=PROMPT), sampling=pb.SamplingParams(max_tokens=4))
    answers = fleet.router.inference.generate(request, 1e300)
    messages = [pb.GenerateResponse.FromString(raw) async for raw in answers]
    assert [token_id for message in messages for token_id in message.token_ids] == plain_loop(PROMPT, 4)
    assert messages[-1].usage.num_retries == 0


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
    await answer(
        client, Sampling(max_tokens=3, stop_token_ids=[7], stop=["é"], logit_bias={5: -1.5}, prompt_logprobs=2)
    )
    (prefill,) = [request for worker in all_workers(fleet, "p") for request in worker.prefills]
    (decode,) = [request for worker in all_workers(fleet, "d") for request in worker.decodes]
    target = fleet.workers[prefill.decode.worker_id]
    assert (prefill.decode.address, prefill.decode.epoch) == (target.server.address, "e1")
    assert target.decodes == [decode]
    assert prefill.attempt_id == decode.attempt_id
    assert prefill.request_id == decode.request_id != ""
    assert prefill.sampling == decode.sampling
    assert list(prefill.sampling.stop_token_ids) == [7, 2]
    assert (list(prefill.sampling.stop), dict(prefill.sampling.logit_bias)) == (["é"], {5: -1.5})
    assert prefill.sampling.prompt_logprobs == 2
    present = {field.name for field, _ in prefill.sampling.ListFields()}
    assert {field.name for field in prefill.sampling.DESCRIPTOR.fields} - present == {
        "logprobs",
        "max_draft_tokens",
        "json_schema",
        "regex",
        "lark",
    }


async def test_first_token_comes_before_decodes_bytes_that_were_quicker(
    fleet: FakeFleet, client: PdserveClient
) -> None:
    """Prefill says its first token only when decode has already sent all of its tokens."""
    all_sent = asyncio.Event()

    async def committed_at_once(attempt_id: str, num_tokens: int) -> None:
        fleet.hand_over.of(attempt_id).set_result(None)
        await all_sent.wait()

    async def last_token(attempt_id: str, num_tokens: int) -> None:
        if num_tokens == len(PROMPT) + 4:
            asyncio.get_running_loop().call_later(0.02, all_sent.set)

    async def nothing_left_to_commit(attempt_id: str, num_tokens: int) -> None:
        del fleet.hand_over.commits[attempt_id]

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


async def test_deadline_is_passed_on_to_the_workers(fleet: FakeFleet, client: PdserveClient) -> None:
    """They must not go on with a request whose router has been cut off."""
    await answer(client, Sampling(max_tokens=3), deadline_s=30.0)
    deadlines_s = [deadline for worker in fleet.workers.values() for deadline in worker.deadlines_s]
    assert len(deadlines_s) == 2
    assert all(deadline is not None and 20.0 < deadline <= 31.0 for deadline in deadlines_s)  # gRPC rounds up


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


async def test_client_that_leaves_a_colocated_worker() -> None:
    async with running_fleet(num_both=1) as fleet, PdserveClient(fleet.router.address) as client:
        for num_read in (1, 3):
            parts = client.generate(PROMPT, sampling=Sampling(max_tokens=200))
            for _ in range(num_read):
                await anext(parts)
            await parts.aclose()
            await fleet.settled()
        assert not fleet.workers["w0"].prefills and len(fleet.workers["w0"].decodes) == 2


async def test_no_worker_says_which_role_is_missing() -> None:
    async with running_fleet(num_prefill=1) as fleet, PdserveClient(fleet.router.address) as client:
        with pytest.raises(NoWorker, match="no worker can decode"):
            await answer(client, Sampling(max_tokens=6))
        tokens, _, _ = await answer(client, Sampling(max_tokens=1))
        assert tokens == plain_loop(PROMPT, 1)


async def test_role_flip_takes_effect_from_the_next_request_on() -> None:
    async with running_fleet(2, 1) as fleet, PdserveClient(fleet.router.address) as client:
        await client.set_role("p0", "decode")
        with pytest.raises(FailedPrecondition, match="no worker in service prefills but 'p1'"):
            await client.set_role("p1", "decode")
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
