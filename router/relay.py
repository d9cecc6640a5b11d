"""One request from placement to its last message: tries again before the first token, resumes after it.

A resumed request is the same one with what was emitted as part of its tokens: the client sees one unbroken answer.
Messages are passed on as bytes. What was emitted is kept, in case the request has to be resumed.
"""

from __future__ import annotations

import asyncio
import logging
import random
import secrets
import time
from array import array
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, field, replace

from protos import inference_pb2 as pb
from protos.errors import AttemptsExhausted, DeadlineExceeded, Internal, InvalidArgument, NoWorker
from router import metrics
from router.attempt import Attempt
from router.config import RelayPolicy
from router.dispatch import Dispatch
from router.leg import AttemptFailed, ended_early
from router.links import Links
from router.messages import emitted_tokens
from router.move import Move, moved
from router.placement import Demand, Placement, WorkerId, place
from router.timeline import RequestClock, Served, joined, timeline, usage
from router.validation import Request
from router.workers import WorkerTable

logger = logging.getLogger(__name__)

_MAX_DELAY_S = 1.0
_KEPT_MESSAGES = 64
_MOVE_S = 1.0  # between a worker's end of a stream and its word that the sequence is elsewhere


@dataclass(slots=True, eq=False)
class Progress:
    """How far one request has come, over all its attempts."""

    request: Request
    clock: RequestClock
    deadline_at: float | None
    emitted: array[int] = field(default_factory=lambda: array("q"))  # as of the last reading back
    raw_messages: list[bytes] = field(default_factory=list)  # relayed since then
    last: pb.GenerateResponse | None = None  # the message that ended the answer
    avoid: set[WorkerId] = field(default_factory=set)
    num_retries: int = 0
    num_resumes: int = 0
    num_moves: int = 0
    move: Move | None = None  # made, and not yet followed
    done_before: pb.DecodeStats | None = None  # on workers that the sequence was moved away from

    @property
    def remaining_s(self) -> float | None:
        return None if self.deadline_at is None else self.deadline_at - time.monotonic()

    @property
    def token_ids(self) -> list[int]:
        """What is to be prefilled."""
        return [*self.request.token_ids, *self.emitted]

    @property
    def num_relayed(self) -> int:
        """Tokens of the answer so far. Reads the last message only."""
        if not self.raw_messages:
            return len(self.emitted)
        last = pb.GenerateResponse.FromString(self.raw_messages[-1])
        return int(last.output_index) + len(last.token_ids)

    @property
    def wants_decode(self) -> bool:
        """Whether more than the one token that prefill samples is wanted."""
        return self.request.sampling.max_tokens - len(self.emitted) > 1

    def is_complete(self) -> bool:
        """Whether the answer has ended. Reads the last message only."""
        if self.raw_messages:
            self._set_last(self.raw_messages[-1])
        return self.last is not None

    def relayed(self, raw: bytes) -> None:
        """Read many at once, which costs less time; of those read the tokens are kept, which cost less memory."""
        self.raw_messages.append(raw)
        if len(self.raw_messages) >= _KEPT_MESSAGES:
            self.read_back()

    def read_back(self) -> None:
        """Learns what was emitted from what was relayed."""
        try:
            self.emitted.extend(emitted_tokens(self.raw_messages, len(self.emitted)))
        except ValueError as error:
            raise Internal(f"a worker sent tokens out of order: {error}") from error
        if self.raw_messages:
            self._set_last(self.raw_messages[-1])
        self.raw_messages.clear()

    def _set_last(self, raw: bytes) -> None:
        message = pb.GenerateResponse.FromString(raw)
        self.last = message if message.finish_reason != pb.FINISH_REASON_UNSPECIFIED else None


class Relay:
    def __init__(self, table: WorkerTable, links: Links, policy: RelayPolicy, rng: random.Random | None = None) -> None:
        self._table = table
        self._links = links
        self._policy = policy
        self._rng = rng or random.Random()

    async def messages(
        self, request: Request, clock: RequestClock, deadline_at: float | None
    ) -> AsyncGenerator[bytes, None]:
        """The whole answer, and last a message with usage and timeline. Raises ServiceError; closing it cancels."""
        progress, attempt = Progress(request, clock, deadline_at), None
        try:
            while progress.last is None:
                attempt = await self._next_attempt(progress, attempt)
                try:
                    async with aclosing(self._run(attempt, progress)) as messages:
                        async for raw in messages:
                            yield raw
                except AttemptFailed as failure:
                    progress.read_back()
                    if progress.last is None:
                        await self._prepare_next(progress, attempt, failure)
        finally:
            if progress.move is not None:  # made, and never followed
                progress.move.dispatch.end()
        assert attempt is not None
        summary = _summary(progress, progress.last, attempt)
        metrics.observe(summary)
        yield summary.SerializeToString()

    async def _next_attempt(self, progress: Progress, before: Attempt | None) -> Attempt:
        if progress.move is not None and before is not None:
            return self._moved_attempt(progress, progress.move, before)
        placement = await self._place(progress)
        progress.clock.placed()
        return Attempt(
            request=progress.request,
            attempt_id=secrets.token_hex(8),
            token_ids=progress.token_ids,
            placement=placement,
            timeout_s=progress.remaining_s,
            links=self._links,
        )

    def _moved_attempt(self, progress: Progress, move: Move, before: Attempt) -> Attempt:
        progress.read_back()
        progress.num_moves += 1
        progress.done_before = joined(progress.done_before, move.stats)
        return Attempt(
            request=progress.request,
            attempt_id=move.attempt_id,
            token_ids=progress.token_ids[:-1],
            placement=replace(before.placement, decode=move.target),
            timeout_s=progress.remaining_s,
            links=self._links,
            arrives=True,
            prefill_stats=before.prefill_stats,
        )

    async def _place(self, progress: Progress) -> Placement:
        """Waits a little for a worker to come (back), if none fits now."""
        give_up_at = time.monotonic() + self._policy.wait_for_worker_s
        while True:
            try:
                return place(self._table.snapshot(), self._demand(progress), progress.avoid, self._rng)
            except NoWorker:
                remaining_s = give_up_at - time.monotonic()
                if progress.remaining_s is not None:
                    remaining_s = min(remaining_s, progress.remaining_s)
                if remaining_s <= 0:
                    raise
                await self._table.wait_changed(remaining_s)

    def _demand(self, progress: Progress) -> Demand:
        num_prompt_tokens, max_tokens = len(progress.request.token_ids), progress.request.sampling.max_tokens
        num_tokens = num_prompt_tokens + progress.num_relayed
        return Demand(
            num_blocks=self._num_blocks(num_tokens),
            num_blocks_in_all=self._num_blocks(num_prompt_tokens + max_tokens) - 1,
            wants_decode=progress.wants_decode,
            num_tokens=num_tokens + 1,
            num_tokens_in_all=num_prompt_tokens + max_tokens,
        )

    async def _run(self, attempt: Attempt, progress: Progress) -> AsyncGenerator[bytes, None]:
        """One attempt, its load counted while it lasts. It may end in a move, which is the next attempt's to follow."""
        dispatch = self._dispatch(attempt, progress)
        moving = asyncio.create_task(moved(attempt, dispatch, lambda: self._demand(progress), self._table, self._rng))
        try:
            async with aclosing(attempt.messages()) as messages:
                async for raw in messages:
                    progress.relayed(raw)
                    if not dispatch.is_prefilled:
                        dispatch.prefilled()
                        if not attempt.arrives:
                            progress.clock.attempt_token()
                    yield raw
            progress.clock.last_token()
            if not progress.is_complete():
                if dispatch.leaving.is_set():
                    await asyncio.wait([moving], timeout=_MOVE_S)  # the worker tells its end and its success apart
                progress.move = moving.result() if moving.done() else None
                if progress.move is None:
                    raise ended_early(attempt.placement.workers[-1])
        finally:
            dispatch.end()
            await _not_followed(moving, progress.move)

    def _dispatch(self, attempt: Attempt, progress: Progress) -> Dispatch:
        if progress.move is not None:
            move, progress.move = progress.move, None
            return move.dispatch
        num_tokens = len(attempt.token_ids)
        return self._table.dispatch(attempt.placement, num_tokens, self._num_blocks(num_tokens))

    async def _prepare_next(self, progress: Progress, attempt: Attempt, failure: AttemptFailed) -> None:
        """Decides whether there is a next attempt, avoids who failed this one, and waits a moment.

        Of what a worker says, only INVALID_ARGUMENT is the client's doing: everything else may go well elsewhere.
        """
        error = failure.error
        metrics.LEG_FAILURES.labels(error.reason).inc()
        if isinstance(error, InvalidArgument):
            raise error
        if progress.remaining_s is not None and progress.remaining_s <= 0:
            raise DeadlineExceeded(f"the deadline passed after {len(progress.emitted)} tokens")
        if failure.is_connection:
            self._table.unreachable(failure.worker_id)
            progress.avoid.add(failure.worker_id)
        else:  # either side may be why
            involved = attempt.placement.workers[-1:] if attempt.arrives else attempt.placement.workers
            progress.avoid |= {worker.id for worker in involved}
        num_failures = progress.num_retries + progress.num_resumes + 1
        if num_failures >= self._policy.max_attempts:
            raise AttemptsExhausted(f"{num_failures} attempts failed; the last one: {error}")
        progress.done_before = None  # statistics are those of what follows
        if progress.emitted:
            progress.num_resumes += 1
            metrics.RESUMES.inc()
        else:
            progress.num_retries += 1
            metrics.RETRIES.inc()
        logger.warning("request %s: %s; placing it again", progress.request.request_id, error)
        delay_s = min(_MAX_DELAY_S, self._policy.retry_delay_s * 2 ** (num_failures - 1)) * self._rng.uniform(0.5, 1)
        await asyncio.sleep(max(delay_s, error.retry_after_s or 0.0))

    def _num_blocks(self, num_tokens: int) -> int:
        """With room for the answer to begin."""
        layout = self._table.layout
        return 0 if layout is None else layout.num_blocks(num_tokens) + 1


async def _not_followed(moving: asyncio.Task[Move], followed: Move | None) -> None:
    """Ends a move that nobody waits for any more. The worker it was made to gives up a sequence that nobody claims."""

    def ended(moving: asyncio.Task[Move]) -> None:
        """Called whether or not we are cancelled meanwhile."""
        if moving.cancelled():
            return
        if (error := moving.exception()) is not None:
            logger.error("a request could not be moved", exc_info=error)
        elif followed is None:
            moving.result().dispatch.end()

    moving.add_done_callback(ended)
    moving.cancel()
    await asyncio.wait([moving])


def _summary(progress: Progress, last: pb.GenerateResponse, attempt: Attempt) -> pb.GenerateResponse:
    served = Served(
        placement=attempt.placement,
        num_prompt_tokens=len(progress.request.token_ids),
        num_output_tokens=last.output_index + len(last.token_ids),
        prefill=attempt.prefill_stats,
        decode=joined(progress.done_before, last.decode_stats) if last.HasField("decode_stats") else None,
        num_retries=progress.num_retries,
        num_moves=progress.num_moves,
        num_resumes=progress.num_resumes,
    )
    return pb.GenerateResponse(
        output_index=served.num_output_tokens,
        request_id=progress.request.request_id,
        usage=usage(served),
        timeline=timeline(served, progress.clock),
    )
