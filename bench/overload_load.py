"""The clients of bench.overload: as many requests as are answered, or as many as come, answered or not."""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from contextlib import aclosing
from dataclasses import dataclass, field

from bench.tiny_moe import EOS, VOCAB_SIZE
from protos.client import PdserveClient
from protos.errors import ServiceError
from protos.values import Sampling, Summary

_DEADLINE_S = 60.0


@dataclass(frozen=True, slots=True)
class Shape:
    """Of every request: tokens of the prompt, and of the answer."""

    num_prompt_tokens: int
    num_output_tokens: int


@dataclass(slots=True)
class Tally:
    """What became of the requests of one run. Each is under one of completed, refused and failed."""

    num_requests: int = 0
    num_output_tokens: int = 0  # of those completed, while the run lasted
    ttfts_s: list[float] = field(default_factory=list)  # of those completed
    refused_s: list[float] = field(default_factory=list)  # how long it took to say so
    failed: Counter[str] = field(default_factory=Counter)
    seconds: float = 0.0

    @property
    def num_completed(self) -> int:
        return len(self.ttfts_s)

    @property
    def tokens_per_s(self) -> float:
        return self.num_output_tokens / self.seconds


class Clients:
    def __init__(self, client: PdserveClient, shape: Shape, rng: random.Random) -> None:
        self._client = client
        self._shape = shape
        self._rng = rng

    async def saturate(self, at_once: int, seconds: float) -> Tally:
        """Each of `at_once` asks anew as soon as it has its answer: as much as is done when nobody is refused."""
        tally, ends_at = Tally(), time.monotonic() + seconds

        async def ask_on() -> None:
            while time.monotonic() < ends_at:
                await self._ask(tally, ends_at)

        async with asyncio.TaskGroup() as clients:
            for _ in range(at_once):
                clients.create_task(ask_on())
        tally.seconds = seconds
        return tally

    async def flood(self, per_s: float, seconds: float) -> Tally:
        """Requests come at random moments, `per_s` on average, and wait for nothing."""
        tally, ends_at = Tally(), time.monotonic() + seconds
        next_at = time.monotonic()
        async with asyncio.TaskGroup() as clients:
            while (next_at := next_at + self._rng.expovariate(per_s)) < ends_at:
                await asyncio.sleep(max(0.0, next_at - time.monotonic()))
                clients.create_task(self._ask(tally, ends_at))
        tally.seconds = seconds
        return tally

    async def _ask(self, tally: Tally, ends_at: float) -> None:
        tally.num_requests += 1
        prompt = [self._rng.randrange(EOS + 1, VOCAB_SIZE) for _ in range(self._shape.num_prompt_tokens)]
        sampling = Sampling(temperature=0, max_tokens=self._shape.num_output_tokens, ignore_eos=True)
        started_at, ttft_s, num_tokens = time.monotonic(), 0.0, 0
        try:
            async with aclosing(self._client.generate(prompt, sampling=sampling, deadline_s=_DEADLINE_S)) as parts:
                async for part in parts:
                    if isinstance(part, Summary):
                        continue
                    now = time.monotonic()
                    ttft_s = ttft_s or now - started_at
                    num_tokens += len(part.token_ids) * (now < ends_at)
        except ServiceError as error:
            if error.reason == "OVERLOADED":
                tally.refused_s.append(time.monotonic() - started_at)
            else:
                tally.failed[error.reason] += 1
        else:
            tally.ttfts_s.append(ttft_s)
            tally.num_output_tokens += num_tokens


def percentile(values: list[float], share: float) -> float:
    """0 if there are none."""
    return sorted(values)[min(len(values) - 1, int(share * len(values)))] if values else 0.0
