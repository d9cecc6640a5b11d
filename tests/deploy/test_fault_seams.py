"""Whole workers with faults around them: every stage is told in its order, and a new plan is taken at run time."""

from __future__ import annotations

import asyncio

import pytest

from deploy.fault_seams import FaultySeams
from kvtransfer.fault_injection import FaultInjector
from kvtransfer.faults import FaultPlan, Stage
from kvtransfer.loopback_agent import LoopbackNetwork
from protos import faults_pb2, faults_pb2_grpc
from protos.channel import open_channel, service_errors
from protos.errors import InvalidArgument, Unimplemented
from tests.timed_calls import answer_to, decode_request, prefill_request, prompt_of, tokens_of
from tests.timed_worker import TimedWorker, running

ALL_STAGES = "; ".join(f"kill at {stage.value} *" for stage in Stage)


def faulty_worker(network: LoopbackNetwork, name: str, reached: list[str]) -> TimedWorker:
    injector = FaultInjector(FaultPlan.parse(ALL_STAGES), kill=lambda stage: reached.append(stage.value))
    return TimedWorker(network, name, seams=FaultySeams(injector))


async def test_stages_of_a_request_in_their_order_on_both_sides() -> None:
    network, on_prefill, on_decode = LoopbackNetwork(), list[str](), list[str]()
    prefill, decode = faulty_worker(network, "prefill-0", on_prefill), faulty_worker(network, "decode-0", on_decode)
    prompt = prompt_of(18)
    async with running(prefill, decode):
        decoding = asyncio.create_task(tokens_of(decode.decode_stub.Decode(decode_request("a", prompt, max_tokens=8))))
        call = prefill.prefill_stub.Prefill(prefill_request("a", prompt, decode.target, max_tokens=8))
        first, _ = [response async for response in call]
        assert [*first.first_token.token_ids, *await decoding] == answer_to(prompt, 8)
    assert on_prefill == ["reserving", "reserved", "first-write", "computed", "committing", "committed"]
    assert on_decode[:4] == ["granted", "record-arrived", "record-accepted", "first-step"]
    assert 1 <= on_decode[4:].count("mid-stream") == len(on_decode[4:]) <= 5  # of 7 messages neither first nor last


async def test_a_plan_is_changed_at_run_time() -> None:
    worker = faulty_worker(LoopbackNetwork(), "worker-0", [])
    async with running(worker), open_channel(worker.target.address) as channel:
        stub = faults_pb2_grpc.FaultsStub(channel)
        changed = await stub.SetFaultPlan(faults_pb2.SetFaultPlanRequest(plan="drop commit 3"), timeout=5)
        assert changed.previous_plan == ALL_STAGES
        with pytest.raises(InvalidArgument, match="'comit' in 'drop comit 3'") as caught, service_errors():
            await stub.SetFaultPlan(faults_pb2.SetFaultPlanRequest(plan="drop comit 3"), timeout=5)
        assert caught.value.field == "plan"
        changed = await stub.SetFaultPlan(faults_pb2.SetFaultPlanRequest(plan="none"), timeout=5)
        assert changed.previous_plan == "drop commit 3"


async def test_a_worker_without_a_plan_knows_no_such_call() -> None:
    worker = TimedWorker(LoopbackNetwork(), "worker-0")
    async with running(worker), open_channel(worker.target.address) as channel:
        with pytest.raises(Unimplemented), service_errors():
            await faults_pb2_grpc.FaultsStub(channel).SetFaultPlan(
                faults_pb2.SetFaultPlanRequest(plan="kill at reserved 1"), timeout=5
            )
