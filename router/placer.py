"""Between a request and placement: what the request needs, where it goes, and what that adds to the workers' load."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Collection, Sequence

from model.block_pool import BlockHash, hash_blocks
from router import metrics
from router.candidate import WorkerId
from router.config import PlacementPolicy
from router.demand import Demand
from router.dispatch import Dispatch
from router.placement import Placement, place
from router.sessions import Sessions
from router.validation import Request
from router.workers import WorkerTable

_HASHED_AT_ONCE = 4096  # tokens, in a millisecond; more of them in a thread, or they would hold up the streams


class Placer:
    def __init__(self, table: WorkerTable, policy: PlacementPolicy, rng: random.Random) -> None:
        self._table = table
        self._policy = policy
        self._rng = rng
        self._sessions = Sessions(policy.max_sessions)

    async def hashes(self, token_ids: Sequence[int]) -> list[BlockHash]:
        """Of the blocks that a worker may hold already: it computes the last token in any case."""
        layout = self._table.layout
        if layout is None:
            return []
        if len(token_ids) <= _HASHED_AT_ONCE:
            return hash_blocks(token_ids[:-1], layout.block_size)
        return await asyncio.to_thread(hash_blocks, token_ids[:-1], layout.block_size)

    def demand(self, request: Request, num_tokens: int, *, wants_decode: bool, hashes: Sequence[BlockHash]) -> Demand:
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
        )

    def place(self, demand: Demand, avoid: Collection[WorkerId]) -> Placement:
        """Raises NoWorker."""
        return place(self._table.snapshot(), demand, avoid, self._rng, self._policy)

    def dispatch(self, request: Request, placement: Placement, num_tokens: int) -> Dispatch:
        """Counts what is sent to the workers of a placement, of a prompt of so many tokens."""
        metrics.PLACEMENTS.labels(placement.grounds.value).inc()
        self._sessions.served(request.session_id, placement)
        num_in_all = len(request.token_ids) + request.sampling.max_tokens
        return self._table.dispatch(
            placement,
            num_tokens - placement.num_cached_tokens,
            self._num_blocks(num_tokens),
            at_most=(num_in_all - num_tokens, self._num_blocks(num_in_all) - 1),
        )

    def _num_blocks(self, num_tokens: int) -> int:
        """With room for the answer to begin."""
        layout = self._table.layout
        return 0 if layout is None else layout.num_blocks(num_tokens) + 1
