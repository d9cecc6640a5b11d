"""Between a request and placement: what it needs, where it goes, and what that adds to the workers' load. The load is
counted in the same step as the workers are found: nothing is awaited between the two.

A new request goes through the gate. What was admitted does not wait behind new ones: it goes on at once elsewhere.
"""

from __future__ import annotations

import asyncio
import math
import random
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from model.block_pool import BlockHash, hash_blocks
from protos.errors import DeadlineExceeded, NoWorker
from router import metrics
from router.admission import Gate
from router.breaker import Breakers
from router.candidate import Candidate, WorkerId
from router.config import PlacementPolicy
from router.demand import Demand
from router.dispatch import Dispatch
from router.placement import Placement, place, place_moved
from router.request import Request
from router.sessions import Sessions
from router.turns import Admitted, Ask
from router.workers import WorkerTable

_HASHED_AT_ONCE = 4096  # tokens, in a millisecond; more of them in a thread, or they would hold up the streams


@dataclass(frozen=True, slots=True)
class Wanted:
    """What an attempt needs. `demand` is asked each time: workers come that tell what a block is."""

    request: Request
    num_tokens: int  # to be prefilled
    demand: Callable[[], Demand]
    avoid: Collection[WorkerId] = ()
    deadline_at: float | None = None


class Placer:
    """`wait_for_worker_s`: how long what was admitted waits for a worker to come (back), if none fits."""

    def __init__(
        self,
        table: WorkerTable,
        gate: Gate,
        breakers: Breakers,
        policy: PlacementPolicy,
        rng: random.Random,
        wait_for_worker_s: float = 0.0,
    ) -> None:
        self._table = table
        self._gate = gate
        self._breakers = breakers
        self._policy = policy
        self._rng = rng
        self._wait_for_worker_s = wait_for_worker_s
        self._sessions = Sessions(policy.max_sessions)

    async def hashes(self, token_ids: Sequence[int]) -> list[BlockHash]:
        """Of the blocks that a worker may hold already: it computes the last token in any case."""
        layout = self._table.layout
        if layout is None:
            return []
        if len(token_ids) <= _HASHED_AT_ONCE:
            return hash_blocks(token_ids[:-1], layout.block_size)
        return await asyncio.to_thread(hash_blocks, token_ids[:-1], layout.block_size)

    def demand(
        self,
        request: Request,
        num_tokens: int,
        *,
        wants_decode: bool,
        hashes: Sequence[BlockHash],
        num_answers: int = 1,
    ) -> Demand:
        """Now. `num_tokens` are those of the prompt and of the answer so far."""
        layout = self._table.layout
        num_in_all = len(request.token_ids) + request.sampling.max_tokens
        return Demand(
            num_blocks=self._num_blocks(num_tokens),
            num_blocks_in_all=self._num_blocks(num_in_all) - 1,
            wants_decode=wants_decode,
            num_tokens=num_tokens + 1,
            num_tokens_in_all=num_in_all,
            prefix=self._table.prefixes.match(hashes),
            block_size=1 if layout is None else layout.block_size,
            token_bytes=0 if layout is None else layout.token_bytes,
            session=self._sessions.workers_of(request.session_id),
            num_answers=num_answers,
            num_own_blocks=self._num_blocks(num_tokens) - self._num_shared_blocks(num_tokens),
        )

    async def admit(self, wanted: Wanted, tenant: str) -> Admitted:
        """Raises what the gate raises; end the dispatches, and tell the gate what it was `answered`."""
        request = wanted.request
        ask = Ask(
            tenant=tenant,
            priority=request.priority,
            num_prompt_tokens=wanted.num_tokens,
            max_tokens=request.sampling.max_tokens,
            num_answers=request.num_choices,
            deadline_at=wanted.deadline_at,
            find=lambda held: self.place(wanted.demand(), wanted.avoid, held),
            dispatch=lambda placement: self._dispatch_all(request, placement, wanted.num_tokens),
        )
        return await self._gate.admit(ask)

    async def place_again(self, wanted: Wanted) -> tuple[Placement, Dispatch]:
        """Waits a little for a worker to come (back), if none fits now. Raises NoWorker, DeadlineExceeded."""
        give_up_at = time.monotonic() + self._wait_for_worker_s
        while True:
            remaining_s = math.inf if wanted.deadline_at is None else wanted.deadline_at - time.monotonic()
            if remaining_s <= 0:
                raise DeadlineExceeded("the deadline passed before the answer could go on elsewhere")
            try:
                placement = self.place(wanted.demand(), wanted.avoid)
            except NoWorker:
                remaining_s = min(give_up_at - time.monotonic(), remaining_s)
                if remaining_s <= 0:
                    raise
                await self._table.wait_changed(remaining_s)
            else:
                return placement, self.dispatch(wanted.request, placement, wanted.num_tokens)

    def place(self, demand: Demand, avoid: Collection[WorkerId], held: Collection[WorkerId] = ()) -> Placement:
        """On none of those held for others, and on those whose breaker is open only if there is no other.

        Raises NoWorker.
        """
        avoid = {*avoid, *self._breakers.avoided(time.monotonic())}
        return place(self._table.snapshot(), demand, avoid, self._rng, self._policy, held)

    def place_moved(self, demand: Demand, source: WorkerId, avoid: Collection[WorkerId]) -> Candidate | None:
        """For a sequence that has to leave `source`; None if nowhere is room for it. Breakers count as above."""
        avoid = {*avoid, *self._breakers.avoided(time.monotonic())}
        return place_moved(self._table.snapshot(), demand, source, avoid, self._rng, self._policy)

    def dispatch_moved(self, target: Candidate, demand: Demand) -> Dispatch:
        """There is nothing to prefill."""
        self._breakers.placed(target.id, time.monotonic())
        return self._table.dispatch(Placement(None, target), 0, demand.num_blocks)

    def dispatch(self, request: Request, placement: Placement, num_tokens: int) -> Dispatch:
        """Counts what is sent to the workers of a placement, of a prompt of so many tokens."""
        metrics.PLACEMENTS.labels(placement.grounds.value).inc()
        self._sessions.served(request.session_id, placement)
        for worker in placement.workers:
            self._breakers.placed(worker.id, time.monotonic())
        num_in_all = len(request.token_ids) + request.sampling.max_tokens
        return self._table.dispatch(
            placement,
            num_tokens - placement.num_cached_tokens,
            self._num_blocks(num_tokens),
            at_most=(num_in_all - num_tokens, self._num_blocks(num_in_all) - 1),
        )

    def dispatch_another(self, request: Request, placement: Placement, num_tokens: int) -> Dispatch:
        """Of an answer that follows the first: where that was prefilled and decodes, it finds all but the last, partial
        block of the prompt."""
        metrics.PLACEMENTS.labels(placement.grounds.value).inc()
        num_shared, layout = self._num_shared_blocks(num_tokens), self._table.layout
        num_in_all = len(request.token_ids) + request.sampling.max_tokens
        return self._table.dispatch(
            placement,
            num_tokens - num_shared * (0 if layout is None else layout.block_size),
            self._num_blocks(num_tokens) - num_shared,
            at_most=(num_in_all - num_tokens, self._num_blocks(num_in_all) - 1 - num_shared),
        )

    def _dispatch_all(self, request: Request, placement: Placement, num_tokens: int) -> tuple[Dispatch, ...]:
        first = self.dispatch(request, placement, num_tokens)
        return first, *(self.dispatch_another(request, placement, num_tokens) for _ in range(request.num_choices - 1))

    def _num_shared_blocks(self, num_tokens: int) -> int:
        layout = self._table.layout
        return 0 if layout is None else (num_tokens - 1) // layout.block_size

    def _num_blocks(self, num_tokens: int) -> int:
        """With room for the answer to begin."""
        layout = self._table.layout
        return 0 if layout is None else layout.num_blocks(num_tokens) + 1
