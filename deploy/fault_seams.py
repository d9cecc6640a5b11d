"""Faults on demand in a worker: what is put around its agent, its client and its services, and the call for a new plan.

Only a worker that was started with a fault plan has any of it.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from typing import TypeVar, cast

from decode.bundles import serve_decode
from kvtransfer.agent import TransferAgent
from kvtransfer.decode_client import DecodeClient
from kvtransfer.fault_injection import FaultInjector
from kvtransfer.faults import FaultPlan, FaultPlanUnreadable, Stage
from kvtransfer.faulty_agent import FaultyAgent
from kvtransfer.faulty_client import FaultyClient
from kvtransfer.geometry import CacheSpan
from protos import (
    decode_pb2,
    decode_pb2_grpc,
    faults_pb2,
    faults_pb2_grpc,
    inference_pb2,
    prefill_pb2,
    prefill_pb2_grpc,
)
from protos.calls import Context
from protos.channel import open_channel, service_errors
from protos.credentials import Credentials
from protos.errors import InvalidArgument
from protos.serve import GrpcServer

_Answer = TypeVar("_Answer")


class Seams:
    """Where a worker's parts meet, as they are. `FaultySeams` puts faults in between."""

    def __init__(self, credentials: Credentials | None = None) -> None:
        self._credentials = credentials

    def around_agent(self, agent: TransferAgent, span: CacheSpan) -> TransferAgent:
        return agent

    def open_client(self, address: str) -> DecodeClient:
        return DecodeClient(open_channel(address, self._credentials))

    def serve(
        self, server: GrpcServer, prefill: prefill_pb2_grpc.PrefillServicer, decode: decode_pb2_grpc.DecodeServicer
    ) -> None:
        server.add(prefill_pb2_grpc.add_PrefillServicer_to_server, prefill)
        serve_decode(server, decode)


class FaultySeams(Seams):
    def __init__(self, injector: FaultInjector, credentials: Credentials | None = None) -> None:
        super().__init__(credentials)
        self._injector = injector

    def around_agent(self, agent: TransferAgent, span: CacheSpan) -> TransferAgent:
        return FaultyAgent(agent, span, self._injector)

    def open_client(self, address: str) -> DecodeClient:
        return FaultyClient(open_channel(address, self._credentials), self._injector)

    def serve(
        self, server: GrpcServer, prefill: prefill_pb2_grpc.PrefillServicer, decode: decode_pb2_grpc.DecodeServicer
    ) -> None:
        super().serve(server, StagedPrefill(prefill, self._injector), StagedDecode(decode, self._injector))
        server.add(faults_pb2_grpc.add_FaultsServicer_to_server, FaultService(self._injector))


class FaultService(faults_pb2_grpc.FaultsServicer):
    def __init__(self, injector: FaultInjector) -> None:
        self._injector = injector

    async def SetFaultPlan(
        self, request: faults_pb2.SetFaultPlanRequest, context: Context
    ) -> faults_pb2.SetFaultPlanResponse:
        try:
            plan = FaultPlan.parse(request.plan)
        except FaultPlanUnreadable as error:
            raise InvalidArgument(str(error), field="plan") from None
        previous, self._injector.plan = self._injector.plan, plan
        return faults_pb2.SetFaultPlanResponse(previous_plan=previous.text)


class StagedPrefill(prefill_pb2_grpc.PrefillServicer):
    """Passes everything on, and tells the stages that the sender does not see."""

    def __init__(self, inner: prefill_pb2_grpc.PrefillServicer, injector: FaultInjector) -> None:
        self._inner = inner
        self._injector = injector

    async def Prefill(
        self, request: prefill_pb2.PrefillRequest, context: Context
    ) -> AsyncIterator[prefill_pb2.PrefillResponse]:
        async with aclosing(_generator(self._inner.Prefill(request, context))) as answers:
            async for answer in answers:
                if answer.HasField("first_token"):
                    self._injector.at(Stage.COMPUTED)
                yield answer


class StagedDecode(decode_pb2_grpc.DecodeServicer):
    """The same for the decode side."""

    def __init__(self, inner: decode_pb2_grpc.DecodeServicer, injector: FaultInjector) -> None:
        self._inner = inner
        self._injector = injector

    async def Describe(self, request: decode_pb2.DescribeRequest, context: Context) -> decode_pb2.PeerDescription:
        return await self._inner.Describe(request, context)

    async def HandOver(self, request: decode_pb2.HandOverRequest, context: Context) -> decode_pb2.HandOverResponse:
        return await self._inner.HandOver(request, context)

    async def Reserve(self, request: decode_pb2.ReserveRequest, context: Context) -> decode_pb2.Ticket:
        ticket = await self._inner.Reserve(request, context)
        self._injector.at(Stage.GRANTED)
        return ticket

    async def Commit(self, request: decode_pb2.HandoverRecord, context: Context) -> decode_pb2.CommitResponse:
        self._injector.at(Stage.RECORD_ARRIVED)
        response = await self._inner.Commit(request, context)
        self._injector.at(Stage.RECORD_ACCEPTED)
        return response

    async def Release(self, request: decode_pb2.ReleaseRequest, context: Context) -> decode_pb2.ReleaseResponse:
        return await self._inner.Release(request, context)

    async def Attach(
        self, request_iterator: AsyncIterator[decode_pb2.Heartbeat], context: Context
    ) -> AsyncIterator[decode_pb2.HeartbeatResponse]:
        async with aclosing(_generator(self._inner.Attach(request_iterator, context))) as answers:
            async for answer in answers:
                yield answer

    async def Decode(
        self, request: decode_pb2.DecodeRequest, context: Context
    ) -> AsyncIterator[inference_pb2.GenerateResponse]:
        stage = Stage.FIRST_STEP
        async with aclosing(_generator(self._inner.Decode(request, context))) as answers:
            async for answer in answers:
                if stage is Stage.FIRST_STEP or answer.finish_reason == inference_pb2.FINISH_REASON_UNSPECIFIED:
                    self._injector.at(stage)
                stage = Stage.MID_STREAM
                yield answer


def _generator(answers: AsyncIterator[_Answer]) -> AsyncGenerator[_Answer, None]:
    """What our services' streams are, though the generated code does not say so: they can be closed."""
    return cast("AsyncGenerator[_Answer, None]", answers)


async def set_fault_plan(address: str, plan: str, timeout_s: float = 5.0) -> None:
    """At a worker that was started with a plan. Raises the worker's refusal, Unimplemented if it was not."""
    async with open_channel(address) as channel:
        with service_errors(f"no worker answers at {address}"):
            request = faults_pb2.SetFaultPlanRequest(plan=plan)
            await faults_pb2_grpc.FaultsStub(channel).SetFaultPlan(request, timeout=timeout_s)
