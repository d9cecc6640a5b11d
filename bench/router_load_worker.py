"""Mock workers for the router's load bench: real gRPC and the real contract, with a clock in place of a model.

A token is the time it was made, in microseconds of CLOCK_MONOTONIC, so that whoever reads it knows how long it was on
its way. Sequences of one pace make their tokens at the same instants, as steps of an engine do.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass

from decode.bundles import serve_decode
from protos import decode_pb2, decode_pb2_grpc, prefill_pb2, prefill_pb2_grpc, workers_pb2, workers_pb2_grpc
from protos import inference_pb2 as pb
from protos.channel import open_channel
from protos.serve import GrpcServer

NUM_BLOCKS = 1_000_000
_REPORT_S = 1.0
_LAYOUT = decode_pb2.KVLayout(
    model_digest="mock", dtype="float32", num_layers=1, num_kv_heads=1, head_dim=8, block_size=16
)
_READY = workers_pb2.WorkerLoad(state=workers_pb2.WORKER_STATE_READY, num_free_blocks=NUM_BLOCKS)
_TEXT = "word "


@dataclass(frozen=True, slots=True)
class Pace:
    """How a worker is to make the tokens of a request. It travels as the seed, which nobody on the way looks at.

    `gathers`: what was made while the last message was being written comes as one message, as in the real worker;
    otherwise each token is a message of its own, however far behind.
    """

    step_us: int
    gathers: bool

    @property
    def seed(self) -> int:
        return self.step_us << 1 | self.gathers

    @classmethod
    def of_seed(cls, seed: int) -> Pace:
        return cls(seed >> 1, bool(seed & 1))


def now_us() -> int:
    return time.clock_gettime_ns(time.CLOCK_MONOTONIC) // 1000


class MockPrefill(prefill_pb2_grpc.PrefillServicer):
    async def Prefill(
        self, request: prefill_pb2.PrefillRequest, context: object
    ) -> AsyncIterator[prefill_pb2.PrefillResponse]:
        first = pb.GenerateResponse(token_ids=[now_us()], text=_TEXT)
        if request.sampling.max_tokens == 1:
            first.finish_reason = pb.FINISH_REASON_LENGTH
        yield prefill_pb2.PrefillResponse(first_token=first)
        yield prefill_pb2.PrefillResponse(handed_over=prefill_pb2.PrefillStats())


class MockDecode(decode_pb2_grpc.DecodeServicer):
    """Does not wait for the hand-over: it is the router that puts the first token first."""

    async def Decode(self, request: decode_pb2.DecodeRequest, context: object) -> AsyncIterator[pb.GenerateResponse]:
        pace, index = Pace.of_seed(request.sampling.seed), len(request.token_ids) - request.num_prompt_tokens
        index += not request.prefill_here
        end, first_step = request.sampling.max_tokens, now_us() // pace.step_us + 1 - index
        while index < end:
            due = min(now_us() // pace.step_us - first_step + 1, end)
            if due <= index:
                await asyncio.sleep(((first_step + index) * pace.step_us - now_us()) / 1e6)
                continue
            until = due if pace.gathers else index + 1
            message = pb.GenerateResponse(
                output_index=index,
                token_ids=[(first_step + number) * pace.step_us for number in range(index, until)],
                text=_TEXT * (until - index),
            )
            if until == end:
                message.finish_reason = pb.FINISH_REASON_LENGTH
                message.decode_stats.num_steps = end
            yield message
            index = until


async def serve_worker(
    name: str, role: workers_pb2.Role.ValueType, server: GrpcServer, routers: list[str], registered: asyncio.Event
) -> None:
    """Until it is cancelled. `server` is not started yet."""
    server.add(prefill_pb2_grpc.add_PrefillServicer_to_server, MockPrefill())
    serve_decode(server, MockDecode())  # type: ignore[abstract]
    await server.start()
    try:
        async with asyncio.TaskGroup() as tasks:
            for router in routers:
                tasks.create_task(_register(name, role, server.address, router, registered))
    finally:
        await server.stop()


async def _register(
    name: str, role: workers_pb2.Role.ValueType, address: str, router: str, registered: asyncio.Event
) -> None:
    async def reports() -> AsyncIterator[workers_pb2.WorkerReport]:
        hello = workers_pb2.WorkerHello(
            worker_id=name, epoch="1", address=address, role=role, layout=_LAYOUT, num_blocks=NUM_BLOCKS
        )
        yield workers_pb2.WorkerReport(hello=hello, load=_READY)
        while True:
            await asyncio.sleep(_REPORT_S)
            yield workers_pb2.WorkerReport(load=_READY)

    async with open_channel(router) as channel:
        async for _ in workers_pb2_grpc.WorkersStub(channel).Register(reports()):
            registered.set()
