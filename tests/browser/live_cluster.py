"""A router, timed workers and the dashboard as processes, and prompts for them: for a test in another thread."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from deploy.local import LocalCluster
from protos.client import PdserveClient
from protos.values import Sampling
from tests.cluster.asking import Answered, ask, assert_at_rest
from tests.cluster.timed_cluster import expected, prompts

NUM_AT_ONCE = 6


class LiveCluster:
    """What is asked of the client runs in the loop that `run` has."""

    def __init__(self, run: Callable[[Coroutine[Any, Any, Any]], Any], cluster: LocalCluster) -> None:
        self._run = run
        self._cluster = cluster
        self._client: PdserveClient = run(self._connected())
        self._streams: list[asyncio.Task[list[Answered]]] = []
        self._has_enough = False

    @property
    def url(self) -> str:
        assert self._cluster.page is not None
        return self._cluster.page.url

    def close(self) -> None:
        self._run(self._client.close())

    def told(self, question: Callable[[PdserveClient], Coroutine[Any, Any, Any]]) -> Any:
        """What the router says, asked past the page."""
        return self._run(question(self._client))

    def assert_at_rest(self) -> None:
        self._run(assert_at_rest(self._cluster))

    def ask_all(self, asked: list[list[int]], num_tokens: int) -> list[Answered]:
        """All at once; every answer is checked."""

        async def answers() -> list[Answered]:
            return await asyncio.gather(*(self._ask(prompt, num_tokens) for prompt in asked))

        return self._run(answers())  # type: ignore[no-any-return]

    def stream(self, num_tokens: int) -> None:
        """Lets answers stream, one after the other in each of a few places, until `streamed` is called."""

        async def start() -> None:
            self._has_enough = False
            self._streams = [asyncio.create_task(self._one_by_one(i, num_tokens)) for i in range(NUM_AT_ONCE)]

        self._run(start())

    def streamed(self) -> list[Answered]:
        """What has been answered, to the last token, with what had begun."""

        async def end() -> list[Answered]:
            self._has_enough = True
            return [answered for each in await asyncio.gather(*self._streams) for answered in each]

        return self._run(end())  # type: ignore[no-any-return]

    async def _connected(self) -> PdserveClient:
        """A client belongs to the loop in which it is made."""
        return PdserveClient(self._cluster.router_address)

    async def _one_by_one(self, seed: int, num_tokens: int) -> list[Answered]:
        answers: list[Answered] = []
        while not self._has_enough:
            (prompt,) = prompts(1, range(20, 60), seed=1000 * (seed + 1) + len(answers))
            answers.append(await self._ask(prompt, num_tokens))
        return answers

    async def _ask(self, prompt: list[int], num_tokens: int) -> Answered:
        answered = await ask(self._client, prompt, Sampling(temperature=0, max_tokens=num_tokens))
        assert answered.token_ids == expected(prompt, num_tokens)
        return answered
