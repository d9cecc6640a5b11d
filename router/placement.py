"""Where a request goes: a pure function of what is known about the workers. No clock, no network, no state.

Prefill goes where the fewest tokens wait to be computed, decode where there is room and least runs. A worker
of role both that is chosen for prefill keeps the sequence: nothing has to be handed over then.
"""

from __future__ import annotations

import random
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from protos.errors import NoWorker
from router.candidate import Candidate, Role, WorkerId

__all__ = ["Candidate", "Demand", "Placement", "Role", "WorkerId", "can_serve", "place", "place_moved"]


@dataclass(frozen=True, slots=True)
class Placement:
    """No prefill: the decode worker prefills too. No decode: one token is all that is wanted.

    Predictions are None while too little is known. `is_within_limits`: whether the workers have room for it now, by
    what is predicted; one that has not had better wait at the router.
    """

    prefill: Candidate | None
    decode: Candidate | None
    reason: str = ""
    ttft_s: float | None = None
    tpot_s: float | None = None
    is_within_limits: bool = True

    @property
    def workers(self) -> list[Candidate]:
        return [worker for worker in (self.prefill, self.decode) if worker is not None]


@dataclass(frozen=True, slots=True)
class Demand:
    """What a request needs of its workers: for its prompt and one token, and in all. One token needs no decode."""

    num_blocks: int
    num_blocks_in_all: int
    wants_decode: bool
    num_tokens: int = 0
    num_tokens_in_all: int = 0

    def fits(self, worker: Candidate) -> bool:
        """Whether the worker's cache, were it empty, could hold what comes to it."""
        return worker.num_blocks >= (self.num_blocks_in_all if self._is_kept(worker) else self.num_blocks)

    def is_allowed(self, worker: Candidate) -> bool:
        """Whether the worker takes sequences as long as what comes to it. It need not check that itself."""
        most = worker.max_context_tokens
        return most is None or most >= (self.num_tokens_in_all if self._is_kept(worker) else self.num_tokens)

    def _is_kept(self, worker: Candidate) -> bool:
        return self.wants_decode and Role.DECODE in worker.role


def place(workers: Sequence[Candidate], demand: Demand, avoid: Collection[WorkerId], rng: random.Random) -> Placement:
    """Workers to `avoid`, or whose cache is too small, are taken only if there is no other (the latter will refuse).

    One that takes no sequences of this length never is: it may have come after the request. Ties are broken at random,
    so that routers do not herd.

    Raises:
        NoWorker: says which role is missing.
    """
    prefill = _fitting(workers, Role.PREFILL, demand, avoid)
    if not prefill:
        raise NoWorker(f"no worker can prefill: {_why_not(workers, Role.PREFILL, demand)}")
    if not demand.wants_decode:
        return Placement(_least_queued(prefill, rng), None)
    pairs = {first.id: _partners(first, workers, demand, avoid) for first in prefill}
    with_partner = [first for first in prefill if pairs[first.id]]
    if not with_partner:
        raise NoWorker(f"no worker can decode: {_why_not(workers, Role.DECODE, demand)}")
    first = _least_queued(with_partner, rng)
    if Role.DECODE in first.role:
        return Placement(None, first)
    return Placement(first, _roomiest(pairs[first.id], demand.num_blocks, rng))


def place_moved(
    workers: Sequence[Candidate], demand: Demand, source: WorkerId, avoid: Collection[WorkerId], rng: random.Random
) -> Candidate | None:
    """Where a sequence that decodes on `source` could go on now; None if nowhere is room for it.

    Workers to `avoid` are taken only if there is no other with room.
    """
    fingerprints = {worker.fingerprint for worker in workers if worker.id == source}
    others = [worker for worker in workers if worker.id != source and worker.fingerprint in fingerprints]
    roomy = [
        worker
        for worker in _fitting(others, Role.DECODE, demand, ())
        if demand.fits(worker) and worker.num_free_blocks >= demand.num_blocks
    ]
    roomy = [worker for worker in roomy if worker.id not in avoid] or roomy
    return _roomiest(roomy, demand.num_blocks, rng) if roomy else None


def can_serve(workers: Sequence[Candidate]) -> bool:
    """Whether any request could be placed."""
    anything = Demand(num_blocks=0, num_blocks_in_all=0, wants_decode=True)
    prefill = _fitting(workers, Role.PREFILL, anything, ())
    return any(_partners(first, workers, anything, ()) for first in prefill)


def _fitting(workers: Sequence[Candidate], role: Role, demand: Demand, avoid: Collection[WorkerId]) -> list[Candidate]:
    ready = [worker for worker in workers if worker.is_ready and role in worker.role and demand.is_allowed(worker)]
    fitting = [worker for worker in ready if demand.fits(worker)] or ready
    return [worker for worker in fitting if worker.id not in avoid] or fitting


def _partners(
    first: Candidate, workers: Sequence[Candidate], demand: Demand, avoid: Collection[WorkerId]
) -> list[Candidate]:
    """Workers that can decode what `first` prefills."""
    if Role.DECODE in first.role:
        return [first]
    same_layout = [worker for worker in workers if worker.fingerprint == first.fingerprint]
    return _fitting(same_layout, Role.DECODE, demand, avoid)


def _least_queued(workers: Sequence[Candidate], rng: random.Random) -> Candidate:
    return min(workers, key=lambda worker: (worker.num_queued_tokens, rng.random()))


def _roomiest(workers: Sequence[Candidate], num_blocks: int, rng: random.Random) -> Candidate:
    def rank(worker: Candidate) -> tuple[bool, int, int, float]:
        return (worker.num_free_blocks < num_blocks, worker.num_active, -worker.num_free_blocks, rng.random())

    return min(workers, key=rank)


def _why_not(workers: Sequence[Candidate], role: Role, demand: Demand) -> str:
    """What is known, and where to look or what to do."""
    if not workers:
        return "none has registered. They may still be starting: `pdserve status` lists them as they come"
    name = "prefill" if role is Role.PREFILL else "decode"
    known = f"{len(workers)} registered, {{}} of them with the role {name} or both"
    num_with_role = sum(role in worker.role for worker in workers)
    if num_with_role == 0:
        return f"{known.format('none')}. Start one, or let one change with `pdserve role WORKER {name}`"
    ready = [worker for worker in workers if role in worker.role and worker.is_ready]
    but = " but with another KV layout" if ready else ""
    if ready and not any(map(demand.is_allowed, ready)):
        but = f" but with a --max-context below the {demand.num_tokens_in_all} tokens of this request"
    return f"{known.format(num_with_role)}, {len(ready)} of these ready{but}. `pdserve status` shows their states"
