"""Asking a fleet, and making its workers fail at a given moment."""

from __future__ import annotations

import asyncio
from contextlib import aclosing

from protos.client import PdserveClient
from protos.errors import ServiceError
from protos.values import Chunk, Sampling, Summary
from tests.router.fakes import FakeFleet, FakeWorker, Hook

PROMPT = list(range(20, 41))


async def answer(
    client: PdserveClient, sampling: Sampling, *, prompt: list[int] = PROMPT, deadline_s: float | None = None
) -> tuple[list[int], list[Chunk], Summary]:
    chunks: list[Chunk] = []
    async with aclosing(client.generate(prompt, sampling=sampling, deadline_s=deadline_s)) as parts:
        async for part in parts:
            if isinstance(part, Summary):
                return [token for chunk in chunks for token in chunk.token_ids], chunks, part
            chunks.append(part)
    raise AssertionError("no summary")


def all_workers(fleet: FakeFleet, letter: str) -> list[FakeWorker]:
    return [worker for name, worker in fleet.workers.items() if name.startswith(letter)]


class Once:
    """A hook that does something at one moment of the first attempt that reaches it, and nothing later."""

    def __init__(self, fleet: FakeFleet, letter: str, moment: str, num_tokens: int | None = None) -> None:
        self.hit: FakeWorker | None = None
        self._num_tokens = num_tokens
        for worker in all_workers(fleet, letter):
            worker.hooks[moment] = self._hook_of(worker)

    async def act(self, worker: FakeWorker) -> None:
        raise NotImplementedError

    def _hook_of(self, worker: FakeWorker) -> Hook:
        async def hook(attempt_id: str, num_tokens: int) -> None:
            if self.hit is None and self._num_tokens in (None, num_tokens):
                self.hit = worker
                await self.act(worker)

        return hook


class DieOnce(Once):
    async def act(self, worker: FakeWorker) -> None:
        asyncio.get_running_loop().create_task(worker.die()).add_done_callback(lambda task: task.result())
        await asyncio.sleep(5)  # cancelled by its own death


class FailOnce(Once):
    def __init__(self, error: ServiceError, fleet: FakeFleet, letter: str, moment: str, num_tokens: int | None = None):
        super().__init__(fleet, letter, moment, num_tokens)
        self._error = error

    async def act(self, worker: FakeWorker) -> None:
        raise self._error
