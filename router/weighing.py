"""What speaks for one worker and against another, for one request: the order in which placement prefers them. Pure."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from typing import TypeAlias

from router.candidate import Candidate, Role, WorkerId
from router.config import PlacementPolicy
from router.demand import Demand
from router.first_token import Prompt, first_token_s
from router.fleet import Entry, Fleet, Lines, Pools
from router.prediction import EXPECTED_OUTPUT_TOKENS, Pace, num_active_at, num_free_blocks_at, stepped, tpot_of
from router.spill import Spill, is_late

_STEP_TOKENS = 1024  # that a decode worker computes in a step, where it does not say
_MATCHED_AT_MOST = 12  # workers with the longest prefixes are looked at, beside the least loaded ones

Rank: TypeAlias = tuple[bool, float, float, float, float]
"""The lower the better: beyond its limits; cost; and among equals what it holds, what is free there, and chance."""


@dataclass(frozen=True, slots=True)
class Pick:
    entry: Entry
    rank: Rank
    misfit: tuple[bool, bool] = (False, False)  # its cache is too small; it is to be avoided

    @property
    def is_beyond(self) -> bool:
        """Its limits. One that is too small is asked all the same: it says what is wrong."""
        return self.rank[0] and not self.misfit[0]


class Weighing:
    """Costs are seconds, or while nobody knows how fast anybody prefills, tokens to prefill."""

    def __init__(
        self,
        fleet: Fleet,
        demand: Demand,
        avoid: Collection[WorkerId],
        rng: random.Random,
        policy: PlacementPolicy,
        held: Collection[WorkerId] = (),
    ) -> None:
        self._demand = demand
        self._num_prompt_tokens = demand.num_prompt_tokens
        self._avoid = avoid
        self._held = held
        self._rng = rng
        self._policy = policy
        self._now = fleet.now
        self._typical = fleet.typical
        longest = demand.prefix.longest(rng, _MATCHED_AT_MOST)
        self._longest = [worker for worker, _ in longest]
        self._cached = {worker.name: num_blocks * demand.block_size for worker, num_blocks in longest}
        self.knows_prefill = self._typical.token_s is not None
        self.knows_decode = self._typical.sequence_s is not None

    def pick(
        self,
        lines: Iterable[Lines],
        rank: Callable[[Entry], Rank],
        others: Iterable[Entry],
        may_have_room: Callable[[Entry], bool],
    ) -> Pick | None:
        """The best at the heads of the lines and of the `others`, who may have a reason to come before these.

        Behind a head that is beyond its limits only those are looked at that `may_have_room`, at a glance.

        Workers to avoid, or whose cache is too small, are taken only if there is no other.
        """
        lines = [each for each in lines if len(each)]
        best: Pick | None = None
        for entry, entry_rank in self._found(lines, rank, others, may_have_room):
            if best is None or entry_rank < best.rank:
                best = Pick(entry, entry_rank)
        if best is not None:
            return best
        everyone = [entry for each in lines for walk in each.walks(self._rng) for entry in walk]
        allowed = [entry for entry in everyone if self._may_take(entry.worker)]
        picks = [Pick(entry, rank(entry), self._misfit(entry.worker)) for entry in allowed]
        return min(picks, key=lambda pick: (pick.misfit, pick.rank), default=None)

    def _found(
        self,
        lines: Iterable[Lines],
        rank: Callable[[Entry], Rank],
        others: Iterable[Entry],
        may_have_room: Callable[[Entry], bool],
    ) -> Iterator[tuple[Entry, Rank]]:
        """Of a line the first, and if that is beyond its limits the first that is not: nobody behind costs less."""
        for each in lines:
            for walk in each.walks(self._rng):
                is_first = True
                for entry in walk:
                    if (is_first or may_have_room(entry)) and self.is_plain(entry.worker):
                        entry_rank = rank(entry)
                        if is_first or not entry_rank[0]:
                            yield entry, entry_rank
                        if not entry_rank[0]:
                            break
                        is_first = False
        for entry in others:
            if self.is_plain(entry.worker):
                yield entry, rank(entry)

    def may_decode(self, entry: Entry, in_s: float | None = None) -> bool:
        """`in_s`: as below; None where it prefills itself."""
        worker = entry.worker
        if worker.num_free_blocks < min(self._demand.num_blocks_together, worker.num_blocks) and not worker.releases:
            return False
        return not self._has_too_many(worker, self._queue_s(entry) if in_s is None else in_s)

    def is_plain(self, worker: Candidate) -> bool:
        return self._may_take(worker) and self._misfit(worker) == (False, False)

    def _may_take(self, worker: Candidate) -> bool:
        return self._demand.is_allowed(worker) and worker.id not in self._held

    def _misfit(self, worker: Candidate) -> tuple[bool, bool]:
        return not self._demand.fits(worker), bool(self._avoid) and worker.id in self._avoid

    def favoured(self, pools: Pools) -> dict[Role, list[Entry]]:
        """Those that hold most of the prompt, or served its session."""
        found: dict[Role, list[Entry]] = {Role.PREFILL: [], Role.DECODE: [], Role.BOTH: []}
        for worker in (*self._longest, *self._demand.session):
            entry = pools.entries.get(worker.name)
            if entry is not None and entry.worker.id == worker:
                found[entry.worker.role].append(entry)
        return found

    def num_cached(self, worker: Candidate) -> int:
        num_cached = self._cached.get(worker.id.name)
        if num_cached is None:
            num_cached = self._cached[worker.id.name] = self._demand.num_cached(worker)
        return num_cached

    def num_uncached(self, worker: Candidate) -> int:
        return self._num_prompt_tokens - self.num_cached(worker)

    def pace(self, entry: Entry) -> Pace:
        """As measured; what is typical where it has not measured itself."""
        return Pace(entry.aged.token_s or self._typical.token_s, entry.aged.sequence_s or self._typical.sequence_s)

    def byte_s(self, sender: Candidate) -> float:
        """To hand over a byte from there."""
        typical = Pace(None, None, self._typical.byte_s or 1.0 / self._policy.transfer_bytes_per_s)
        return Pace.of(sender).aged(sender, typical).byte_s or typical.byte_s or 0.0

    def for_prefill(self, entry: Entry) -> Rank:
        worker = entry.worker
        cost = self._token_s(entry) * (worker.num_queued_tokens + self.num_uncached(worker)) + self._held_up_s(entry)
        if worker.id in self._demand.session:
            cost -= self._policy.affinity_s if self.knows_prefill else self._num_prompt_tokens
        return self._prefill_is_beyond(entry), cost, 0.0, 0.0, self._rng.random()

    def for_decode(self, entry: Entry, in_s: float, byte_s: float) -> Rank:
        """`in_s`: when the prompt will have been computed elsewhere, and its KV be here. `byte_s`: to send it here."""
        worker = entry.worker
        cost = self._decode_cost(entry)
        if self.knows_prefill:
            cost += self._sent_bytes(worker) * byte_s
        if worker.id in self._demand.session:
            cost -= self._policy.affinity_s if self.knows_decode else self._unmeasured_sequence(entry)
        held, free = self.num_cached(worker), worker.num_free_blocks
        return self._decode_is_beyond(entry, in_s), cost, -held, -free, self._rng.random()

    def for_move(self, entry: Entry, byte_s: float, may_wait: bool) -> Rank:
        """Of a sequence that runs elsewhere and has to leave: it needs its blocks at once."""
        worker = entry.worker
        is_beyond = worker.num_free_blocks < self._demand.num_blocks
        is_beyond = is_beyond or (not may_wait and self._has_too_many(worker, 0.0))
        return is_beyond, *self.for_decode(entry, 0.0, byte_s)[1:]

    def for_both(self, entry: Entry) -> Rank:
        is_beyond, cost, _, _, chance = self.for_prefill(entry)
        is_beyond = is_beyond or self._decode_is_beyond(entry, self._queue_s(entry))
        held, free = self.num_cached(entry.worker), entry.worker.num_free_blocks
        return is_beyond, cost + self._decode_cost(entry), -held, -free, chance

    def _sent_bytes(self, worker: Candidate) -> float:
        """What the decode worker does not hold. Sending hides behind computing, and yet takes its share of both."""
        return self.num_uncached(worker) * self._demand.token_bytes

    def _held_up_s(self, sender: Entry) -> float:
        """By how much a link that is far slower than others holds up the hand-over: it does not hide any more."""
        if not sender.speed.link or not self._demand.wants_decode or not self.knows_prefill:
            return 0.0
        typical_s = (self._typical.byte_s or 0.0) * self._num_prompt_tokens * self._demand.token_bytes
        hidden_s = max(typical_s, self._token_s(sender) * self.num_uncached(sender.worker))
        return max(0.0, (stepped(typical_s, sender.speed.link) or 0.0) - hidden_s)

    def first_token_s(self, entry: Entry) -> float | None:
        """From now on; None where nothing is known. Where a worker decodes, too, its mean pace knows that best."""
        worker, num_uncached = entry.worker, self.num_uncached(entry.worker)
        paced_s = self.pace(entry).prefill_s(worker.num_queued_tokens + num_uncached)
        if worker.role is not Role.PREFILL:
            return paced_s
        prompt = Prompt(self._num_prompt_tokens, self._num_prompt_tokens - num_uncached)
        return first_token_s(worker, prompt, self._now, paced_s)

    def ready_in_s(self, prefill: Entry) -> float:
        """Until the prompt has been computed there; now, where that is not known."""
        num_tokens = prefill.worker.num_queued_tokens + self.num_uncached(prefill.worker)
        return self._token_s(prefill) * num_tokens if self.knows_prefill else 0.0

    def _queue_s(self, entry: Entry) -> float:
        return self._token_s(entry) * entry.worker.num_queued_tokens if self.knows_prefill else 0.0

    def holds_up_nobody(self, entry: Entry) -> bool:
        """Whether a decode worker's sequences would hardly feel it if it prefilled this prompt, too."""
        most_s = self._policy.max_added_step_s
        knows = self.knows_prefill and self.knows_decode
        return most_s > 0 and knows and self._token_s(entry) * self.num_uncached(entry.worker) <= most_s

    def is_late(self, prefill: Entry) -> bool:
        """Whether its first token might come later from there than promised."""
        if self._policy.slo is None or not (self.knows_prefill and self.knows_decode):
            return False
        ttft_s = self.first_token_s(prefill)
        return ttft_s is not None and is_late(self._policy.slo, ttft_s)

    def keeps_promises(self, entry: Entry) -> bool:
        """Whether a decode worker that prefills this prompt, too, is in time with it and with all others."""
        worker, slo, num_uncached = entry.worker, self._policy.slo, self.num_uncached(entry.worker)
        tpot_s = self.pace(entry).tpot_s(worker.num_active + 1)
        if slo is None or tpot_s is None:
            return False
        num_tokens, token_s = worker.num_queued_tokens + num_uncached, self._token_s(entry)
        most = _STEP_TOKENS if worker.prefill_times is None else worker.prefill_times.max_step_tokens
        ttft_s = token_s * num_tokens + tpot_s * (1 + math.ceil(num_tokens / most))  # steps make tokens for others, too
        num_spilled = worker.spilled.num_tokens_at(self._now) + worker.num_spilled_elsewhere
        prompt_s, prompts_s = token_s * num_uncached, token_s * (num_spilled + num_uncached)
        return Spill(ttft_s, tpot_s, prompt_s, prompts_s, worker.num_active, worker.stay_s).keeps(slo)

    def _token_s(self, entry: Entry) -> float:
        return stepped(self._typical.token_s, entry.speed.token) or 1.0

    def _decode_cost(self, entry: Entry) -> float:
        num_active = entry.worker.num_active
        sequence_s = stepped(self._typical.sequence_s, entry.speed.sequence)
        if sequence_s is None:
            return self._unmeasured_sequence(entry) * num_active
        return EXPECTED_OUTPUT_TOKENS * tpot_of(sequence_s, num_active + 1)

    def _unmeasured_sequence(self, entry: Entry) -> float:
        """While nobody knows what a step takes, a sequence that runs is as much work as a prompt of so many tokens."""
        return self._token_s(entry) * EXPECTED_OUTPUT_TOKENS

    def _prefill_is_beyond(self, entry: Entry) -> bool:
        limits, num_queued = self._policy.limits, entry.worker.num_queued_tokens
        if not self.knows_prefill:
            return num_queued > limits.max_backlog_tokens
        return self._token_s(entry) * num_queued > limits.max_backlog_s

    def _decode_is_beyond(self, entry: Entry, in_s: float) -> bool:
        worker = entry.worker
        if self._has_too_many(worker, in_s):
            return True
        free: float = worker.num_free_blocks
        if in_s > 0.0:
            sequence_s = entry.aged.sequence_s or self._typical.sequence_s
            free = num_free_blocks_at(worker, self._now, in_s, sequence_s, self._demand.block_size)
        # what fits at all has room when all is free
        return free < min(self._demand.num_blocks_together, worker.num_blocks)

    def _has_too_many(self, worker: Candidate, in_s: float) -> bool:
        """Whether the sequences that it will run then and those that would come leave none waiting. An idle worker
        takes any number."""
        most = self._policy.limits.max_sequences or worker.max_running
        if not most:
            return False
        num_beside = most - min(self._demand.num_answers, most)
        return worker.num_active > num_beside and num_active_at(worker, self._now, in_s, most) >= num_beside + 1
