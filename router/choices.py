"""Several answers to one prompt, which is prefilled once: a stream of all their messages, and one summary.

The first answer is placed as any other. Once its KV is handed over the others start on the same workers, which find all
but the last, partial block of the prompt in their caches: that one alone is computed and sent for each. From there on
each is a request of its own, that is retried, resumed and moved alone; if one fails for good, all end. Only the first
waits for its turn: they were let in together.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from copy import copy
from dataclasses import replace

from google.protobuf.message import Message

from protos import inference_pb2 as pb
from router import metrics
from router.account import Account
from router.placement import Placement
from router.progress import Progress
from router.relay import Relay
from router.request import Request
from router.timeline import RequestClock

_MAX_QUEUED = 64  # messages of all answers that wait for the client; behind them the workers' streams wait
_GOLDEN = 0x9E3779B97F4A7C15


def choice_seed(seed: int, choice: int) -> int:
    """The first answer has the request's own, as if it were alone. The others' are SplitMix64's, from that state on."""
    if choice == 0:
        return seed
    mixed = (seed + choice * _GOLDEN) % 2**64
    mixed = (mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
    mixed = (mixed ^ (mixed >> 27)) * 0x94D049BB133111EB % 2**64
    return mixed ^ (mixed >> 31)


class Choices:
    """The answers to one request. `messages` is to be asked for once."""

    def __init__(
        self, relay: Relay, request: Request, clock: RequestClock, deadline_at: float | None, account: Account
    ) -> None:
        self._relay = relay
        self._request = request
        self._clock = clock
        self._deadline_at = deadline_at
        self._account = account
        self._queue: asyncio.Queue[bytes | Exception] = asyncio.Queue(_MAX_QUEUED)
        self._running: list[asyncio.Task[None]] = []
        self._shared: Placement | None = None  # where the prompt's KV is on all workers that are named
        self._summaries: dict[int, pb.GenerateResponse] = {}
        self._has_failed = False

    async def messages(self) -> AsyncGenerator[bytes, None]:
        """Of all answers, each in its own order. Raises ServiceError; closing it cancels all."""
        starting = asyncio.create_task(self._start())
        try:
            while len(self._summaries) < self._request.num_choices or not self._queue.empty():
                item = await self._queue.get()
                if isinstance(item, Exception):
                    raise item
                if item:
                    yield item
        finally:
            for task in (starting, *self._running):
                task.cancel()
            await asyncio.gather(starting, *self._running, return_exceptions=True)
        summary = _joined([self._summaries[choice] for choice in range(self._request.num_choices)])
        metrics.observe(summary)
        yield summary.SerializeToString()

    async def _start(self) -> None:
        """One after another, until one has left the prompt's KV on its workers; then all that remain."""
        for choice in range(self._request.num_choices):
            if self._has_failed:
                return
            is_under_way = asyncio.Event()
            self._running.append(asyncio.create_task(self._answer(choice, is_under_way)))
            if self._shared is None:
                await is_under_way.wait()

    async def _answer(self, choice: int, is_under_way: asyncio.Event) -> None:
        """`is_under_way`: its KV is handed over, or it needed none to be, or it has failed."""
        mark = pb.GenerateResponse(choice=choice).SerializeToString()  # behind a message's own bytes it is merged
        progress = self._progress(choice)
        try:
            async with aclosing(self._relay.answer(progress)) as messages:
                async for raw in messages:
                    message = pb.GenerateResponse.FromString(raw)
                    if message.HasField("usage"):
                        self._summaries[choice] = message
                        await self._queue.put(b"")  # wakes who waits for the last one
                        continue
                    await self._queue.put(raw + mark)
                    if message.output_index + len(message.token_ids) > 1:
                        self._shared = progress.placement
                        is_under_way.set()
        except Exception as error:
            self._has_failed = True
            await self._queue.put(error)
        finally:
            is_under_way.set()

    def _progress(self, choice: int) -> Progress:
        sampling = replace(self._request.sampling, seed=choice_seed(self._request.sampling.seed, choice))
        if choice > 0:  # the prompt is scored once
            sampling = replace(sampling, num_prompt_logprobs=None)
        return Progress(
            request=replace(self._request, sampling=sampling),
            clock=copy(self._clock),
            deadline_at=self._deadline_at,
            account=self._account,
            prefers=self._shared,
            is_choice=True,
            known=self._request.emitted_of(choice),
        )


def _joined(summaries: Sequence[pb.GenerateResponse]) -> pb.GenerateResponse:
    """Tokens and times of workers are added up, but the prompt counts once. Stages are those of the first answer."""
    usages = [summary.usage for summary in summaries]
    timelines = [summary.timeline for summary in summaries]
    steps = [max(0, usage.output_tokens - 1) for usage in usages]
    usage = pb.Usage(
        prompt_tokens=usages[0].prompt_tokens,
        output_tokens=sum(usage.output_tokens for usage in usages),
        num_resumes=sum(usage.num_resumes for usage in usages),
        num_retries=sum(usage.num_retries for usage in usages),
        num_moves=sum(usage.num_moves for usage in usages),
        disaggregated=any(usage.disaggregated for usage in usages),
    )
    for name in ("prefill", "decode"):
        parts = [getattr(usage, name) for usage in usages if usage.HasField(name)]
        if parts:
            _add_up(getattr(usage, name), parts)
    return pb.GenerateResponse(
        request_id=summaries[0].request_id,
        usage=usage,
        timeline=pb.Timeline(
            stages=timelines[0].stages,
            ttft_s=timelines[0].ttft_s,
            tpot_s=sum(each.tpot_s * count for each, count in zip(timelines, steps, strict=True)) / (sum(steps) or 1),
            total_s=max(each.total_s for each in timelines),
        ),
    )


def _add_up(total: Message, parts: Sequence[Message]) -> None:
    for field in total.DESCRIPTOR.fields:
        setattr(total, field.name, sum(getattr(part, field.name) for part in parts))
