"""One trace over router and workers: a caller's context goes in, and every part of the request is found under it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import grpc.aio
import pytest
import pytest_asyncio

from deploy.local import LocalCluster
from protos import inference_pb2, inference_pb2_grpc
from tests.cluster.timed_cluster import expected, prompts, timed_config
from tests.cluster.tiny_model import TinyModel
from tests.protos.collector import CollectedSpan, Collector

TRACE, CALLER = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
NUM_TOKENS = 60
PARTS = {"queue", "compute", "hand-over", "arrival", "wait", "generate"}
ALL = PARTS | {"request", "tokenize", "attempt", "prefill", "decode"}


@pytest.fixture
def collector() -> Iterator[Collector]:
    with Collector() as running:
        yield running


@pytest_asyncio.fixture
async def cluster(collector: Collector, tiny_moe: TinyModel, tmp_path: Path) -> AsyncIterator[LocalCluster]:
    environment = {"OTEL_EXPORTER_OTLP_ENDPOINT": collector.endpoint, "OTEL_BSP_SCHEDULE_DELAY": "50"}
    config = timed_config(tiny_moe, tmp_path, num_prefill=1, environment=environment)
    async with LocalCluster(config) as cluster:
        yield cluster


async def asked(channel: grpc.aio.Channel, prompt: list[int], trace: str) -> list[int]:
    request = inference_pb2.GenerateRequest(
        token_ids=inference_pb2.TokenIds(ids=prompt),
        sampling=inference_pb2.SamplingParams(temperature=0, max_tokens=NUM_TOKENS),
    )
    metadata = (("traceparent", f"00-{trace}-{CALLER}-01"),)
    call = inference_pb2_grpc.InferenceStub(channel).Generate(request, metadata=metadata)
    return [token_id async for message in call for token_id in message.token_ids]


async def collected(collector: Collector, trace: str, names: set[str]) -> dict[str, list[CollectedSpan]]:
    """By name, in order of time, once these are among them. A process sends its spans in the order of their ends."""
    while True:
        spans = sorted((span for span in collector.spans if span.trace_id == trace), key=lambda span: span.start_s)
        by_name = {name: [span for span in spans if span.name == name] for name in {span.name for span in spans}}
        if names <= by_name.keys():
            return by_name
        await asyncio.sleep(0.02)


async def test_every_part_of_a_request_and_both_attempts_of_one_that_lost_its_worker(
    cluster: LocalCluster, collector: Collector
) -> None:
    first, second = prompts(2, range(150, 300))
    async with grpc.aio.insecure_channel(cluster.router_address) as channel:
        assert await asked(channel, first, TRACE) == expected(first, NUM_TOKENS)
        by_name = await collected(collector, TRACE, ALL)
        (request,), (attempt,) = by_name["request"], by_name["attempt"]
        (prefill,), (decode,) = by_name["prefill"], by_name["decode"]
        assert request.parent_id == CALLER and request.service == "pdserve-router"
        assert attempt.parent_id == request.span_id == by_name["tokenize"][0].parent_id
        assert prefill.parent_id == decode.parent_id == attempt.span_id
        assert str(attempt.attributes["pdserve.prefill"]) in str(attempt.attributes["pdserve.reason"])
        assert prefill.service == decode.service == "pdserve-worker"
        assert by_name.keys() == ALL
        parents = {"queue": prefill, "compute": prefill, "hand-over": prefill}
        for name in PARTS:
            (part,), parent = by_name[name], parents.get(name, decode)
            assert part.parent_id == parent.span_id
            assert parent.start_s - 0.01 <= part.start_s <= part.end_s <= parent.end_s + 0.01
        assert by_name["compute"][0].attributes["pdserve.computed_tokens"] == len(first)
        assert by_name["hand-over"][0].attributes["pdserve.tokens"] == len(first)
        assert not any(span.is_error for span in collector.spans)

        trace = TRACE[::-1]
        answering = asyncio.create_task(asked(channel, second, trace))
        on = await _decoding(cluster)
        await cluster.kill(on)
        assert await answering == expected(second, NUM_TOKENS)
        attempts = (await collected(collector, trace, {"request"}))["attempt"]
        assert [span.is_error for span in attempts] == [True, False]
        assert attempts[0].attributes["pdserve.decode"] == on != attempts[1].attributes["pdserve.decode"]
        assert attempts[1].attributes["pdserve.after_tokens"] > 0


async def _decoding(cluster: LocalCluster) -> str:
    """The decode worker that has begun to."""
    async with asyncio.timeout(20):
        while True:
            workers = await cluster.workers()
            for name in ("decode-0", "decode-1"):
                if workers[name].num_running:
                    return name
            await asyncio.sleep(0.02)
