"""The KServe door, asked by tritonclient in a process of its own, and with messages that no client would make."""

from __future__ import annotations

import asyncio
import json
import struct
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from google.protobuf import descriptor_pb2

from protos import kserve_pb2 as kserve
from protos import kserve_pb2_grpc
from protos.channel import open_channel, service_errors
from protos.errors import InvalidArgument, Unimplemented
from tests.router.fakes import FakeFleet, FakeTokenizer, plain_loop, ready_load, running_fleet

ASKER = Path(__file__).parent / "triton_asker.py"
SLOW = 41  # tokens with which decode waits: no other prompt of the asker's gets so far


def expected_text(prompt: str, num_tokens: int) -> str:
    return "".join(f"<{token}>" for token in plain_loop(FakeTokenizer().encode(prompt), num_tokens))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def told() -> dict[str, Any]:
    """What tritonclient was told, in one session, by a router that is gone by now."""
    async with running_fleet(num_prefill=1, num_decode=1) as fleet:

        async def hold(attempt_id: str, num_tokens: int) -> None:
            if num_tokens == SLOW:
                await asyncio.sleep(30)

        async def report() -> None:
            while True:
                for worker in fleet.workers.values():
                    worker.report(ready_load())
                await asyncio.sleep(1)

        fleet.workers["d0"].hooks["decode.token"] = hold
        reporting = asyncio.create_task(report())
        command = (sys.executable, str(ASKER), fleet.router.address)
        asker = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
        try:
            said, _ = await asyncio.wait_for(asker.communicate(), 60)
        finally:
            reporting.cancel()
            if asker.returncode is None:
                asker.kill()
                await asker.wait()
        assert asker.returncode == 0
        await fleet.settled()
        told: dict[str, Any] = json.loads(said)
        return told


async_module = pytest.mark.asyncio(loop_scope="module")


@async_module
async def test_live_ready_and_metadata(told: dict[str, Any]) -> None:
    assert told["live"] == [True, True, True]
    assert told["server"]["name"] == "pdserve"
    assert (told["model"]["name"], told["model"]["versions"]) == ("tiny", ["1"])
    inputs = {each["name"]: (each["datatype"], each["shape"]) for each in told["model"]["inputs"]}
    assert inputs["text_input"] == ("BYTES", ["1"]) and inputs["temperature"] == ("FP32", ["1"])
    assert inputs["stop"] == ("BYTES", ["-1"]) and inputs["max_tokens"] == ("INT64", ["1"])
    assert told["model"]["outputs"][0]["name"] == "text_output"
    assert told["config"]["config"]["model_transaction_policy"] == {"decoupled": True}


@async_module
async def test_whole_answers(told: dict[str, Any]) -> None:
    assert told["whole"] == {
        "id": "r1",
        "final": None,
        "text_output": [expected_text("hi", 3)],
        "finish_reason": ["length"],
        "num_input_tokens": [2],
        "num_output_tokens": [3],
    }
    assert told["one_output"] == {"id": "", "final": None, "text_output": [expected_text("hi", 3)]}
    assert told["parameters"]["text_output"] == [expected_text("hi", 2)]


@async_module
async def test_stream(told: dict[str, Any]) -> None:
    *said, last = told["stream"]
    assert [each["text_output"][0] for each in said] == [
        f"<{token}>" for token in plain_loop(FakeTokenizer().encode("hi"), 3)
    ]
    assert [each["finish_reason"][0] for each in said] == ["", "", "length"]
    assert {each["final"] for each in said} == {False} and {each["id"] for each in told["stream"]} == {"s1"}
    assert last["final"] and (last["num_input_tokens"], last["num_output_tokens"]) == ([2], [3])


@async_module
async def test_empty_end_where_it_is_asked_for(told: dict[str, Any]) -> None:
    assert told["empty_end"][-1] == {"id": "s2", "final": True}
    assert [each["final"] for each in told["empty_end"]] == [False] * 4 + [True]


@async_module
async def test_two_requests_in_one_stream(told: dict[str, Any]) -> None:
    for request_id, text in (("a", "hi"), ("b", "you")):
        said = [each["text_output"][0] for each in told["two"] if each["id"] == request_id]
        assert "".join(said) == expected_text(text, 3)


@async_module
async def test_error_in_a_stream_ends_its_request_alone(told: dict[str, Any]) -> None:
    errors = [each for each in told["bad_amid"] if isinstance(each, str)]
    assert errors == ["max_tokens is -1; it must be at least 1"]
    good = "".join(each["text_output"][0] for each in told["bad_amid"] if isinstance(each, dict))
    assert good == expected_text("hi", 3)


@async_module
async def test_errors(told: dict[str, Any]) -> None:
    expected = {
        "model": ("StatusCode.NOT_FOUND", "model 'huge' is not served here; 'tiny' is"),
        "version": ("StatusCode.NOT_FOUND", "model 'tiny' has the version 1 only, not '7'"),
        "range": ("StatusCode.INVALID_ARGUMENT", "top_p is 0.0; it must be above 0"),
        "name": ("StatusCode.INVALID_ARGUMENT", "input or parameter 'temprature' is not known"),
        "priority": ("StatusCode.INVALID_ARGUMENT", "input or parameter 'priority' is not known"),
        "empty": ("StatusCode.INVALID_ARGUMENT", "text_input is empty"),
        "output": ("StatusCode.INVALID_ARGUMENT", "output 'x' is not known"),
    }
    for name, (status, says) in expected.items():
        assert told["errors"][name][0] == status
        assert told["errors"][name][1].startswith(says)
    assert told["timeout"][0] == "StatusCode.DEADLINE_EXCEEDED"


@async_module
async def test_our_messages_are_those_of_triton(told: dict[str, Any]) -> None:
    """Each of our fields is one of theirs, with its number and type."""
    theirs = {name: {each[0]: each for each in fields} for name, fields in told["fields"].items()}
    file = descriptor_pb2.FileDescriptorProto()
    kserve.DESCRIPTOR.CopyToProto(file)
    num_fields = 0

    def compare(prefix: str, message: descriptor_pb2.DescriptorProto) -> None:
        nonlocal num_fields
        name = f"{prefix}.{message.name}"
        for each in message.field:
            assert theirs[name][each.number] == [each.number, each.name, each.type, each.label, each.type_name]
            num_fields += 1
        for nested in message.nested_type:
            compare(name, nested)

    for message in file.message_type:
        compare("inference", message)
    assert num_fields > 60


@pytest.fixture
async def fleet() -> AsyncIterator[FakeFleet]:
    async with running_fleet(num_prefill=1, num_decode=1) as fleet:
        yield fleet
        await fleet.settled()


def request(**fields: Any) -> kserve.ModelInferRequest:
    """With a prompt and typed contents."""
    made = kserve.ModelInferRequest(model_name="tiny", **fields)
    made.inputs.add(name="text_input", datatype="BYTES", shape=[1]).contents.bytes_contents.append(b"hi")
    return made


def with_input(name: str, datatype: str, shape: list[int], raw: bytes) -> kserve.ModelInferRequest:
    made = kserve.ModelInferRequest(model_name="tiny")
    made.inputs.add(name="text_input", datatype="BYTES", shape=[1])
    made.inputs.add(name=name, datatype=datatype, shape=shape)
    made.raw_input_contents.extend([struct.pack("<I", 2) + b"hi", raw])
    return made


Message = kserve.ModelInferRequest
BAD: list[tuple[kserve.ModelInferRequest, str]] = [
    (kserve.ModelInferRequest(model_name="tiny"), "text_input has 0 elements"),
    (request(raw_input_contents=[b"", b""]), "raw_input_contents has 2 tensors; there are 1"),
    (with_input("top_k", "INT32", [1], b"\0"), "has 1 bytes; INT32 takes 4 each"),
    (with_input("top_k", "INT32", [2], b"\0\0\0\0"), "has 1 elements; its shape is"),
    (with_input("top_k", "INT32", [-1], b"\0\0\0\0"), "has the shape"),
    (with_input("top_k", "INT32", [2**62, 2**62], b"\0\0\0\0"), "has the shape"),
    (with_input("top_k", "INT32", [2**62] * 100_000, b"\0\0\0\0"), "has 100000 dimensions; at most 8"),
    (with_input("stop", "BYTES", [4096], b"\0" * 8_000_000), "has 4097 elements; its shape is"),
    (with_input("top_k", "FP16", [1], b"\0\0"), "has the type 'FP16'"),
    (with_input("top_k", "BYTES", [1], b"\1\0\0\0a"), "it must be an integer"),
    (with_input("top_k", "FP64", [1], struct.pack("<d", 1.5)), "it must be an integer"),
    (with_input("temperature", "FP32", [1], struct.pack("<f", float("nan"))), "temperature is nan"),
    (with_input("temperature", "FP64", [1], struct.pack("<d", float("-inf"))), "temperature is -inf"),
    (with_input("seed", "INT64", [1], struct.pack("<q", -1)), "seed is -1"),
    (with_input("stop", "BYTES", [1], b"\x02\0\0\0\xff\xff"), "stop is not UTF-8"),
    (with_input("stop", "BYTES", [1], b"\xff\xff\xff\xff"), "ends in the midst of an element"),
    (with_input("stop", "BYTES", [1], b"\0"), "ends in the midst of an element"),
    (with_input("text_input", "BYTES", [1], b"\1\0\0\0a"), "text_input is given twice"),
    (request(inputs=[Message.InferInputTensor(name="x")] * 64), "there are 65 inputs; at most 64"),
    (request(parameters={str(name): kserve.InferParameter() for name in range(65)}), "there are 65 parameters"),
    (request(outputs=[Message.InferRequestedOutputTensor(name="text_output")] * 65), "there are 65 outputs"),
    (request(parameters={"max_tokens": kserve.InferParameter()}), "'max_tokens' has no value"),
    (request(parameters={"max_tokens": kserve.InferParameter(string_param="3")}), "it must be an integer"),
]


@pytest.mark.parametrize(("asked", "says"), BAD, ids=[says for _, says in BAD])
async def test_messages_that_no_client_makes(fleet: FakeFleet, asked: kserve.ModelInferRequest, says: str) -> None:
    async with open_channel(fleet.router.address) as channel:
        stub = kserve_pb2_grpc.GRPCInferenceServiceStub(channel)
        started_at = time.process_time()
        with pytest.raises(InvalidArgument, match=says), service_errors():
            await stub.ModelInfer(asked)
        assert time.process_time() - started_at < 2.0  # nobody else is served meanwhile
        answer = await stub.ModelInfer(request())
        assert answer.raw_output_contents


async def test_typed_contents_and_names_of_trt_llm(fleet: FakeFleet) -> None:
    asked = request()
    asked.inputs.add(name="max_tokens", datatype="INT32", shape=[1, 1]).contents.int_contents.append(4)
    asked.inputs.add(name="random_seed", datatype="UINT64", shape=[1]).contents.uint64_contents.append(2**64 - 1)
    asked.inputs.add(name="stop_words", datatype="BYTES", shape=[2]).contents.bytes_contents.extend([b"x", b"y"])
    asked.inputs.add(name="temperature", datatype="FP32", shape=[1]).contents.fp32_contents.append(0.5)
    async with open_channel(fleet.router.address) as channel:
        answer = await kserve_pb2_grpc.GRPCInferenceServiceStub(channel).ModelInfer(asked)
    text = expected_text("hi", 4).encode()
    assert answer.raw_output_contents[0] == struct.pack("<I", len(text)) + text
    sampling = fleet.workers["d0"].decodes[-1].sampling
    assert (sampling.seed, sampling.temperature) == (2**64 - 1, 0.5)


async def test_leaving_a_stream_ends_its_requests(fleet: FakeFleet) -> None:
    never = asyncio.Event()

    async def hold(attempt_id: str, num_tokens: int) -> None:
        await never.wait()

    fleet.workers["d0"].hooks["decode.token"] = hold
    async with open_channel(fleet.router.address) as channel:
        call = kserve_pb2_grpc.GRPCInferenceServiceStub(channel).ModelStreamInfer()
        for _ in range(3):
            await call.write(request())
        assert isinstance(await call.read(), kserve.ModelStreamInferResponse)
        async with asyncio.timeout(5):
            while fleet.router.inference.num_in_flight < 3:
                await asyncio.sleep(0.001)
        call.cancel()
        await fleet.settled()


async def test_draining_finishes_what_streams_have_begun(fleet: FakeFleet) -> None:
    held = asyncio.Event()

    async def hold(attempt_id: str, num_tokens: int) -> None:
        await held.wait()

    fleet.workers["d0"].hooks["decode.token"] = hold
    async with open_channel(fleet.router.address) as channel:
        stub = kserve_pb2_grpc.GRPCInferenceServiceStub(channel)
        call = stub.ModelStreamInfer()
        await call.write(request(id="old", parameters={"max_tokens": kserve.InferParameter(int64_param=3)}))
        await call.read()
        draining = asyncio.create_task(fleet.router.drain())
        async with asyncio.timeout(5):
            while not fleet.router.inference.is_draining:
                await asyncio.sleep(0.001)
        assert not (await stub.ServerReady(kserve.ServerReadyRequest())).ready
        await call.write(request(id="new"))
        refused = await call.read()
        assert isinstance(refused, kserve.ModelStreamInferResponse)
        assert "about to stop" in refused.error_message and refused.infer_response.id == "new"
        held.set()
        ends = []
        for _ in range(3):
            part = await call.read()
            assert isinstance(part, kserve.ModelStreamInferResponse)
            ends.append(part.infer_response.parameters["triton_final_response"].bool_param)
        assert ends == [False, False, True]
        await draining


async def test_stream_of_broken_bytes(fleet: FakeFleet) -> None:
    async with open_channel(fleet.router.address) as channel:
        method: Any = channel.stream_stream("/inference.GRPCInferenceService/ModelStreamInfer")
        call = method()
        await call.write(b"\xff\xff")
        with pytest.raises(InvalidArgument, match=r"not a valid inference\.ModelInferRequest"), service_errors():
            await call.read()
        await call.done_writing()


async def test_off() -> None:
    async with running_fleet(num_both=1, kserve=False) as fleet, open_channel(fleet.router.address) as channel:
        with pytest.raises(Unimplemented), service_errors():
            await kserve_pb2_grpc.GRPCInferenceServiceStub(channel).ServerLive(kserve.ServerLiveRequest())
