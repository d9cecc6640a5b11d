"""Three whole workers of both roles, small caches, clients that leave at any moment: the rest of the answers are right.

Every word of the cache shows in a timed runner's tokens, so a block that was given away too early would.
"""

from __future__ import annotations

import asyncio
import random
from typing import Any

import grpc.aio
import pytest

from kvtransfer.loopback_agent import LoopbackNetwork
from protos.channel import service_errors
from tests.timed_calls import answer_to, decode_request, prefill_request, prompt_of, tokens_of
from tests.timed_worker import TimedWorker, running

NUM_REQUESTS = 120


class Request:
    """Placed at random: on one worker, or prefilled on one and decoded on another."""

    def __init__(self, name: str, workers: list[TimedWorker], rng: random.Random) -> None:
        prefill, decode = rng.sample(workers, 2)
        self.prompt, self.num_tokens = prompt_of(rng.randint(1, 40), first=rng.randint(0, 5)), rng.randint(2, 12)
        is_local = rng.random() < 0.2
        self.decoding = decode.decode_stub.Decode(
            decode_request(name, self.prompt, max_tokens=self.num_tokens, prefill_here=is_local)
        )
        request = prefill_request(name, self.prompt, decode.target, max_tokens=self.num_tokens)
        self.prefilling: Any = None if is_local else prefill.prefill_stub.Prefill(request)

    async def run(self) -> None:
        first, rest = await asyncio.gather(self._first_tokens(), tokens_of(self.decoding))
        assert [*first, *rest] == answer_to(self.prompt, self.num_tokens)

    async def run_and_leave(self, after_s: float) -> None:
        """Both at once, as the router does."""
        answering = asyncio.create_task(self.run())
        await asyncio.wait([answering], timeout=after_s)
        for call in (self.decoding, self.prefilling):
            if call is not None:
                call.cancel()
        await asyncio.wait([answering])
        if not answering.cancelled():
            assert not isinstance(answering.exception(), AssertionError)

    async def _first_tokens(self) -> list[int]:
        tokens: list[int] = []
        if self.prefilling is not None:
            with service_errors():
                while (response := await self.prefilling.read()) is not grpc.aio.EOF:
                    tokens += response.first_token.token_ids
        return tokens


@pytest.mark.parametrize("seed", range(2))
async def test_who_stays_is_served_and_who_leaves_leaves_nothing_behind(seed: int) -> None:
    rng, network = random.Random(seed), LoopbackNetwork()
    workers = [TimedWorker(network, f"worker-{index}", max_running=4) for index in range(3)]
    async with running(*workers), asyncio.timeout(30), asyncio.TaskGroup() as tasks:
        for number in range(NUM_REQUESTS):
            request = Request(str(number), workers, rng)
            leaves = rng.random() < 0.4
            tasks.create_task(request.run_and_leave(0.1 * rng.random() ** 4) if leaves else request.run())
            worker = rng.choice(workers)
            if rng.random() < 0.7:
                worker.hold_writes()
            else:
                worker.land_writes()
            await asyncio.sleep(0.008 * rng.random())
        for worker in workers:
            worker.land_writes()
