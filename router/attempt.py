"""One attempt at a request on the workers it was placed on: opens both legs, orders what comes, closes both.

A sequence that is handed over from one decode worker to another goes on as an attempt of its own.

Tokens are bytes of `GenerateResponse`; nothing here looks into those of the decode worker.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from protos import decode_pb2, decode_pb2_grpc, inference_pb2, prefill_pb2, prefill_pb2_grpc, tracing
from protos.channel import service_errors
from router.candidate import Candidate
from router.leg import DecodeLeg, decode_leg, ended_early, leg_errors
from router.links import Links
from router.messages import decode_request, prefill_request, target_message
from router.placement import Placement
from router.request import Request

_HAND_OVER_S = 30.0  # of a running sequence; several wait for each other
_STATISTICS_S = 1.0  # for prefill's, when the answer is complete already: it goes without them

Messages: TypeAlias = AsyncGenerator[bytes, None]


@dataclass(slots=True, eq=False)
class Attempt:
    """`token_ids` are the prompt and what was emitted before. `timeout_s` bounds both legs.

    `arrives`: the decode worker has the sequence already, with KV of `token_ids` and one token more, which was emitted.
    """

    request: Request
    attempt_id: str
    token_ids: Sequence[int]
    placement: Placement
    timeout_s: float | None
    links: Links
    arrives: bool = False
    permit: bytes = b""  # to read the answer at its decode worker; empty: it is read here
    span: tracing.Span = tracing.NO_SPAN
    started_at: float = field(default_factory=time.monotonic)
    prefill_stats: prefill_pb2.PrefillStats | None = None
    scored_prompt: list[bytes] = field(
        default_factory=list
    )  # kept for the first token: without it they come to nothing

    def messages(self) -> Messages:
        """Every message of the answer from here on. Raises AttemptFailed."""
        prefill, decode = self.placement.prefill, self.placement.decode
        if decode is not None and (prefill is None or self.arrives):
            return self._one_leg(decode)
        if prefill is not None and decode is None:
            return self._prefill_alone(prefill)
        if prefill is not None and decode is not None:
            return self._two_legs(prefill, decode)
        raise ValueError("a placement names at least one worker")

    @property
    def directions(self) -> bytes:
        """A message for a client that reads at the decode worker. What `messages` has is then for us, but the first
        token, where a prefill worker makes it."""
        worker = self.placement.decode
        assert worker is not None
        directions = inference_pb2.Directions(
            worker_id=worker.id.name, address=worker.address, attempt_id=self.attempt_id, permit=self.permit
        )
        return inference_pb2.GenerateResponse(directions=directions).SerializeToString()

    @property
    def tells_first(self) -> bool:
        """Whether the first message is a prefill worker's."""
        return self.placement.prefill is not None and not self.arrives

    async def hand_over(self, target: Candidate, attempt_id: str) -> inference_pb2.DecodeStats:
        """Has the decode worker hand the sequence over to `target`; its messages end then, and the answer has not.

        Raises ServiceError: the sequence goes on where it is.
        """
        source = self.placement.decode
        assert source is not None
        request = decode_pb2.HandOverRequest(
            request_id=self.request.request_id,
            attempt_id=self.attempt_id,
            next_attempt_id=attempt_id,
            target=target_message(target),
        )
        async with self.links.to(source) as link:
            with service_errors():
                call = decode_pb2_grpc.DecodeStub(link.channel).HandOver(request, timeout=self._hand_over_s())
                response = await call
        return response.stats

    def _hand_over_s(self) -> float:
        if self.timeout_s is None:
            return _HAND_OVER_S
        return min(_HAND_OVER_S, max(0.0, self.timeout_s - (time.monotonic() - self.started_at)))

    async def _one_leg(self, worker: Candidate) -> Messages:
        """Prefill and decode on the same worker, or decode after a hand-over from another."""
        may_score = self.request.sampling.num_prompt_logprobs is not None
        async with self._decode_leg(worker, prefill_here=not self.arrives) as leg:
            while (raw := await leg.read()) is not None:
                if may_score and inference_pb2.GenerateResponse.FromString(raw).HasField("prompt"):
                    self.scored_prompt.append(raw)
                    continue
                for scored in self._taken_scores() if may_score else ():
                    yield scored
                may_score = False
                yield raw

    async def _prefill_alone(self, worker: Candidate) -> Messages:
        first = _first_token_future()
        prefilling = asyncio.create_task(self._run_prefill(worker, None, first))
        try:
            token = await _first_token(first, prefilling)
            for scored in self._taken_scores():
                yield scored
            yield token.SerializeToString()
            await asyncio.wait([prefilling], timeout=_STATISTICS_S)
        finally:
            await _cancelled(prefilling)

    async def _two_legs(self, prefill: Candidate, decode: Candidate) -> Messages:
        """The first token as soon as prefill has it, then what decode sends, which may have come before it."""
        first = _first_token_future()
        async with self._decode_leg(decode, prefill_here=False) as leg:
            prefilling = asyncio.create_task(self._run_prefill(prefill, decode, first))
            second = asyncio.create_task(_read_second(leg))
            try:
                token = await _first_token(first, prefilling, second)
                for scored in self._taken_scores():
                    yield scored
                yield token.SerializeToString()
                if token.finish_reason == inference_pb2.FINISH_REASON_UNSPECIFIED:
                    raw: bytes | None = await _handed_over(prefilling, second)
                    while raw is not None:
                        yield raw
                        raw = await leg.read()
                else:
                    leg.call.cancel()
                await asyncio.wait([prefilling], timeout=_STATISTICS_S)
            finally:
                await _cancelled(prefilling, second)

    def _taken_scores(self) -> Iterator[bytes]:
        """One after another, so that none is kept longer than needed."""
        self.scored_prompt.reverse()
        while self.scored_prompt:
            yield self.scored_prompt.pop()

    @asynccontextmanager
    async def _decode_leg(self, worker: Candidate, *, prefill_here: bool) -> AsyncIterator[DecodeLeg]:
        request = decode_request(self.request, self.attempt_id, self.token_ids, prefill_here=prefill_here)
        request.permit = self.permit
        headers = self.span.headers
        async with self.links.to(worker) as link, decode_leg(worker, link, request, self.timeout_s, headers) as leg:
            yield leg

    async def _run_prefill(
        self, worker: Candidate, decode: Candidate | None, first: asyncio.Future[inference_pb2.GenerateResponse]
    ) -> None:
        """Fulfils `first`, and ends when the hand-over has. Raises AttemptFailed."""
        request = prefill_request(self.request, self.attempt_id, self.token_ids, decode)
        async with self.links.to(worker) as link:
            call = prefill_pb2_grpc.PrefillStub(link.channel).Prefill(
                request, timeout=self.timeout_s, metadata=self.span.headers
            )
            with link.follow(call), leg_errors(worker, link):
                async for response in call:
                    if response.HasField("prompt"):
                        self.scored_prompt.append(response.prompt.SerializeToString())
                    elif response.HasField("first_token") and not first.done():
                        first.set_result(response.first_token)
                    elif response.HasField("handed_over"):
                        self.prefill_stats = response.handed_over
        if not first.done() or self.prefill_stats is None:
            raise ended_early(worker)


def _first_token_future() -> asyncio.Future[inference_pb2.GenerateResponse]:
    return asyncio.get_running_loop().create_future()


async def _first_token(
    first: asyncio.Future[inference_pb2.GenerateResponse],
    prefilling: asyncio.Task[None],
    *other: asyncio.Task[bytes],
) -> inference_pb2.GenerateResponse:
    """Waits for prefill, and sees at once if a leg fails meanwhile."""
    waiting: set[asyncio.Future[Any]] = {first, prefilling, *other}
    while not first.done():
        done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        if first.done():
            break
        for ended in done:
            ended.result()
        waiting -= done
    return first.result()


async def _handed_over(prefilling: asyncio.Task[None], second: asyncio.Task[bytes]) -> bytes:
    """Waits for decode's first message. If prefill fails before, raises that: the hand-over will not come."""
    if not second.done():
        await asyncio.wait([prefilling, second], return_when=asyncio.FIRST_COMPLETED)
    if not second.done():
        prefilling.result()
    return await second


async def _read_second(leg: DecodeLeg) -> bytes:
    """Decode never ends well without a message."""
    raw = await leg.read()
    if raw is None:
        raise ended_early(leg.worker)
    return raw


async def _cancelled(*tasks: asyncio.Task[Any]) -> None:
    """Ends tasks whose results nobody wants any more."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
