"""What no router of ours would send, straight to a worker: it is refused by name, and nobody else suffers for it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc.aio
import pytest
import pytest_asyncio

from deploy.local import ClusterConfig, LocalCluster
from protos import decode_pb2, decode_pb2_grpc, inference_pb2, prefill_pb2, prefill_pb2_grpc
from protos.channel import open_channel, service_errors
from protos.client import PdserveClient
from protos.errors import AlreadyExists, InvalidArgument, NotFound
from protos.values import Sampling
from tests.cluster.asking import ask, assert_at_rest
from tests.cluster.tiny_model import VOCAB_SIZE, TinyModel

pytestmark = pytest.mark.asyncio(loop_scope="module")

LEASE_S = 1.0


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster(tiny_moe: TinyModel) -> AsyncIterator[LocalCluster]:
    config = ClusterConfig(
        model=str(tiny_moe.folder),
        num_threads=1,
        worker_arguments=("--runner", "timed", "--num-blocks", "100", "--lease-s", str(LEASE_S)),
    )
    async with LocalCluster(config) as cluster:
        yield cluster
        for name in cluster.config.worker_roles:
            assert "Traceback" not in cluster.log_path(name).read_text()


@pytest_asyncio.fixture(loop_scope="module", autouse=True)
async def service_goes_on(cluster: LocalCluster) -> AsyncIterator[None]:
    yield
    async with PdserveClient(cluster.router_address) as client:
        assert len((await ask(client, [5, 6, 7], Sampling(max_tokens=2))).token_ids) == 2
    await assert_at_rest(cluster)


def sampling(max_tokens: int = 5) -> inference_pb2.SamplingParams:
    return inference_pb2.SamplingParams(temperature=0, top_p=1, repetition_penalty=1, max_tokens=max_tokens)


REFUSED = [
    ([], 0, 5, "token_ids"),
    ([5, -1], 2, 5, "token_ids"),
    ([VOCAB_SIZE, 5], 2, 5, "token_ids"),
    ([5, 2**40], 2, 5, "token_ids"),
    ([5, 6, 7], 0, 5, "num_prompt_tokens"),
    ([5, 6, 7], -(2**62), 2**62, "num_prompt_tokens"),
    ([5, 6, 7], 4, 5, "num_prompt_tokens"),
    ([5] * 8, 3, 5, "token_ids"),  # all its output is there
    ([5] * 4000, 3, 5, "token_ids"),
    ([5, 6, 7], 3, 0, "sampling.max_tokens"),
]


@pytest.mark.parametrize(("token_ids", "num_prompt_tokens", "max_tokens", "field"), REFUSED)
async def test_sequences_that_cannot_be(
    cluster: LocalCluster, token_ids: list[int], num_prompt_tokens: int, max_tokens: int, field: str
) -> None:
    workers = await cluster.workers()
    for name in ("decode-0", "prefill-0"):
        async with open_channel(workers[name].address) as channel:
            call: grpc.aio.UnaryStreamCall[Any, Any]
            if name == "decode-0":
                call = decode_pb2_grpc.DecodeStub(channel).Decode(
                    decode_pb2.DecodeRequest(
                        attempt_id="bad",
                        token_ids=token_ids,
                        num_prompt_tokens=num_prompt_tokens,
                        sampling=sampling(max_tokens),
                        prefill_here=True,
                    )
                )
            else:
                call = prefill_pb2_grpc.PrefillStub(channel).Prefill(
                    prefill_pb2.PrefillRequest(
                        attempt_id="bad",
                        token_ids=token_ids,
                        num_prompt_tokens=num_prompt_tokens,
                        sampling=sampling(max_tokens),
                    )
                )
            with pytest.raises(InvalidArgument) as caught, service_errors():
                await asyncio.wait_for(call.read(), 5)
            assert caught.value.field == field


async def test_prefill_for_a_decode_worker_without_a_name(cluster: LocalCluster) -> None:
    async with open_channel((await cluster.workers())["prefill-0"].address) as channel:
        request = prefill_pb2.PrefillRequest(
            attempt_id="a",
            token_ids=[5],
            num_prompt_tokens=1,
            sampling=sampling(),
            decode=decode_pb2.DecodeTarget(address="127.0.0.1:1"),
        )
        with pytest.raises(InvalidArgument) as caught, service_errors():
            await prefill_pb2_grpc.PrefillStub(channel).Prefill(request).read()
        assert caught.value.field == "decode"


async def test_record_with_a_token_that_is_none(cluster: LocalCluster) -> None:
    async with open_channel((await cluster.workers())["decode-0"].address) as channel:
        record = decode_pb2.HandoverRecord(ticket_id="t", first_token_id=VOCAB_SIZE)
        with pytest.raises(InvalidArgument) as caught, service_errors():
            await decode_pb2_grpc.DecodeStub(channel).Commit(record)
        assert caught.value.field == "first_token_id"


async def test_error_that_quotes_a_lot_arrives(cluster: LocalCluster) -> None:
    """gRPC carries errors in headers, which have a limit."""
    async with open_channel((await cluster.workers())["decode-0"].address) as channel:
        record = decode_pb2.HandoverRecord(ticket_id="ä" * 300_000, first_token_id=5)
        with pytest.raises(NotFound), service_errors():
            await decode_pb2_grpc.DecodeStub(channel).Commit(record)


async def test_two_streams_for_one_attempt(cluster: LocalCluster) -> None:
    """The second is refused, while the first waits and after it; the first goes on."""
    workers = await cluster.workers()
    decode, prefill = workers["decode-0"], workers["prefill-0"]
    async with open_channel(decode.address) as to_decode, open_channel(prefill.address) as to_prefill:
        asked = decode_pb2.DecodeRequest(
            attempt_id="two", token_ids=[5, 6, 7], num_prompt_tokens=3, sampling=sampling()
        )
        first = decode_pb2_grpc.DecodeStub(to_decode).Decode(asked)
        await asyncio.sleep(0.1)
        await assert_refused(to_decode, asked)
        target = decode_pb2.DecodeTarget(worker_id="decode-0", address=decode.address, epoch=decode.epoch)
        request = prefill_pb2.PrefillRequest(
            attempt_id="two", token_ids=[5, 6, 7], num_prompt_tokens=3, sampling=sampling(), decode=target
        )
        events = [
            response.WhichOneof("event") async for response in prefill_pb2_grpc.PrefillStub(to_prefill).Prefill(request)
        ]
        assert events == ["first_token", "handed_over"]
        assert sum([len(message.token_ids) async for message in first]) == 4
        await assert_refused(to_decode, asked)


async def assert_refused(channel: grpc.aio.Channel, asked: decode_pb2.DecodeRequest) -> None:
    with pytest.raises(AlreadyExists), service_errors():
        await asyncio.wait_for(decode_pb2_grpc.DecodeStub(channel).Decode(asked).read(), 5)
