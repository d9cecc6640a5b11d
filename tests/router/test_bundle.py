"""Answers that come in a worker's bundle are those that come in their own calls, and its end is no answer's end."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc.aio
import pytest

from protos import decode_pb2_grpc, inference_pb2_grpc
from protos import inference_pb2 as pb
from protos.channel import open_channel
from protos.client import PdserveClient
from protos.errors import Internal
from protos.serve import GrpcServer
from protos.values import Sampling
from router.bundle import Bundle
from router.inbox import Inbox
from router.merging import merged
from tests.router.asking import PROMPT, FailOnce, answer
from tests.router.fakes import FakeFleet, plain_loop, ready_load, running_fleet

NUM_TOKENS = 30


def inboxes_of(bundle: Bundle) -> list[Inbox]:
    return list(bundle._inboxes.values())


def bundles_of(fleet: FakeFleet) -> list[Bundle]:
    links = fleet.router._links._links.values()
    return [link.bundle for link in links if link.bundle is not None]


async def test_every_answer_of_a_worker_comes_in_one_bundle(fleet: FakeFleet, client: PdserveClient) -> None:
    answers = await asyncio.gather(*(answer(client, Sampling(max_tokens=NUM_TOKENS)) for _ in range(8)))
    assert [tokens for tokens, _, _ in answers] == [plain_loop(PROMPT, NUM_TOKENS)] * 8
    asked = [request for worker in fleet.workers.values() for request in worker.decodes]
    bundles = bundles_of(fleet)
    assert len(asked) == 8 and {request.bundle_id for request in asked} == {bundle.id for bundle in bundles}
    for bundle in bundles:
        numbers = [request.stream for request in asked if request.bundle_id == bundle.id]
        assert sorted(numbers) == list(range(1, len(numbers) + 1))


async def test_worker_that_knows_no_bundles_answers_in_the_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    def serve_decode(server: GrpcServer, decode: decode_pb2_grpc.DecodeServicer) -> None:
        server.add(decode_pb2_grpc.add_DecodeServicer_to_server, decode)

    monkeypatch.setattr("tests.router.fakes.serve_decode", serve_decode)
    async with running_fleet(num_prefill=1, num_decode=1) as fleet, PdserveClient(fleet.router.address) as client:
        for _ in range(2):
            tokens, _, summary = await answer(client, Sampling(max_tokens=NUM_TOKENS))
            assert tokens == plain_loop(PROMPT, NUM_TOKENS) and summary.usage.num_resumes == 0
        assert [request.bundle_id for request in fleet.workers["d0"].decodes] == ["", ""]
        await fleet.settled()


async def test_bundle_that_a_worker_refused_is_not_opened_again_and_one_that_found_nobody_is() -> None:
    async with open_channel("127.0.0.1:1") as channel:
        nobody = Bundle(channel)
        assert not await nobody.opened()
        await nobody.close()
        assert nobody.is_broken
    server = GrpcServer("127.0.0.1", 0)  # it has no such method
    await server.start()
    async with open_channel(server.address) as channel:
        refused = Bundle(channel)
        assert not await refused.opened()
        await refused.close()
        assert not refused.is_broken
    await server.stop()


async def test_worker_that_does_not_find_its_bundle_is_not_waited_for_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("decode.bundles.Bundles.get", lambda bundles, bundle_id: None)  # it has ended just before
    monkeypatch.setattr("router.leg._LAST_S", 1000.0)
    async with running_fleet(num_both=1) as fleet, PdserveClient(fleet.router.address) as client:
        tokens, _, _ = await answer(client, Sampling(max_tokens=NUM_TOKENS))
        assert tokens == plain_loop(PROMPT, NUM_TOKENS)
        assert bundles_of(fleet)[0].is_open and fleet.workers["w0"].decodes[0].bundle_id
        await fleet.settled()


async def test_answer_whose_bundle_breaks_is_resumed_and_the_next_has_a_new_one(
    fleet: FakeFleet, client: PdserveClient
) -> None:
    broken = list[Bundle]()

    async def break_it(attempt_id: str, num_tokens: int) -> None:
        if not broken and num_tokens == len(PROMPT) + 10:
            (bundle,) = bundles_of(fleet)
            broken.append(bundle)
            await bundle.close()

    for worker in fleet.workers.values():
        worker.hooks["decode.token"] = break_it
    tokens, _, summary = await answer(client, Sampling(max_tokens=NUM_TOKENS))
    assert tokens == plain_loop(PROMPT, NUM_TOKENS)
    assert (summary.usage.num_resumes, broken[0].is_broken) == (1, True)
    for worker in fleet.workers.values():
        worker.report(ready_load())
    async with asyncio.timeout(5):
        while not all(candidate.is_ready for candidate in fleet.router.table.snapshot()):
            await asyncio.sleep(0.002)
    answers = await asyncio.gather(*(answer(client, Sampling(max_tokens=NUM_TOKENS)) for _ in range(6)))
    assert [tokens for tokens, _, _ in answers] == [plain_loop(PROMPT, NUM_TOKENS)] * 6
    assert len(bundles_of(fleet)) == 2 and all(bundle.is_open for bundle in bundles_of(fleet))


async def test_failure_of_an_answer_is_its_own(fleet: FakeFleet, client: PdserveClient) -> None:
    """It comes in the call, after what the bundle has brought; the others of the bundle go on."""
    failing = FailOnce(Internal("a step failed"), fleet, "d", "decode.token", len(PROMPT) + 12)
    answers = await asyncio.gather(*(answer(client, Sampling(max_tokens=NUM_TOKENS)) for _ in range(6)))
    assert [tokens for tokens, _, _ in answers] == [plain_loop(PROMPT, NUM_TOKENS)] * 6
    assert failing.hit is not None and sum(summary.usage.num_resumes for _, _, summary in answers) == 1


async def test_bundle_ends_with_its_worker(fleet: FakeFleet, client: PdserveClient) -> None:
    await answer(client, Sampling(max_tokens=4))
    (bundle,) = bundles_of(fleet)
    (worker,) = [worker for worker in fleet.workers.values() if worker.decodes]
    await worker.die()
    async with asyncio.timeout(5):
        while bundles_of(fleet):
            await asyncio.sleep(0.002)
    assert not bundle.is_open


@pytest.mark.gathers
async def test_client_that_does_not_read_makes_its_own_sequence_wait_and_no_other(
    client: PdserveClient, fleet: FakeFleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("router.inbox.MAX_BYTES", 500)
    monkeypatch.setattr("router.inbox.merged", merged)
    num_tokens = 200
    request = pb.GenerateRequest(token_ids=pb.TokenIds(ids=PROMPT), sampling=pb.SamplingParams(max_tokens=num_tokens))
    options = (("grpc.http2.lookahead_bytes", 256), ("grpc.http2.bdp_probe", 0))
    async with grpc.aio.insecure_channel(fleet.router.address, options=options) as channel:
        call = inference_pb2_grpc.InferenceStub(channel).Generate(request)
        messages: list[Any] = [await call.read()]
        async with asyncio.timeout(5):
            while not any(not inbox.has_room.is_set() for bundle in bundles_of(fleet) for inbox in inboxes_of(bundle)):
                await asyncio.sleep(0.002)
        answers = await asyncio.gather(*(answer(client, Sampling(max_tokens=num_tokens)) for _ in range(4)))
        assert [tokens for tokens, _, _ in answers] == [plain_loop(PROMPT, num_tokens)] * 4
        assert fleet.num_open > 0  # of its answer there is more to come
        while (message := await call.read()) is not grpc.aio.EOF:
            messages.append(message)
    assert [token for message in messages for token in message.token_ids] == plain_loop(PROMPT, num_tokens)
    assert "".join(message.text for message in messages) == "".join(f"<{t}>" for t in plain_loop(PROMPT, num_tokens))
    assert max(len(message.token_ids) for message in messages) > 5  # what had come for it, at once
    assert messages[-1].usage.output_tokens == num_tokens
