"""The sequences of a simulated worker that decode, by the rules of `decode.scheduler`, many steps at a time.

A *round* gives each sequence one token. While nobody comes or goes, times and blocks of the next rounds are sums that
have a formula, so that a thousand rounds cost as much as one. A sequence holds blocks for all its tokens but the last,
and in a round for that one too.
"""

from __future__ import annotations

import heapq
import math
from bisect import bisect_right
from collections import deque
from itertools import count

from router.simulated_pool import SimulatedPool
from router.simulated_request import Decoding
from router.step_costs import StepCosts
from router.traced_request import PREFIX_BLOCK_TOKENS

_MOST_GAPS = 256


class SimulatedBatch:
    """`round`: how many have ended. Rounds of one run take a little longer each, as the context grows."""

    def __init__(self, pool: SimulatedPool, costs: StepCosts, block_size: int, max_running: int) -> None:
        self._pool = pool
        self._costs = costs
        self._block_size = block_size
        self._max_running = max_running
        self.round = 0
        self.num_decoding = 0  # of those that run, the others' KV is computed here
        self.waiting: deque[Decoding] = deque()  # preempted ones first
        self.running: dict[Decoding, None] = {}  # oldest first, those among them whose KV is computed here
        self.computing: list[Decoding] = []
        self.halted: dict[Decoding, None] = {}
        self._returning: list[Decoding] = []  # of these, into the next step
        self.fresh: list[Decoding] = []  # that have not had a round yet
        self._sum_of_bases = 0
        self._in_block = [0] * block_size  # sequences by where in a block they would be at round 0
        self._blocks_at_0 = 0
        self._num_held = 0  # blocks of those that decode
        self._stops: list[tuple[int, int, Decoding]] = []
        self._numbers = count()
        self._gaps: list[tuple[int, float]] = []  # by rounds, the longest between tokens in them; each less than before

    @property
    def num_running(self) -> int:
        return len(self.running) + len(self.halted)

    @property
    def num_context_tokens(self) -> int:
        return self._sum_of_bases + self.num_decoding * self.round

    @property
    def num_queued_tokens(self) -> int:
        """To be computed here, beside the one that each round computes."""
        return sum(each.num_uncomputed - 1 for each in (*self.waiting, *self.computing))

    @property
    def num_wanted_blocks(self) -> int:
        """That sequences here are about to need."""
        waiting = sum(-(-(each.num_tokens + 1) // self._block_size) for each in self.waiting if each.held is None)
        return waiting + self.num_running

    def admit(self) -> None:
        """Moves waiting sequences into the batch, in order; one without KV first takes blocks for all its tokens."""
        for decoding in self._returning:
            if decoding in self.halted:
                del self.halted[decoding]
                self.running[decoding] = None
                self._join(decoding)
        self._returning.clear()
        if not self.waiting:
            return
        blocks_ran_short = False
        left: deque[Decoding] = deque()
        while self.waiting and self.num_running < self._max_running:
            decoding = self.waiting.popleft()
            if decoding.held is None:
                blocks_ran_short = blocks_ran_short or not self._take_blocks(decoding)
            if decoding.held is None:
                left.append(decoding)
            else:
                self.running[decoding] = None
                if decoding.is_computing:
                    self.computing.append(decoding)
                else:
                    self._join(decoding)
        self.waiting.extendleft(reversed(left))

    def begin_round(self) -> list[Decoding]:
        """Makes room for each sequence's next token. Returns who was preempted for that: the newest."""
        if self.held_in(1) - self._num_held <= self._pool.num_free:
            self.hold_in(1)
            return []
        preempted: list[Decoding] = []
        num_free = self._pool.num_free
        for decoding in [each for each in self.running if not each.is_computing]:
            while decoding in self.running and (self.num_tokens(decoding) - 1) % self._block_size == 0:
                if num_free > 0:
                    num_free -= 1
                    break
                victim = next((each for each in reversed(self.waiting) if each.held is not None), None)
                victim = victim or next(reversed(self.running))
                num_before = self._pool.num_free
                self._preempt(victim)
                preempted.append(victim)
                num_free += self._pool.num_free - num_before
        self.hold_in(1)
        return preempted

    def num_rounds(self) -> int:
        """That can go on like this: until a sequence stops, or blocks run out. The first one has its blocks."""
        while self._stops[0][2] not in self.running or self._stops[0][2].stop_round != self._stops[0][0]:
            heapq.heappop(self._stops)
        return self.num_fitting(self._stops[0][0] - self.round)

    def num_fitting(self, most: int) -> int:
        """So many rounds, `most` at most, for which there are blocks."""
        num_to_have = self._num_held + self._pool.num_free
        if self.held_in(most) <= num_to_have:
            return most
        least = 1
        while most - least > 1:
            middle = (least + most) // 2
            least, most = (middle, most) if self.held_in(middle) <= num_to_have else (least, middle)
        return least

    def held_in(self, num_rounds: int) -> int:
        """Blocks of those that decode, while the last of so many rounds goes on."""
        whole, part = divmod(self.round + num_rounds - 1, self._block_size)
        beyond = sum(self._in_block[self._block_size - part :]) if part else 0
        return self._blocks_at_0 + self.num_decoding * whole + beyond

    def hold_in(self, num_rounds: int) -> None:
        """Takes what `held_in` says."""
        num_held = self.held_in(num_rounds)
        self._pool.take(num_held - self._num_held)
        self._num_held = num_held

    def rounds_s(self, num_rounds: int) -> float:
        """What so many rounds take, one after another."""
        first_s, more_s = self._pace()
        return num_rounds * first_s + more_s * num_rounds * (num_rounds - 1) / 2

    def rounds_within(self, elapsed_s: float, most: int) -> int:
        """How many are over after so long."""
        first_s, more_s = self._pace()
        if first_s <= 0:
            return most
        linear = first_s - more_s / 2
        root = 2 * elapsed_s / (linear + math.sqrt(linear * linear + 2 * more_s * elapsed_s))
        number = min(int(root), most)
        while number < most and self.rounds_s(number + 1) <= elapsed_s:
            number += 1
        while number > 0 and self.rounds_s(number) > elapsed_s:
            number -= 1
        return number

    def advance(self, num_rounds: int, gap_s: float) -> list[Decoding]:
        """So many rounds are over, the longest of them took so long. Returns who has stopped, without its blocks if
        that was its last token."""
        self.hold_in(num_rounds)
        self.round += num_rounds
        self.fresh.clear()
        while self._gaps and self._gaps[-1][1] <= gap_s:
            self._gaps.pop()
        self._gaps.append((self.round, gap_s))
        stopped: dict[Decoding, None] = {}  # one that came back with as many tokens to go is noted twice
        while self._stops and self._stops[0][0] <= self.round:
            stop_round, _, decoding = heapq.heappop(self._stops)
            if decoding in self.running and decoding.stop_round == stop_round:
                stopped[decoding] = None
        for decoding in stopped:
            self._part(decoding)
            self._note_gap(decoding)
            del self.running[decoding]
            if decoding.num_tokens < decoding.num_tokens_at_end:
                self.halted[decoding] = None
            else:
                self.let_go(decoding)
        if len(self._gaps) > _MOST_GAPS:
            oldest = min((each.joined_round for each in self.running if not each.is_computing), default=self.round)
            del self._gaps[: bisect_right(self._gaps, (oldest, math.inf))]
        return list(stopped)

    def computed(self, decoding: Decoding, num_tokens: int) -> None:
        """Tokens whose KV was computed here; with the last of them comes the next token."""
        decoding.num_uncomputed -= num_tokens
        assert decoding.held is not None
        num_groups = (decoding.num_tokens - decoding.num_uncomputed) // PREFIX_BLOCK_TOKENS
        self._pool.publish(decoding.held, decoding.attempt.groups[:num_groups])
        if decoding.num_uncomputed == 0:
            self.computing.remove(decoding)
            decoding.num_uncomputed, decoding.is_computing = 1, False
            decoding.num_tokens += 1
            if decoding.num_tokens < decoding.num_tokens_at_end:
                self._join(decoding)
            else:
                del self.running[decoding]
                self.let_go(decoding)

    def halt(self, decoding: Decoding, num_tokens: int) -> None:
        """Has it stop once it has so many."""
        decoding.stop_round = num_tokens - decoding.base
        heapq.heappush(self._stops, (decoding.stop_round, next(self._numbers), decoding))

    def go_on(self, decoding: Decoding) -> None:
        """Takes `halt` back, once it has stopped. What is being computed goes on without it: it is in the next step."""
        self._returning.append(decoding)

    def num_tokens(self, decoding: Decoding) -> int:
        """Of one that decodes."""
        return decoding.base + self.round

    def longest_gap_s(self, decoding: Decoding) -> float:
        """Between tokens of a sequence, since it joined."""
        index = bisect_right(self._gaps, (decoding.joined_round, math.inf))
        return self._gaps[index][1] if index < len(self._gaps) else 0.0

    def let_go(self, decoding: Decoding, *, comes_back: bool = False) -> None:
        self.halted.pop(decoding, None)
        if decoding.held is not None:
            num_computed = decoding.num_tokens - decoding.num_uncomputed
            owner = decoding if comes_back else None
            self._pool.give_back(decoding.held, num_computed // self._block_size, owner)
            decoding.held = None

    def _pace(self) -> tuple[float, float]:
        """Of the next round, and what each one takes longer than the one before it."""
        costs, number = self._costs, self.num_decoding
        first_s = costs.decode_s(number, self.num_context_tokens)
        return first_s / costs.tokens_per_step, number * costs.decode_context_token_s / costs.tokens_per_step

    def _note_gap(self, decoding: Decoding) -> None:
        request = decoding.attempt.request
        request.worst_gap_s = max(request.worst_gap_s, self.longest_gap_s(decoding))

    def _take_blocks(self, decoding: Decoding) -> bool:
        pool, groups = self._pool, decoding.attempt.groups
        groups = groups[: (decoding.num_tokens - 1) // PREFIX_BLOCK_TOKENS]
        found = groups[: pool.num_found(groups)]
        num_own = pool.num_left(decoding) if len(found) == len(groups) else 0
        num_cached = len(found) * PREFIX_BLOCK_TOKENS + num_own * self._block_size
        num_blocks = -(-decoding.num_tokens // self._block_size)
        num_wanted = num_blocks - pool.group_blocks * len(found)
        if num_wanted + len(self.running) + pool.num_idle_blocks(found) > pool.num_free:
            pool.looked_up(found, decoding)
            return False
        decoding.held = pool.hold(found, num_blocks, decoding)
        decoding.num_uncomputed, decoding.is_computing = decoding.num_tokens - num_cached, True
        if decoding.attempt.request.num_preemptions == 0:
            decoding.attempt.request.num_cached_tokens = num_cached
        return True

    def _join(self, decoding: Decoding) -> None:
        """It decodes from now on. Its blocks are counted with those of the others."""
        assert decoding.held is not None
        decoding.base, decoding.joined_round = decoding.num_tokens - self.round, self.round
        decoding.stop_round = decoding.num_tokens_at_end - decoding.base
        heapq.heappush(self._stops, (decoding.stop_round, next(self._numbers), decoding))
        self._count(decoding, 1)
        self._num_held += decoding.held.num_blocks
        self.fresh.append(decoding)

    def _part(self, decoding: Decoding) -> None:
        """It decodes no longer; its blocks are its own again."""
        assert decoding.held is not None
        decoding.num_tokens = self.num_tokens(decoding)
        decoding.held.num_blocks = -(-(decoding.num_tokens - 1) // self._block_size)
        self._num_held -= decoding.held.num_blocks
        self._count(decoding, -1)

    def _count(self, decoding: Decoding, sign: int) -> None:
        self.num_decoding += sign
        self._sum_of_bases += sign * decoding.base
        whole, part = divmod(decoding.base + self._block_size - 1, self._block_size)
        self._blocks_at_0 += sign * whole
        self._in_block[part] += sign

    def _preempt(self, decoding: Decoding) -> None:
        """It keeps its tokens, and is computed again when there is room."""
        if decoding in self.running and not decoding.is_computing:
            self._part(decoding)
            self._note_gap(decoding)
            decoding.stop_round = -1  # a stop that is noted says nothing of it any more
            if decoding in self.fresh:
                self.fresh.remove(decoding)
        else:
            decoding.joined_round = self.round  # it has no token of the last one
        if decoding.is_computing:
            self.computing.remove(decoding)
        if decoding in self.running:
            del self.running[decoding]
            self.waiting.appendleft(decoding)
        decoding.attempt.request.num_preemptions += 1
        self.let_go(decoding, comes_back=True)
        decoding.num_uncomputed, decoding.is_computing = decoding.num_tokens, False
