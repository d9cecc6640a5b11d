"""Takes a running sequence away from a decode worker that is leaving: picks another, and has it handed over there."""

from __future__ import annotations

import asyncio
import logging
import random
import secrets
from collections.abc import Callable
from dataclasses import dataclass

from protos import inference_pb2 as pb
from protos.errors import ServiceError
from router import metrics
from router.attempt import Attempt
from router.candidate import Candidate, WorkerId
from router.demand import Demand
from router.dispatch import Dispatch
from router.placer import Placer

logger = logging.getLogger(__name__)

_SPREAD_S = 0.2
_RETRY_S = 0.1  # doubled with each failure
_MAX_RETRY_S = 5.0


@dataclass(frozen=True, slots=True)
class Move:
    """A sequence that `target` has taken, to go on as `attempt_id`; its load there is counted already."""

    attempt_id: str
    target: Candidate
    dispatch: Dispatch
    stats: pb.DecodeStats  # of what the worker before did


async def moved(
    attempt: Attempt, dispatch: Dispatch, demand: Callable[[], Demand], placer: Placer, rng: random.Random
) -> Move:
    """Waits until the attempt's decode worker is leaving, and returns when another one has the sequence.

    While nobody has room, or a hand-over fails, the sequence stays where it is and is tried again. `demand` is asked
    each time. Cancelled, no load stays counted.
    """
    retry_s, failed = _RETRY_S, set[WorkerId]()
    while True:
        if not dispatch.leaving.is_set():
            retry_s = _RETRY_S
            await dispatch.leaving.wait()
            await asyncio.sleep(_SPREAD_S * rng.random())  # all that runs there is told at once
            continue  # it may have been taken back
        if not dispatch.is_prefilled:
            await asyncio.sleep(_RETRY_S)  # nothing has failed yet
            continue
        move = await _try_to_move(attempt, demand(), failed, placer)
        if move is not None:
            dispatch.handed_over()
            return move
        await asyncio.sleep(retry_s * rng.uniform(0.5, 1))
        retry_s = min(2 * retry_s, _MAX_RETRY_S)


async def _try_to_move(attempt: Attempt, demand: Demand, failed: set[WorkerId], placer: Placer) -> Move | None:
    """Where it fails, its target is one of `failed` from then on, until there is no other."""
    source = attempt.placement.decode
    target = None if source is None else placer.place_moved(demand, source.id, failed)
    if target is None:
        return None
    if target.id in failed:
        failed.clear()
    attempt_id = secrets.token_hex(8)
    dispatch = placer.dispatch_moved(target, demand)
    try:
        stats = await attempt.hand_over(target, attempt_id)
    except BaseException as error:
        dispatch.end()
        if not isinstance(error, ServiceError):
            raise
        failed.add(target.id)
        metrics.MOVES.labels(error.reason.lower()).inc()
        logger.info("request %s stays where it is for now: %s", attempt.request.request_id, error)
        return None
    metrics.MOVES.labels("ok").inc()
    return Move(attempt_id, target, dispatch, stats)
