"""Where a request goes: a pure function of what is known about the workers. No clock, no network, no state.

Prefill goes where the prompt is computed first, decode where the answer ends first: what waits, what the worker holds
of the prompt already, how fast it is, and what has still to be sent there. While no speed is known, fewest tokens that
wait and fewest sequences that run stand in for times. A worker of role both that prefills keeps the sequence. How it
all is found without looking at every worker is in `router.fleet`, and what decides is in `router.weighing`.
"""

from __future__ import annotations

import enum
import random
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

from protos.errors import NoWorker
from router.candidate import Candidate, Role, WorkerId
from router.config import PlacementPolicy
from router.demand import Demand
from router.fleet import Entry, Fleet, Pools
from router.weighing import Pick, Weighing


class Grounds(enum.Enum):
    """What decided, for those who count."""

    COUNTS = "counts"  # no speed is known yet
    LOAD = "load"
    PREFIX = "prefix"
    SESSION = "session"
    LOCAL = "local"  # a decode worker prefills: it is sooner so
    SPILL = "spill"  # a decode worker prefills: it would be late elsewhere


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
    grounds: Grounds = Grounds.COUNTS
    num_cached_tokens: int = 0  # of the prompt, where it is prefilled
    num_held_tokens: int = 0  # where it decodes, if that is elsewhere

    @property
    def workers(self) -> list[Candidate]:
        return [worker for worker in (self.prefill, self.decode) if worker is not None]

    def answer_s(self, num_tokens: int) -> float | None:
        """Until the last of so many tokens, as predicted."""
        if self.ttft_s is None or self.tpot_s is None:
            return None
        return self.ttft_s + self.tpot_s * (num_tokens - 1)


@dataclass(frozen=True, slots=True)
class _Option:
    """One way to serve a request: on one worker, or prefilled on `first` and decoded on `then`."""

    first: Pick
    then: Pick | None
    cost: float
    grounds: Grounds | None = None  # why a decode worker prefills

    @property
    def rank(self) -> tuple[bool, bool, bool, float, float]:
        picks = (self.first,) if self.then is None else (self.first, self.then)
        is_too_small, is_avoided = (any(pick.misfit[index] for pick in picks) for index in (0, 1))
        return is_too_small, is_avoided, self.is_beyond, self.cost, self.first.rank[-1]

    @property
    def is_beyond(self) -> bool:
        return self.first.is_beyond or (self.then is not None and self.then.is_beyond)


def place(
    fleet: Fleet,
    demand: Demand,
    avoid: Collection[WorkerId],
    rng: random.Random,
    policy: PlacementPolicy | None = None,
    held: Collection[WorkerId] = (),
) -> Placement:
    """Workers to `avoid`, or whose cache is too small, are taken only if there is no other (the latter will refuse).

    One beyond its limits is taken only if there is no other. One that takes no sequences of this length never is: it
    may have come after the request, and one that is `held` for another request. Ties are broken at random, so that
    routers do not herd.

    Raises:
        NoWorker: says which role is missing.
    """
    weighing = Weighing(fleet, demand, avoid, rng, policy or PlacementPolicy(), held)
    options = (option for pools in fleet.pools.values() for option in _options(pools, demand, weighing))
    best = min(options, key=lambda option: option.rank, default=None)
    if best is None:
        raise NoWorker(_why_none(list(fleet), demand))
    return _placement(best, demand, weighing)


def _options(pools: Pools, demand: Demand, weighing: Weighing) -> Iterator[_Option]:
    favoured = weighing.favoured(pools)
    both = weighing.pick([pools.both], weighing.for_both, favoured[Role.BOTH], weighing.may_decode)
    if both is not None:
        yield _Option(both, None, both.rank[1])
    first = weighing.pick([pools.prefill], weighing.for_prefill, favoured[Role.PREFILL], lambda _: False)  # in order
    if first is None:
        return
    if not demand.wants_decode:
        yield _Option(first, None, first.rank[1])
        return
    in_s, byte_s = weighing.ready_in_s(first.entry), weighing.byte_s(first.entry.worker)
    then = weighing.pick(
        [pools.decode, pools.both_as_decode],
        lambda entry: weighing.for_decode(entry, in_s, byte_s),
        [*favoured[Role.DECODE], *favoured[Role.BOTH]],
        lambda entry: weighing.may_decode(entry, in_s),
    )
    if then is not None:
        yield _Option(first, then, first.rank[1] + then.rank[1])
        yield from _local_options([*favoured[Role.DECODE], then.entry], first.entry, weighing)


def _local_options(decoding: Sequence[Entry], prefill: Entry, weighing: Weighing) -> Iterator[_Option]:
    """Decode workers that could prefill this prompt without those who decode there feeling it, or, if it would be late
    from `prefill`, without one of them being late."""
    is_late = weighing.is_late(prefill)
    for entry in decoding:
        if entry.worker.role is not Role.DECODE or not weighing.is_plain(entry.worker):
            continue
        if weighing.holds_up_nobody(entry):
            grounds = Grounds.LOCAL
        elif is_late and weighing.keeps_promises(entry):
            grounds = Grounds.SPILL
        else:
            continue
        alone = Pick(entry, weighing.for_both(entry))
        yield _Option(alone, None, alone.rank[1], grounds)


def _placement(option: _Option, demand: Demand, weighing: Weighing) -> Placement:
    first, then = option.first.entry, None if option.then is None else option.then.entry
    is_kept = then is None and demand.wants_decode
    decode = first if is_kept else then
    num_uncached, ttft_s = weighing.num_uncached(first.worker), weighing.first_token_s(first)
    tpot_s = None if decode is None else weighing.pace(decode).tpot_s(decode.worker.num_active + 1)
    num_held = 0 if then is None else weighing.num_cached(then.worker)
    grounds = _grounds(option, demand, weighing, num_held)
    return Placement(
        prefill=None if is_kept else first.worker,
        decode=None if decode is None else decode.worker,
        reason=_reason(grounds, option, demand.num_prompt_tokens - num_uncached, demand, ttft_s),
        ttft_s=ttft_s,
        tpot_s=tpot_s,
        is_within_limits=not option.is_beyond,
        grounds=grounds,
        num_cached_tokens=demand.num_prompt_tokens - num_uncached,
        num_held_tokens=num_held,
    )


def _grounds(option: _Option, demand: Demand, weighing: Weighing, num_held: int) -> Grounds:
    worker = option.first.entry.worker
    if option.grounds is not None:
        return option.grounds
    if weighing.num_cached(worker) or num_held:
        return Grounds.PREFIX
    if worker.id in demand.session:
        return Grounds.SESSION
    return Grounds.LOAD if weighing.knows_prefill else Grounds.COUNTS


def _reason(grounds: Grounds, option: _Option, num_cached: int, demand: Demand, ttft_s: float | None) -> str:
    name = option.first.entry.worker.id.name
    match grounds:
        case Grounds.LOCAL:
            why = f"{name} decodes and is done sooner if it prefills, too: it holds all but "
            why += f"{demand.num_prompt_tokens - num_cached} of {demand.num_prompt_tokens} tokens"
        case Grounds.SPILL:
            why = f"it would be late on a prefill worker, and {name} keeps to the SLOs if it prefills, too"
        case Grounds.PREFIX if num_cached:
            why = f"{name} holds {num_cached} of {demand.num_prompt_tokens} tokens"
        case Grounds.PREFIX:
            why = f"the decode worker holds a part of {demand.num_prompt_tokens} tokens"
        case Grounds.SESSION:
            why = f"{name} served this session before"
        case Grounds.COUNTS:
            why = f"fewest tokens wait on {name}, and no speed is known yet"
        case Grounds.LOAD:
            why = f"{name} is done first"
    expected = "" if ttft_s is None else f"; first token in {ttft_s:.3f} s"
    return f"{grounds.value}: {why}{expected}{'; all are beyond their limits' if option.is_beyond else ''}"


def place_moved(
    fleet: Fleet,
    demand: Demand,
    source: WorkerId,
    avoid: Collection[WorkerId],
    rng: random.Random,
    policy: PlacementPolicy | None = None,
) -> Candidate | None:
    """Where a sequence that decodes on `source` could go on now; None if nowhere is room for it.

    Workers to `avoid` are taken only if there is no other with room, and those that run as many as they can only if all
    do: it waits there then, which is better than to be lost when the source ends.
    """
    sender = fleet.worker(source)
    pools = None if sender is None else fleet.pools.get(sender.fingerprint)
    if sender is None or pools is None:
        return None
    for avoided, may_wait in ((avoid, False), (avoid, True), ((), False), ((), True)):
        weighing = Weighing(fleet, demand, avoided, rng, policy or PlacementPolicy(), held=(source,))
        pick = _pick_for_move(pools, sender, demand, weighing, may_wait)
        if pick is not None and not pick.rank[0] and not pick.misfit[0]:
            return pick.entry.worker
    return None


def _pick_for_move(pools: Pools, sender: Candidate, demand: Demand, weighing: Weighing, may_wait: bool) -> Pick | None:
    favoured, byte_s = weighing.favoured(pools), weighing.byte_s(sender)
    return weighing.pick(
        [pools.decode, pools.both_as_decode],
        lambda entry: weighing.for_move(entry, byte_s, may_wait),
        [*favoured[Role.DECODE], *favoured[Role.BOTH]],
        lambda entry: entry.worker.num_free_blocks >= demand.num_blocks,
    )


def can_serve(fleet: Fleet) -> bool:
    """Whether any request could be placed."""
    return any(len(pools.both) or (len(pools.prefill) and len(pools.decode)) for pools in fleet.pools.values())


def _why_none(workers: Sequence[Candidate], demand: Demand) -> str:
    can_prefill = any(
        worker.is_ready and Role.PREFILL in worker.role and demand.is_allowed(worker) for worker in workers
    )
    role, does = (Role.DECODE, "decode") if can_prefill else (Role.PREFILL, "prefill")
    return f"no worker can {does}: {_why_not(workers, role, demand)}"


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
