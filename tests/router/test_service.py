"""The router's services over a real connection: bad input, chat, status, registration, health; and that it goes on."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator
from typing import Any

import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from prometheus_client import REGISTRY

from model.kv_layout import KVLayout
from protos import workers_pb2, workers_pb2_grpc
from protos.channel import bytes_stream, open_channel, service_errors
from protos.client import PdserveClient
from protos.errors import FailedPrecondition, InvalidArgument, NotFound, ServiceError
from protos.values import ChatMessage, Chunk, Sampling
from tests.router.fakes import BLOCK_SIZE, FakeFleet, FakeTokenizer, plain_loop, ready_load, running_fleet


@pytest.fixture
async def fleet() -> AsyncIterator[FakeFleet]:
    async with running_fleet(num_prefill=1, num_decode=1) as fleet:
        yield fleet
        await fleet.settled()


async def tokens_of(answer: AsyncIterator[Any]) -> list[int]:
    return [token async for part in answer if isinstance(part, Chunk) for token in part.token_ids]


@pytest.mark.parametrize(
    "prompt, sampling, field",
    [
        ("", Sampling(), "text"),
        ("x" * 10_000_000, Sampling(), "text"),
        ("x" * 256, Sampling(), "text"),
        ([], Sampling(), "token_ids"),
        ([1000], Sampling(), "token_ids"),
        ("hi", Sampling(max_tokens=0), "sampling.max_tokens"),
        ("hi", Sampling(max_tokens=255), "sampling.max_tokens"),
        ("hi", Sampling(temperature=-1.0), "sampling.temperature"),
        ("hi", Sampling(temperature=math.nan), "sampling.temperature"),
        ("hi", Sampling(top_p=0.0), "sampling.top_p"),
    ],
    ids=lambda value: "" if isinstance(value, Sampling) else str(value)[:12],
)
async def test_bad_input_is_named_and_the_service_goes_on(
    client: PdserveClient, prompt: str | list[int], sampling: Sampling, field: str
) -> None:
    with pytest.raises(InvalidArgument) as caught:
        await tokens_of(client.generate(prompt, sampling=sampling))
    assert caught.value.field == field
    expected = plain_loop(FakeTokenizer().encode("hi"), 3)
    assert await tokens_of(client.generate("hi", sampling=Sampling(max_tokens=3))) == expected


async def test_text_that_is_not_utf8(fleet: FakeFleet) -> None:
    async with open_channel(fleet.router.address) as channel:
        call = bytes_stream(channel, "/pdserve.v1.Inference/Generate")(b"\x1a\x02\xff\xfe")
        with pytest.raises(InvalidArgument, match=r"not a valid pdserve\.v1\.GenerateRequest"), service_errors():
            await call.read()


async def test_unknown_model(client: PdserveClient) -> None:
    with pytest.raises(NotFound, match="'tiny' is"):
        await tokens_of(client.generate("hi", model="huge"))
    with pytest.raises(NotFound, match="'tiny' is"):
        await client.get_model("huge")


async def test_chat_is_rendered_and_answered(client: PdserveClient) -> None:
    messages = [ChatMessage("system", "be brief"), ChatMessage("user", "hi")]
    expected = plain_loop(FakeTokenizer().encode("<system>be brief<user>hi"), 4)
    assert await tokens_of(client.chat(messages, sampling=Sampling(max_tokens=4))) == expected


async def test_chat_that_the_template_rejects(client: PdserveClient) -> None:
    with pytest.raises(InvalidArgument, match="the user speaks first") as caught:
        await tokens_of(client.chat([ChatMessage("assistant", "hi")]))
    assert caught.value.field == "messages"


async def test_tokenize(client: PdserveClient) -> None:
    assert await client.tokenize("ab") == [(100, "t100"), (101, "t101")]
    assert len(await client.tokenize([ChatMessage("user", "ab")])) == len("<user>ab")
    with pytest.raises(InvalidArgument, match="text is empty"):
        await client.tokenize("")
    with pytest.raises(InvalidArgument, match="at most 1000"):
        await client.tokenize("x" * 1001)


async def test_model_tells_what_the_workers_have_in_common() -> None:
    layout = KVLayout("m1", "float32", 2, 2, 8, BLOCK_SIZE)
    async with running_fleet() as fleet, PdserveClient(fleet.router.address) as client:
        model = await client.get_model()
        assert (model.name, model.max_context_tokens, model.eos_token_ids) == ("tiny", 256, (2,))
        assert model.layout_fingerprint == ""
        await fleet.add("w", workers_pb2.ROLE_BOTH)
        model = await client.get_model("tiny")
        assert model.layout_fingerprint == layout.fingerprint
        assert model.kv_bytes_per_token == 2 * 2 * 2 * 8 * 4  # K and V, layers, heads, head size, float32


async def test_workers_cap_the_context_and_the_least_of_them_counts() -> None:
    async with running_fleet() as fleet, PdserveClient(fleet.router.address) as client:
        await fleet.add("wide", workers_pb2.ROLE_BOTH, max_context_tokens=100)
        narrow = await fleet.add("narrow", workers_pb2.ROLE_BOTH, max_context_tokens=20)
        assert (await client.get_model()).max_context_tokens == 20
        with pytest.raises(InvalidArgument, match=r"text has 20 tokens; the context .* --max-context holds 20"):
            await tokens_of(client.generate("x" * 20))
        assert await tokens_of(client.generate("x" * 19)) == plain_loop(FakeTokenizer().encode("x" * 19), 1)
        await narrow.die()
        async with asyncio.timeout(5):
            while (await client.get_model()).max_context_tokens != 100:
                await asyncio.sleep(0.001)


async def test_status_tells_that_the_router_drains(fleet: FakeFleet, client: PdserveClient) -> None:
    held, answer_began = asyncio.Event(), asyncio.Event()

    async def hold(attempt_id: str, num_tokens: int) -> None:
        answer_began.set()
        await held.wait()

    fleet.workers["d0"].hooks["decode.token"] = hold
    assert not (await client.get_status()).is_draining
    asking = asyncio.create_task(tokens_of(client.generate("hi", sampling=Sampling(max_tokens=3))))
    await answer_began.wait()
    draining = asyncio.create_task(fleet.router.drain())
    async with asyncio.timeout(5):
        while not (status := await client.get_status()).is_draining:
            await asyncio.sleep(0.001)
    assert status.num_requests_in_flight == 1
    held.set()
    assert len(await asking) == 3
    await draining


async def test_status_shows_workers_and_their_load(fleet: FakeFleet, client: PdserveClient) -> None:
    fleet.workers["p0"].report(ready_load(queued_prefill_tokens=123, num_used_blocks=7, num_quarantined_blocks=1))
    async with asyncio.timeout(5):
        while True:
            status = await client.get_status()
            decode, prefill = status.workers
            if prefill.queued_prefill_tokens:
                break
    assert (prefill.worker_id, prefill.role, prefill.state, prefill.epoch) == ("p0", "prefill", "ready", "e1")
    assert (prefill.queued_prefill_tokens, prefill.num_used_blocks, prefill.num_quarantined_blocks) == (123, 7, 1)
    assert (decode.worker_id, decode.role, decode.address) == ("d0", "decode", fleet.workers["d0"].server.address)
    assert (status.model_name, status.num_requests_in_flight) == ("tiny", 0)
    assert 0 <= prefill.reported_ago_s < 5 and status.uptime_s > 0


async def test_lost_worker_is_shown_as_lost(fleet: FakeFleet, client: PdserveClient) -> None:
    await fleet.workers["p0"].die()
    async with asyncio.timeout(5):
        while {worker.worker_id: worker.state for worker in (await client.get_status()).workers}["p0"] != "lost":
            await asyncio.sleep(0.001)


async def refusal(fleet: FakeFleet, report: workers_pb2.WorkerReport) -> ServiceError:
    async def say() -> AsyncIterator[workers_pb2.WorkerReport]:
        yield report
        await asyncio.sleep(30)

    async with open_channel(fleet.router.address) as channel:
        with pytest.raises(ServiceError) as caught, service_errors():
            async for _ in workers_pb2_grpc.WorkersStub(channel).Register(say()):
                pass
    return caught.value


async def test_worker_of_another_layout_is_refused(fleet: FakeFleet, client: PdserveClient) -> None:
    hello = fleet.workers["p0"].hello()
    hello.worker_id, hello.layout.dtype = "stranger", "bfloat16"
    error = await refusal(fleet, workers_pb2.WorkerReport(hello=hello, load=ready_load()))
    assert type(error) is FailedPrecondition and error.field == "hello.layout"
    assert "dtype is 'bfloat16' at stranger and 'float32' at those registered" in str(error)
    assert len((await client.get_status()).workers) == 2


async def test_worker_of_another_tokenizer_is_refused(fleet: FakeFleet) -> None:
    hello = fleet.workers["p0"].hello()
    hello.worker_id, hello.tokenizer_digest = "stranger", "digest-2"
    error = await refusal(fleet, workers_pb2.WorkerReport(hello=hello, load=ready_load()))
    assert type(error) is FailedPrecondition and "'digest-2' at the worker and 'digest-1' at the router" in str(error)


async def test_report_of_nobody_and_hello_that_cannot_be(fleet: FakeFleet) -> None:
    assert type(await refusal(fleet, workers_pb2.WorkerReport(load=ready_load()))) is InvalidArgument
    hello = fleet.workers["p0"].hello()
    hello.layout.block_size = 0
    error = await refusal(fleet, workers_pb2.WorkerReport(hello=hello))
    assert type(error) is InvalidArgument and "block_size is 0" in str(error)
    hello = fleet.workers["p0"].hello()
    hello.max_context_tokens = -1
    error = await refusal(fleet, workers_pb2.WorkerReport(hello=hello))
    assert type(error) is InvalidArgument and error.field == "hello.max_context_tokens"


async def test_second_process_of_one_name_ends_the_first(fleet: FakeFleet, client: PdserveClient) -> None:
    first = fleet.workers["d0"]
    second = await fleet.add("d0", workers_pb2.ROLE_DECODE, epoch="e2")
    assert first.registration is not None
    await asyncio.wait([first.registration])
    error = first.registration.exception()
    assert error is not None and "another process has registered as 'd0'" in str(error)
    await tokens_of(client.generate("hi", sampling=Sampling(max_tokens=3)))
    assert (len(first.decodes), len(second.decodes)) == (0, 1)
    await first.die()


async def test_set_role_errors_name_what_is_wrong(fleet: FakeFleet, client: PdserveClient) -> None:
    with pytest.raises(NotFound, match="no worker 'p9' is registered; there are: d0, p0"):
        await client.set_role("p9", "both")
    async with open_channel(fleet.router.address) as channel:
        with pytest.raises(InvalidArgument, match="role is 0"), service_errors():
            await workers_pb2_grpc.PoolsStub(channel).SetRole(workers_pb2.SetRoleRequest(worker_id="p0"))


async def test_health_follows_whether_a_request_could_be_served() -> None:
    async with running_fleet() as fleet, open_channel(fleet.router.address) as channel:
        stub = health_pb2_grpc.HealthStub(channel)

        async def becomes(expected: str) -> None:
            async with asyncio.timeout(5):
                while True:
                    response = await stub.Check(health_pb2.HealthCheckRequest(service="pdserve.v1.Inference"))
                    if health_pb2.HealthCheckResponse.ServingStatus.Name(response.status) == expected:
                        return
                    await asyncio.sleep(0.001)

        await becomes("NOT_SERVING")
        prefill = await fleet.add("p", workers_pb2.ROLE_PREFILL)
        await becomes("NOT_SERVING")
        await fleet.add("d", workers_pb2.ROLE_DECODE)
        await becomes("SERVING")
        await prefill.die()
        await becomes("NOT_SERVING")
        alive = await stub.Check(health_pb2.HealthCheckRequest(service=""))
        assert alive.status == health_pb2.HealthCheckResponse.SERVING


def sample(name: str, **labels: str) -> float:
    return REGISTRY.get_sample_value(name, labels) or 0.0


async def test_metrics_count_what_happened(fleet: FakeFleet, client: PdserveClient) -> None:
    names = {
        ("pdserve_router_requests_total", "outcome", "ok"): 2,
        ("pdserve_router_requests_total", "outcome", "invalid_argument"): 1,
        ("pdserve_router_tokens_total", "kind", "prompt"): 4,
        ("pdserve_router_tokens_total", "kind", "output"): 6,
        ("pdserve_router_tokens_total", "kind", "decode_received"): 2,
        ("pdserve_router_stage_seconds_count", "stage", "decode"): 2,
    }
    before = {key: sample(key[0], **{key[1]: key[2]}) for key in names}
    for _ in range(2):
        await tokens_of(client.generate("hi", sampling=Sampling(max_tokens=3)))
    with pytest.raises(InvalidArgument):
        await tokens_of(client.generate(""))
    assert {key: sample(key[0], **{key[1]: key[2]}) - before[key] for key in names} == names
    assert sample("pdserve_router_requests_in_flight") == 0
    assert sample("pdserve_router_workers", role="prefill", state="ready") == 1


async def test_default_answer_is_bounded_by_the_cache_of_the_workers() -> None:
    """A model's context may be larger than what any worker can hold."""
    async with running_fleet() as fleet, PdserveClient(fleet.router.address) as client:
        worker = await fleet.add("w", workers_pb2.ROLE_BOTH, num_blocks=5)
        tokens = await tokens_of(client.generate([50] * 8))
        assert len(tokens) == 5 * BLOCK_SIZE - 8
        assert worker.decodes[0].sampling.max_tokens == 12
        with pytest.raises(
            InvalidArgument, match="at most 12: the largest KV cache of the workers that decode holds 20"
        ):
            await tokens_of(client.generate([50] * 8, sampling=Sampling(max_tokens=13)))
