"""A client that does not read its answer costs its workers nothing for long."""

from __future__ import annotations

import asyncio

import pytest

from deploy.worker_config import LIMITS
from protos import inference_pb2, workers_pb2
from protos.serve import ServerLimits
from router.config import RouterConfig
from router.server import Router
from tests.protos.slow_client import SlowClient
from tests.router.fakes import CARD, POLICY, FakeFleet

GENERATE = "/pdserve.v1.Inference/Generate"
FEW_BYTES = 500  # of some fifty tokens


@pytest.mark.parametrize("disaggregated", [False, True])
async def test_both_legs_end_with_a_reader_that_does_not_read(disaggregated: bool) -> None:
    config = RouterConfig("tiny", port=0, drain_s=1.0, relay=POLICY, limits=ServerLimits(unread_s=0.4))
    sampling = inference_pb2.SamplingParams(max_tokens=200, ignore_eos=True)
    request = inference_pb2.GenerateRequest(text="abc", sampling=sampling)
    async with Router(config, CARD) as router:
        fleet = FakeFleet(router)
        if disaggregated:
            await fleet.add("p", workers_pb2.ROLE_PREFILL)
            decode = await fleet.add("d", workers_pb2.ROLE_DECODE)
        else:
            decode = await fleet.add("w", workers_pb2.ROLE_BOTH)
        sent: list[int] = []

        async def one_by_one(attempt_id: str, num_tokens: int) -> None:
            sent.append(num_tokens)
            await asyncio.sleep(0.001)

        decode.hooks["decode.token"] = one_by_one
        try:
            address, message = router.address, request.SerializeToString()
            async with SlowClient(address, GENERATE, message, FEW_BYTES) as client, asyncio.timeout(20):
                await client.is_full.wait()
                while router.inference.num_in_flight:
                    await asyncio.sleep(0.01)
                await fleet.settled()
            assert sent, "the worker was answering"
        finally:
            for worker in fleet.workers.values():
                await worker.die()


def test_the_workers_patience_is_longer_than_the_routers() -> None:
    """Or a worker would give up the router, which would take it for a failure of the worker's and try another."""
    assert LIMITS.unread_s >= 2 * ServerLimits().unread_s
