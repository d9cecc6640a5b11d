"""Answers that clients read at the decode worker: the same tokens, and what the router still sees and does."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from types import CoroutineType
from typing import Any

import grpc.aio
import pytest

import protos.direct
from protos import decode_pb2, decode_pb2_grpc, inference_pb2_grpc
from protos import inference_pb2 as pb
from protos.channel import open_channel, service_errors
from protos.client import PdserveClient
from protos.errors import FailedPrecondition, Interrupted, InvalidArgument, PermissionDenied
from protos.values import Sampling
from router.progress import Progress
from tests.router.asking import PROMPT, DieOnce, FailOnce, all_workers, answer
from tests.router.fakes import FakeFleet, plain_loop, running_fleet

NUM_TOKENS = 12
WHOLE = plain_loop(PROMPT, NUM_TOKENS)
CLIENT = protos.direct.__file__


@pytest.fixture
async def fleet() -> AsyncIterator[FakeFleet]:
    async with running_fleet(num_prefill=2, num_decode=2, direct=True) as fleet:
        yield fleet
        await fleet.settled()


@pytest.fixture
async def client(fleet: FakeFleet) -> AsyncIterator[PdserveClient]:
    async with PdserveClient(fleet.router.address, direct=True) as client:
        yield client


def asked(**fields: Any) -> pb.RouteRequest:
    sampling = pb.SamplingParams(max_tokens=NUM_TOKENS, seed=1)
    request = pb.GenerateRequest(token_ids=pb.TokenIds(ids=PROMPT), sampling=sampling)
    request.MergeFrom(pb.GenerateRequest(**fields))
    return pb.RouteRequest(generate=request)


async def routed(fleet: FakeFleet, request: pb.RouteRequest) -> list[pb.GenerateResponse]:
    async with open_channel(fleet.router.address) as channel:
        with service_errors():
            return [message async for message in inference_pb2_grpc.InferenceStub(channel).Route(request)]


async def test_tokens_are_those_of_a_plain_loop(fleet: FakeFleet, client: PdserveClient) -> None:
    tokens, chunks, summary = await answer(client, Sampling(max_tokens=NUM_TOKENS))
    assert tokens == WHOLE
    assert "".join(chunk.text for chunk in chunks) == "".join(f"<{token}>" for token in tokens)
    assert [chunk.finish_reason for chunk in chunks] == [None] * (NUM_TOKENS - 1) + ["length"]
    usage = summary.usage
    assert (usage.prompt_tokens, usage.output_tokens, usage.num_resumes) == (21, NUM_TOKENS, 0)
    assert (usage.prefill_computed_tokens, usage.decode_received_tokens, usage.num_steps) == (20, 20, 1)
    assert [stage.name for stage in summary.timeline.stages] == ["tokenize", "queue", "prefill", "handover", "decode"]


async def test_router_tells_directions_the_first_token_and_the_end_alone(fleet: FakeFleet) -> None:
    async with open_channel(fleet.router.address) as channel:
        call = inference_pb2_grpc.InferenceStub(channel).Route(asked())
        directions = await _directions(call)
        worker = fleet.workers[directions.worker_id]
        assert (directions.address, len(directions.permit)) == (worker.server.address, 32)
        async with open_channel(directions.address) as at_worker:
            request = decode_pb2.ReadRequest(attempt_id=directions.attempt_id, permit=directions.permit)
            read = [message async for message in decode_pb2_grpc.DirectStub(at_worker).Read(request)]
        rest = await _rest(call)
    assert [token for message in read for token in message.token_ids] == WHOLE[1:]
    first, last = rest
    assert (first.output_index, list(first.token_ids)) == (0, WHOLE[:1])
    assert last.HasField("usage") and last.usage.output_tokens == NUM_TOKENS and not last.token_ids


async def test_one_token_needs_no_decode_worker(client: PdserveClient) -> None:
    tokens, _, summary = await answer(client, Sampling(max_tokens=1))
    assert tokens == WHOLE[:1] and not summary.usage.disaggregated


async def test_answer_that_prefill_ends(client: PdserveClient) -> None:
    tokens, chunks, _ = await answer(client, Sampling(max_tokens=9, stop_token_ids=(WHOLE[0],)))
    assert tokens == WHOLE[:1] and chunks[-1].finish_reason == "stop"


async def test_colocated_worker_says_it_all() -> None:
    async with running_fleet(num_both=1, direct=True) as fleet:
        async with PdserveClient(fleet.router.address, direct=True) as client:
            tokens, _, summary = await answer(client, Sampling(max_tokens=NUM_TOKENS))
        async with asyncio.timeout(5):
            messages = await asyncio.create_task(_read_alone(fleet))
    assert tokens == WHOLE and not summary.usage.disaggregated
    assert summary.timeline.ttft_s < summary.timeline.total_s  # the router hears of the first token when it is there
    assert [token for message in messages for token in message.token_ids] == WHOLE


async def _read_alone(fleet: FakeFleet) -> list[pb.GenerateResponse]:
    async with open_channel(fleet.router.address) as channel:
        call = inference_pb2_grpc.InferenceStub(channel).Route(asked())
        directions = await _directions(call)
        async with open_channel(directions.address) as at_worker:
            request = decode_pb2.ReadRequest(attempt_id=directions.attempt_id, permit=directions.permit)
            read = [message async for message in decode_pb2_grpc.DirectStub(at_worker).Read(request)]
        rest = await _rest(call)
    assert len(rest) == 1 and rest[0].HasField("usage")
    return read


async def _directions(call: Any) -> pb.Directions:
    """The first thing that is told."""
    message: pb.GenerateResponse = await call.read()
    return message.directions


async def _rest(call: Any) -> list[pb.GenerateResponse]:
    messages = []
    while (message := await call.read()) is not grpc.aio.EOF:
        messages.append(message)
    return messages


@pytest.mark.parametrize("num_tokens", [len(PROMPT) + 1, len(PROMPT) + 6, len(PROMPT) + NUM_TOKENS - 1])
async def test_goes_on_elsewhere_when_its_decode_worker_dies(
    fleet: FakeFleet, client: PdserveClient, num_tokens: int
) -> None:
    dying = DieOnce(fleet, "d", "decode.token", num_tokens)
    tokens, _, summary = await answer(client, Sampling(max_tokens=NUM_TOKENS, temperature=1.0))
    assert dying.hit is not None
    assert tokens == WHOLE
    assert summary.usage.output_tokens == NUM_TOKENS
    if num_tokens > len(PROMPT) + 1:  # else even the first token may not have come before
        assert summary.usage.num_resumes == 1


async def test_goes_on_elsewhere_when_prefill_fails(fleet: FakeFleet, client: PdserveClient) -> None:
    failing = FailOnce(Interrupted("no"), fleet, "p", "prefill.first")
    tokens, _, _ = await answer(client, Sampling(max_tokens=NUM_TOKENS))
    assert failing.hit is not None and tokens == WHOLE


async def test_is_moved_while_it_runs(fleet: FakeFleet, client: PdserveClient) -> None:
    begun = asyncio.Event()

    async def slow(attempt_id: str, num_tokens: int) -> None:
        begun.set()
        await asyncio.sleep(0.02)

    for worker in all_workers(fleet, "d"):
        worker.hooks["decode.token"] = slow
    num_tokens = 60
    asking = asyncio.create_task(answer(client, Sampling(max_tokens=num_tokens)))
    await begun.wait()
    (source,) = [worker for worker in all_workers(fleet, "d") if worker.decodes]
    fleet.router.table.set_draining(source.name, True)
    tokens, _, summary = await asking
    assert tokens == plain_loop(PROMPT, num_tokens)
    assert (summary.usage.num_moves, summary.usage.num_resumes) == (1, 0)
    (departure,) = source.departures
    (other,) = [worker for worker in all_workers(fleet, "d") if worker is not source]
    (arrival,) = other.decodes
    assert arrival.attempt_id == departure.next_attempt_id
    assert arrival.permit not in (b"", source.decodes[0].permit)


async def test_leaving_ends_it_everywhere(fleet: FakeFleet, client: PdserveClient) -> None:
    async def hold(attempt_id: str, num_tokens: int) -> None:
        if num_tokens > len(PROMPT) + 3:
            await asyncio.sleep(60)

    for worker in all_workers(fleet, "d"):
        worker.hooks["decode.token"] = hold
    parts = client.generate(PROMPT, sampling=Sampling(max_tokens=NUM_TOKENS))
    async for part in parts:
        if part.output_index == 2:  # type: ignore[union-attr]
            break
    await parts.aclose()
    coroutines = [task.get_coro() for task in asyncio.all_tasks()]
    assert not [each for each in coroutines if isinstance(each, CoroutineType) and each.cr_code.co_filename == CLIENT]
    await fleet.settled()


async def test_worker_that_cannot_be_reached_is_read_through_the_router(
    fleet: FakeFleet, client: PdserveClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "router.attempt.Attempt.directions",
        property(lambda self: pb.GenerateResponse(directions=pb.Directions(address="127.0.0.1:1")).SerializeToString()),
    )
    for _ in range(2):
        tokens, _, _ = await answer(client, Sampling(max_tokens=NUM_TOKENS))
        assert tokens == WHOLE
    permits = [bool(request.permit) for worker in all_workers(fleet, "d") for request in worker.decodes]
    assert permits.count(False) == 2


@pytest.mark.parametrize("wrong", [{"permit": b"x" * 32}, {"permit": b""}, {"attempt_id": "another"}])
async def test_nobody_reads_without_the_permit(
    fleet: FakeFleet, monkeypatch: pytest.MonkeyPatch, wrong: dict[str, Any]
) -> None:
    monkeypatch.setattr("decode.direct._WAIT_S", 0.05)
    go_on = asyncio.Event()

    async def hold(attempt_id: str, num_tokens: int) -> None:
        await go_on.wait()

    for worker in all_workers(fleet, "d"):
        worker.hooks["decode.token"] = hold
    async with open_channel(fleet.router.address) as channel:
        call = inference_pb2_grpc.InferenceStub(channel).Route(asked())
        directions = await _directions(call)
        right: dict[str, Any] = {"attempt_id": directions.attempt_id, "permit": directions.permit}
        async with open_channel(directions.address) as at_worker:
            stub = decode_pb2_grpc.DirectStub(at_worker)
            with pytest.raises(PermissionDenied), service_errors():
                await stub.Read(decode_pb2.ReadRequest(**{**right, **wrong})).read()
            go_on.set()
            read = [message async for message in stub.Read(decode_pb2.ReadRequest(**right))]
        assert [token for message in read for token in message.token_ids] == WHOLE[1:]
        assert (await _rest(call))[-1].HasField("usage")


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"n": 2}, "n"),
        ({"echo": True}, "echo"),
        ({"sampling": pb.SamplingParams(prompt_logprobs=0)}, "sampling.prompt_logprobs"),
    ],
)
async def test_what_only_the_router_tells(fleet: FakeFleet, fields: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        await routed(fleet, asked(**fields))
    assert caught.value.field == field
    with pytest.raises(InvalidArgument) as caught:
        await routed(fleet, pb.RouteRequest())
    assert caught.value.field == "request"


async def test_client_asks_the_router_for_these(fleet: FakeFleet, client: PdserveClient) -> None:
    parts = [part async for part in client.generate(PROMPT, sampling=Sampling(max_tokens=2, seed=1), n=2)]
    assert {getattr(part, "choice", 0) for part in parts} == {0, 1}
    tokens, _, _ = await answer(client, Sampling(max_tokens=NUM_TOKENS, prompt_logprobs=0))
    assert tokens == WHOLE


async def test_router_that_does_not_offer_it() -> None:
    async with running_fleet(num_both=1) as fleet:
        with pytest.raises(FailedPrecondition, match="without --direct"):
            await routed(fleet, asked())


async def test_answer_that_nobody_fetches_is_given_up(fleet: FakeFleet, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its tokens are not made for nothing."""
    monkeypatch.setattr("decode.direct._CLAIM_S", 0.0)
    with pytest.raises(Interrupted, match="its client has not come to read it"):
        await routed(fleet, asked())
    await fleet.settled()


async def test_client_that_stops_reading_ends_it(fleet: FakeFleet) -> None:
    async def slow(attempt_id: str, num_tokens: int) -> None:
        await asyncio.sleep(0.01)

    for worker in all_workers(fleet, "d"):
        worker.hooks["decode.token"] = slow
    async with open_channel(fleet.router.address) as channel:
        call = inference_pb2_grpc.InferenceStub(channel).Route(asked(sampling=pb.SamplingParams(max_tokens=200)))
        directions = await _directions(call)
        async with open_channel(directions.address) as at_worker:
            request = decode_pb2.ReadRequest(attempt_id=directions.attempt_id, permit=directions.permit)
            reading = decode_pb2_grpc.DirectStub(at_worker).Read(request)
            await reading.read()
            reading.cancel()
        with pytest.raises(Interrupted, match="its client has stopped reading"), service_errors():
            async with asyncio.timeout(5):
                await _rest(call)


async def test_load_is_freed_while_it_runs_and_after(fleet: FakeFleet, client: PdserveClient) -> None:
    begun, go_on = asyncio.Event(), asyncio.Event()

    async def hold(attempt_id: str, num_tokens: int) -> None:
        begun.set()
        await go_on.wait()

    for worker in all_workers(fleet, "d"):
        worker.hooks["decode.token"] = hold
    asking = asyncio.create_task(answer(client, Sampling(max_tokens=NUM_TOKENS)))
    await begun.wait()
    async with asyncio.timeout(5):
        while not all(each.is_prefilled for worker in fleet.router.table.workers() for each in worker.dispatches):
            await asyncio.sleep(0.001)
    go_on.set()
    assert (await asking)[0] == WHOLE
    await fleet.settled()


async def test_who_leaves_pays_for_what_was_read(
    fleet: FakeFleet, client: PdserveClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    used, told = list[int](), list[int]()
    relayed = Progress.relayed

    def telling(self: Progress, raw: bytes) -> None:
        told.extend(pb.GenerateResponse.FromString(raw).token_ids)
        relayed(self, raw)

    monkeypatch.setattr(Progress, "relayed", telling)
    monkeypatch.setattr("router.rate_limits.Allowance.used", lambda self, number: used.append(number))
    parts = client.generate(PROMPT, sampling=Sampling(max_tokens=200))
    async for part in parts:
        if part.output_index == 150:  # type: ignore[union-attr]
            break
    async with asyncio.timeout(5):
        while len(told) < 1 + 128:  # the rest has not made up 32 yet
            await asyncio.sleep(0.001)
    await parts.aclose()
    await fleet.settled()
    assert used == [len(PROMPT) + len(told)]
