"""What every server of ours does around a call, seen by a client over a real connection."""

from __future__ import annotations

import asyncio
import logging
import socket
import time
import urllib.request

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from prometheus_client import REGISTRY

from protos import inference_pb2, inference_pb2_grpc
from protos.channel import MAX_MESSAGE_BYTES, bytes_stream, service_errors
from protos.errors import Internal, InvalidArgument, NotFound, ResourceExhausted, Unavailable, is_connection_failure
from protos.serve import GrpcServer, serve_metrics
from tests.protos.echo import running_echo

SERVICE = "pdserve.v1.Inference"


async def test_error_in_a_stream_comes_after_what_was_sent() -> None:
    async with running_echo() as (_, _, channel):
        call, received = inference_pb2_grpc.InferenceStub(channel).Chat(inference_pb2.ChatRequest()), []
        with pytest.raises(NotFound, match="the rest is gone") as caught, service_errors():
            async for message in call:
                received.append(list(message.token_ids))
        assert received == [[1]]
        assert (caught.value.field, caught.value.retry_after_s) == ("messages", 0.5)


async def test_defect_is_internal_says_nothing_and_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    async with running_echo() as (_, _, channel):
        stub = inference_pb2_grpc.InferenceStub(channel)
        with caplog.at_level(logging.ERROR), pytest.raises(Internal) as caught, service_errors():
            await stub.GetModel(inference_pb2.GetModelRequest(model="defect"))
        assert "secret" not in str(caught.value)
        assert "a secret of the inside" in caplog.text and "/pdserve.v1.Inference/GetModel" in caplog.text
        assert (await stub.GetModel(inference_pb2.GetModelRequest(model="fine"))).name == "fine"


@pytest.mark.parametrize("raw", [b"\x0a\x02\xff\xfe", b"\xff\xff\xff", b"\x0a\x7f"], ids=["utf8", "tag", "cut"])
@pytest.mark.parametrize("method, kind", [("GetModel", "GetModelRequest"), ("Generate", "GenerateRequest")])
async def test_bytes_that_are_no_message_are_the_callers_doing(raw: bytes, method: str, kind: str) -> None:
    async with running_echo() as (_, _, channel):
        with pytest.raises(InvalidArgument, match=f"not a valid pdserve.v1.{kind}"), service_errors():
            if method == "Generate":
                await bytes_stream(channel, f"/{SERVICE}/{method}")(raw).read()
            else:
                await _call_with_bytes(channel, f"/{SERVICE}/{method}", raw)


async def _call_with_bytes(channel: grpc.aio.Channel, method: str, raw: bytes) -> None:
    call: grpc.aio.UnaryUnaryMultiCallable[bytes, bytes] = channel.unary_unary(method)
    await call(raw)


async def test_message_over_the_limit_is_refused_and_the_next_is_served() -> None:
    async with running_echo() as (echo, _, channel):
        stub = inference_pb2_grpc.InferenceStub(channel)
        with pytest.raises(ResourceExhausted, match=str(MAX_MESSAGE_BYTES)) as caught, service_errors():
            await stub.Tokenize(inference_pb2.TokenizeRequest(text="x" * MAX_MESSAGE_BYTES))
        assert not caught.value.retryable
        ten_million = 10_000_000
        response = await stub.Tokenize(inference_pb2.TokenizeRequest(text="x" * ten_million))
        assert list(response.token_ids) == echo.sizes == [ten_million]


async def test_client_that_leaves_closes_the_stream_at_once() -> None:
    async with running_echo() as (echo, server, channel):
        call = inference_pb2_grpc.InferenceStub(channel).Generate(inference_pb2.GenerateRequest())
        await call.read()
        assert server.num_requests == 1
        call.cancel()
        async with asyncio.timeout(5):
            while server.num_requests:
                await asyncio.sleep(0.001)
        assert echo.closed == 1


async def test_stop_lets_requests_finish_and_cancels_what_takes_longer() -> None:
    async with running_echo() as (echo, server, channel):
        stub = inference_pb2_grpc.InferenceStub(channel)
        endless = stub.Generate(inference_pb2.GenerateRequest())
        await endless.read()
        slow = asyncio.create_task(_name(stub, "slow"))
        await _being_served(server, 2)
        await server.stop(grace_s=0.2)
        assert await slow == "slow"
        assert echo.closed == 1
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            while await endless.read() is not grpc.aio.EOF:
                pass
        assert is_connection_failure(caught.value)


async def _being_served(server: GrpcServer, num_requests: int) -> None:
    async with asyncio.timeout(5):
        while server.num_requests < num_requests:
            await asyncio.sleep(0.001)


async def _name(stub: inference_pb2_grpc.InferenceStub, model: str) -> str:
    return (await stub.GetModel(inference_pb2.GetModelRequest(model=model))).name


async def test_stop_takes_no_longer_than_what_runs() -> None:
    async with running_echo() as (_, server, channel):
        stub = inference_pb2_grpc.InferenceStub(channel)
        slow = asyncio.create_task(_name(stub, "slow"))
        await _being_served(server, 1)
        started_at = time.monotonic()
        await server.stop(grace_s=30)
        assert time.monotonic() - started_at < 5
        assert await slow == "slow"


async def test_peer_that_is_gone_is_a_connection_failure_and_retryable() -> None:
    async with running_echo() as (_, server, channel):
        await server.stop()
        stub = inference_pb2_grpc.InferenceStub(channel)
        with pytest.raises(Unavailable) as caught, service_errors():
            await stub.GetModel(inference_pb2.GetModelRequest())
        assert caught.value.retryable


async def test_health_of_process_and_service_are_apart() -> None:
    async with running_echo() as (_, server, channel):
        health = health_pb2_grpc.HealthStub(channel)

        async def status(service: str) -> str:
            response = await health.Check(health_pb2.HealthCheckRequest(service=service))
            return str(health_pb2.HealthCheckResponse.ServingStatus.Name(response.status))

        assert (await status(""), await status(SERVICE)) == ("SERVING", "SERVING")
        await server.set_serving(SERVICE, False)
        assert (await status(""), await status(SERVICE)) == ("SERVING", "NOT_SERVING")
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await status("no.such.Service")
        assert caught.value.code() is grpc.StatusCode.NOT_FOUND


async def test_reflection_lists_the_services() -> None:
    async with running_echo() as (_, _, channel):
        call = reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo(
            iter([reflection_pb2.ServerReflectionRequest(list_services="")])
        )
        response = await call.read()
        names = {service.name for service in response.list_services_response.service}
        assert names == {SERVICE, "grpc.health.v1.Health", "grpc.reflection.v1alpha.ServerReflection"}


async def test_calls_are_counted_by_method_and_code() -> None:
    method = f"/{SERVICE}/GetModel"

    def count(code: str) -> float:
        return REGISTRY.get_sample_value("pdserve_grpc_calls_total", {"method": method, "code": code}) or 0.0

    before = {code: count(code) for code in ("OK", "INVALID_ARGUMENT")}
    async with running_echo() as (_, _, channel):
        await _name(inference_pb2_grpc.InferenceStub(channel), "x")
        with pytest.raises(grpc.aio.AioRpcError):
            await _call_with_bytes(channel, method, b"\xff")
    assert {code: count(code) - number for code, number in before.items()} == {"OK": 1, "INVALID_ARGUMENT": 1}
    assert REGISTRY.get_sample_value("pdserve_grpc_calls_in_flight", {"method": method}) == 0


async def test_port_in_use_names_the_address() -> None:
    async with running_echo() as (_, server, _):
        port = int(server.address.rpartition(":")[2])
        with pytest.raises(
            OSError, match=rf"cannot listen at {server.address}: Address already in use; choose another"
        ):
            await GrpcServer("127.0.0.1", port).start()


async def test_address_that_is_not_ours_names_it() -> None:
    with pytest.raises(OSError, match=r"cannot listen at 192\.0\.2\.1:0: "):
        await GrpcServer("192.0.2.1", 0).start()


async def test_ipv6_address_can_be_dialled() -> None:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        pytest.skip("this machine has no IPv6")
    server = GrpcServer("::1", 0)
    await server.start()
    assert server.address.startswith("[::1]:")
    await server.stop()


def test_metrics_over_http_until_closed() -> None:
    server = serve_metrics("127.0.0.1", 0)
    try:
        with urllib.request.urlopen(f"http://{server.address}/metrics", timeout=5) as response:
            assert b"pdserve_grpc_calls_in_flight" in response.read()
        with pytest.raises(OSError, match=f"cannot listen at {server.address}"):
            serve_metrics("127.0.0.1", int(server.address.rpartition(":")[2]))
    finally:
        server.close()
    with socket.socket() as probe:
        assert probe.connect_ex(("127.0.0.1", int(server.address.rpartition(":")[2]))) != 0
