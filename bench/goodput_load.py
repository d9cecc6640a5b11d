"""Requests of bench.goodput, and what becomes of them: each comes when it comes, answered or not."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import dataclass
from itertools import accumulate, pairwise

from protos.client import PdserveClient
from protos.errors import ServiceError
from protos.values import Sampling, Summary
from router.outcomes import Slo

PROMPT_TOKENS, OUTPUT_TOKENS = (200, 1500), (32, 128)
_DEADLINE_S = 60.0


@dataclass(frozen=True, slots=True)
class Request:
    at_s: float
    prompt: Sequence[int]
    num_output_tokens: int


@dataclass(frozen=True, slots=True)
class Answer:
    """Of one request. `error`: why there is none. `tpot_s`: between tokens, on average; `worst_gap_s`: at most."""

    ttft_s: float = 0.0
    tpot_s: float = 0.0
    worst_gap_s: float = 0.0
    error: str = ""

    @classmethod
    def of(cls, came_at: float, tokens: Sequence[tuple[float, int]]) -> Answer:
        """`tokens`: when some came, and how many."""
        if not tokens:
            return cls(error="EMPTY")
        (first_at, num_first), (last_at, _) = tokens[0], tokens[-1]
        num_later = sum(number for _, number in tokens) - num_first
        return cls(
            first_at - came_at,
            (last_at - first_at) / num_later if num_later else 0.0,
            max((after - before for (before, _), (after, _) in pairwise(tokens)), default=0.0),
        )

    def is_within(self, slo: Slo) -> bool:
        return not self.error and self.ttft_s <= slo.ttft_s and self.tpot_s <= slo.tpot_s


@dataclass(frozen=True, slots=True)
class Figures:
    """Of one run, or of several: those that were answered, and how many were not."""

    answers: Sequence[Answer]

    def attainment(self, slo: Slo) -> float:
        return sum(answer.is_within(slo) for answer in self.answers) / max(1, len(self.answers))

    @property
    def num_failed(self) -> int:
        return sum(bool(answer.error) for answer in self.answers)

    @property
    def ttft_p90_s(self) -> float:
        return percentile([answer.ttft_s for answer in self.answers if not answer.error], 0.9)

    @property
    def tpot_p90_s(self) -> float:
        return percentile([answer.tpot_s for answer in self.answers if not answer.error], 0.9)

    @property
    def worst_gap_s(self) -> float:
        return max((answer.worst_gap_s for answer in self.answers), default=0.0)


def percentile(values: Sequence[float], share: float) -> float:
    """By nearest rank; 0 if there are none."""
    return sorted(values)[max(0, -(-round(share * 100) * len(values) // 100) - 1)] if values else 0.0


def poisson(text: Sequence[int], per_s: float, number: int, seed: int) -> list[Request]:
    """The first at once. Prompts are pieces of a text, long and short ones alike often on a logarithmic scale, that
    begin anywhere in it: none begins as another does. At another rate they are the same ones, closer together."""
    rng = random.Random(seed)
    moments = accumulate((rng.expovariate(1.0) / per_s for _ in range(number - 1)), initial=0.0)
    return [one(text, random.Random(f"{seed} {index}"), at_s) for index, at_s in enumerate(moments)]


def one(text: Sequence[int], rng: random.Random, at_s: float = 0.0) -> Request:
    least, most = PROMPT_TOKENS
    num_tokens = round(least * (most / least) ** rng.random())
    start = rng.randrange(len(text) - num_tokens)
    return Request(at_s, text[start : start + num_tokens], rng.randint(*OUTPUT_TOKENS))


async def play(client: PdserveClient, requests: Sequence[Request]) -> Figures:
    """Ends when the last answer has."""
    began_at = time.monotonic()
    async with asyncio.TaskGroup() as asking:
        tasks = []
        for request in requests:
            await asyncio.sleep(max(0.0, began_at + request.at_s - time.monotonic()))
            tasks.append(asking.create_task(ask(client, request)))
    return Figures([task.result() for task in tasks])


async def ask(client: PdserveClient, request: Request) -> Answer:
    sampling = Sampling(temperature=0, max_tokens=request.num_output_tokens, ignore_eos=True)
    came_at, tokens = time.monotonic(), []
    try:
        async with aclosing(client.generate(request.prompt, sampling=sampling, deadline_s=_DEADLINE_S)) as parts:
            async for part in parts:
                if not isinstance(part, Summary) and part.token_ids:
                    tokens.append((time.monotonic(), len(part.token_ids)))
    except ServiceError as error:
        return Answer(error=error.reason)
    return Answer.of(came_at, tokens)
