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
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import replace

from protos import inference_pb2 as pb
from protos.errors import Interrupted
from protos.tracing import Span
from router import metrics
from router.account import Account
from router.admission import Gate
from router.attempt import Attempt
from router.config import PlacementPolicy, RelayPolicy
from router.demand import Demand
from router.leg import AttemptFailed, ended_early
from router.links import Links
from router.move import Move, moved
from router.placement import Placement
from router.placer import Placer, Wanted
from router.progress import Progress
from router.request import Request
from router.retries import Retries
from router.timeline import RequestClock, Served, joined, timeline, usage
from router.workers import WorkerTable

logger = logging.getLogger(__name__)

_PERMIT_BYTES = 32
_MOVE_S = 1.0  # between a worker's end of a stream and its word that the sequence is elsewhere


class Relay:
    def __init__(
        self,
        table: WorkerTable,
        links: Links,
        gate: Gate,
        policy: RelayPolicy,
        rng: random.Random | None = None,
        placement: PlacementPolicy | None = None,
    ) -> None:
        self._table = table
        self._links = links
        self._rng = rng or random.Random()
        self._retries = Retries(policy, self._rng)
        self.breakers = self._retries.breakers
        self._placer = Placer(
            table, gate, self.breakers, placement or PlacementPolicy(), self._rng, policy.wait_for_worker_s
        )

    def messages(
        self, request: Request, clock: RequestClock, deadline_at: float | None, account: Account
    ) -> AsyncGenerator[bytes, None]:
        """The whole answer, and last a message with usage and timeline. Raises ServiceError; closing it cancels."""
        return self.answer(Progress(request, clock, deadline_at, account, known=request.emitted_of(0)))

    async def answer(self, progress: Progress) -> AsyncGenerator[bytes, None]:
        """The same of a request that has not begun."""
        attempt = None
        progress.account.answers.append(progress)
        self._retries.begin()
        try:
            while progress.last is None:
                attempt = await self._next_attempt(progress, attempt)
                progress.begin(attempt)
                try:
                    with attempt.span:
                        async with aclosing(self._run(attempt, progress)) as messages:
                            async for raw in messages:
                                yield raw
                except AttemptFailed as failure:
                    progress.read_back()
                    progress.is_under_way = progress.last is not None
                    if progress.last is None:
                        await self._prepare_next(progress, attempt, failure)
        finally:
            self._retries.end()
            if (dispatch := progress.take_dispatch()) is not None:  # made, and never followed
                dispatch.end()
            progress.account.num_output_tokens.append(progress.num_relayed - len(progress.known))
        assert attempt is not None
        for worker in attempt.placement.workers:
            self.breakers.succeeded(worker.id, time.monotonic())
        summary = _summary(progress, progress.last, attempt)
        metrics.observe_prefix(attempt.placement, summary.usage)
        if not progress.is_choice:
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
            permit=_permit(progress, placement),
            span=_attempt_span(progress, placement),
        )

    def _moved_attempt(self, progress: Progress, move: Move, before: Attempt) -> Attempt:
        progress.read_back()
        progress.num_moves += 1
        progress.done_before = joined(progress.done_before, move.stats)
        placement = replace(before.placement, decode=move.target)
        return Attempt(
            request=progress.request,
            attempt_id=move.attempt_id,
            token_ids=progress.token_ids[:-1],
            placement=placement,
            timeout_s=progress.remaining_s,
            links=self._links,
            arrives=True,
            permit=_permit(progress, placement),
            span=_attempt_span(progress, placement, moved=True),
            prefill_stats=before.prefill_stats,
        )

    async def _place(self, progress: Progress) -> Placement:
        """Its load is counted from here on, as `progress.dispatch`. Only the first of a request passes the gate."""
        request, token_ids, account = progress.request, progress.token_ids, progress.account
        if (preferred := progress.prefers) is not None:
            progress.prefers = None
            kept = account.take(preferred)
            progress.dispatch = kept or self._placer.dispatch_another(request, preferred, len(token_ids))
            return preferred
        progress.hashes = await self._placer.hashes(token_ids)
        avoid = frozenset(progress.avoid)
        wanted = Wanted(request, len(token_ids), lambda: self._demand(progress), avoid, progress.deadline_at)
        if account.admitted is None:
            admitted = await self._placer.admit(wanted, account.allowance.tenant)
            progress.dispatch = account.let_in(admitted)
            progress.clock.waited(admitted.wait_s)
            return admitted.placement
        account.let_go()
        placement, progress.dispatch = await self._placer.place_again(wanted)
        return placement

    def _demand(self, progress: Progress) -> Demand:
        num_tokens = len(progress.request.token_ids) + progress.num_relayed
        return self._placer.demand(
            progress.request,
            num_tokens,
            wants_decode=progress.wants_decode,
            hashes=progress.hashes,
            num_answers=progress.request.num_choices if progress.account.admitted is None else 1,
        )

    async def _run(self, attempt: Attempt, progress: Progress) -> AsyncGenerator[bytes, None]:
        """One attempt, its load counted while it lasts. It may end in a move, which is the next attempt's to follow."""
        dispatch = progress.take_dispatch()
        assert dispatch is not None
        moving = asyncio.create_task(moved(attempt, dispatch, lambda: self._demand(progress), self._placer, self._rng))
        try:
            if attempt.permit:
                metrics.DIRECT.inc()
                yield attempt.directions
            async with aclosing(attempt.messages()) as messages:
                async for raw in messages:
                    progress.relayed(raw)
                    is_told = not attempt.permit
                    if not dispatch.is_prefilled:
                        is_told = is_told or attempt.tells_first
                        dispatch.prefilled()
                        if not attempt.arrives:
                            progress.clock.attempt_token()
                            metrics.observe_ttft(attempt.placement, progress.clock)
                    if is_told:
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

    async def _prepare_next(self, progress: Progress, attempt: Attempt, failure: AttemptFailed) -> None:
        """Avoids who failed, and waits a moment. Raises what the client is told if there is no next attempt."""
        if failure.is_connection:
            self._table.unreachable(failure.worker_id)
            progress.avoid.add(failure.worker_id)
        else:  # either side may be why
            involved = attempt.placement.workers[-1:] if attempt.arrives else attempt.placement.workers
            progress.avoid |= {worker.id for worker in involved}
        num_failures = progress.num_retries + progress.num_resumes + 1
        delay_s = self._retries.delay_s(failure, num_failures, len(progress.emitted), progress.remaining_s)
        if attempt.permit:
            raise Interrupted(f"the answer broke off: {failure.error}")  # what has come of it, the client knows
        progress.done_before = None  # statistics are those of what follows
        if progress.emitted:
            progress.num_resumes += 1
            metrics.RESUMES.inc()
        else:
            progress.num_retries += 1
            metrics.RETRIES.inc()
        logger.warning("request %s: %s; placing it again", progress.request.request_id, failure.error)
        await asyncio.sleep(delay_s)


def _permit(progress: Progress, placement: Placement) -> bytes:
    return secrets.token_bytes(_PERMIT_BYTES) if progress.request.is_direct and placement.decode is not None else b""


def _attempt_span(progress: Progress, placement: Placement, *, moved: bool = False) -> Span:
    workers = {"prefill": placement.prefill, "decode": placement.decode}
    names = {role: worker.id.name for role, worker in workers.items() if worker is not None}
    reason = "" if moved else placement.reason
    return progress.request.span.child(
        "attempt", moved=moved, reason=reason, after_tokens=len(progress.emitted), **names
    )


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
        num_resumes=progress.num_resumes + bool(progress.known),
        num_known_tokens=len(progress.known),
    )
    return pb.GenerateResponse(
        output_index=served.num_output_tokens,
        request_id=progress.request.request_id,
        usage=usage(served),
        timeline=timeline(served, progress.clock),
    )
