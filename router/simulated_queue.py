"""The prompts of a simulated worker, by the rules of `prefill.scheduler`: shortest remaining first with ageing, blocks
for a whole prompt before its ticket, and a ticket before its first chunk.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from router.first_token import rank_of
from router.simulated_pool import SimulatedPool
from router.simulated_request import Prefilling
from router.traced_request import PREFIX_BLOCK_TOKENS

_LOOKAHEAD_TOKENS = 2048


class SimulatedQueue:
    """`ask_for_ticket` is called for each prompt whose turn is near; the answer comes by `grant` or `refuse`."""

    def __init__(self, pool: SimulatedPool, block_size: int, ask_for_ticket: Callable[[Prefilling], None]) -> None:
        self._pool = pool
        self._block_size = block_size
        self._ask_for_ticket = ask_for_ticket
        self._queue: list[Prefilling] = []
        self._in_step: list[tuple[Prefilling, int]] = []

    def __len__(self) -> int:
        return len(self._queue)

    @property
    def num_queued_tokens(self) -> int:
        return sum(prefilling.num_uncomputed for prefilling in self._queue)

    @property
    def num_waiting(self) -> int:
        return sum(not prefilling.is_started for prefilling in self._queue)

    @property
    def can_run(self) -> bool:
        """Whether a prompt could be computed in the next step."""
        return any(prefilling.may_run for prefilling in self._queue)

    def add(self, prefilling: Prefilling) -> None:
        self._queue.append(prefilling)
        self._take_turns()

    def refuse(self, prefilling: Prefilling) -> None:
        prefilling.was_refused = prefilling.is_backing_off = True
        self._let_go(prefilling)

    def ask_again(self, prefilling: Prefilling) -> None:
        prefilling.is_backing_off = False
        self._take_turns()

    def remove(self, prefilling: Prefilling) -> None:
        """Its blocks are let go; during a step that runs it, after it."""
        if prefilling.is_removed:
            return
        prefilling.is_removed = True
        if prefilling in self._queue:
            self._queue.remove(prefilling)
        if all(prefilling is not running for running, _ in self._in_step):
            self._let_go(prefilling)

    def schedule(self, num_tokens: int) -> list[tuple[Prefilling, int]]:
        """What runs in the next step, and how many tokens of it."""
        self._in_step = []
        if not self._queue:
            return self._in_step
        self._take_turns()
        for prefilling in self._queue:
            if num_tokens == 0:
                break
            if prefilling.may_run:
                prefilling.is_started = True
                count = min(num_tokens, prefilling.num_uncomputed)
                num_tokens -= count
                self._in_step.append((prefilling, count))
        return self._in_step

    def complete(self) -> list[tuple[Prefilling, int]]:
        """What ran, and is still wanted; prompts that are computed have left the queue, with their blocks."""
        ran, self._in_step = self._in_step, []
        wanted = []
        for prefilling, count in ran:
            if prefilling.is_removed:
                self._let_go(prefilling)
                continue
            prefilling.num_computed += count
            assert prefilling.held is not None
            groups = prefilling.attempt.groups[: prefilling.num_computed // PREFIX_BLOCK_TOKENS]
            self._pool.publish(prefilling.held, groups)
            if prefilling.num_uncomputed == 0:
                self._queue.remove(prefilling)
            wanted.append((prefilling, count))
        return wanted

    def _take_turns(self) -> None:
        """Each decode worker has a line of its own, and in a line nobody asks behind one that was refused."""
        self._queue.sort(key=_rank)  # in hardly another order than before
        tokens_ahead: dict[object, float] = {}
        for prefilling in self._queue:
            line = prefilling.attempt.decode
            num_ahead = tokens_ahead.get(line, 0.0)
            if num_ahead > _LOOKAHEAD_TOKENS:
                continue
            if prefilling.held is None and not prefilling.is_backing_off:
                if not self._hold_blocks(prefilling):
                    return
                if line is not None:
                    self._ask_for_ticket(prefilling)
            is_refused = prefilling.was_refused and not prefilling.is_granted
            tokens_ahead[line] = math.inf if is_refused else num_ahead + prefilling.num_uncomputed

    def _hold_blocks(self, prefilling: Prefilling) -> bool:
        attempt, pool = prefilling.attempt, self._pool
        groups = attempt.groups[: (attempt.num_tokens - 1) // PREFIX_BLOCK_TOKENS]  # the last token has to be computed
        found = groups[: pool.num_found(groups)]
        num_blocks = -(-attempt.num_tokens // self._block_size)
        num_wanted = num_blocks - pool.group_blocks * len(found)
        if num_wanted + pool.num_idle_blocks(found) > pool.num_free:
            pool.looked_up(found)
            return False
        prefilling.held = pool.hold(found, num_blocks)
        prefilling.num_computed = prefilling.num_cached = len(found) * PREFIX_BLOCK_TOKENS
        return True

    def _let_go(self, prefilling: Prefilling) -> None:
        if prefilling.held is not None:
            self._pool.give_back(prefilling.held, prefilling.num_computed // self._block_size)
            prefilling.held = None
            prefilling.num_computed = prefilling.num_cached = 0


def _rank(prefilling: Prefilling) -> float:
    """All grow older together, so that the moment does not matter."""
    return rank_of(prefilling.num_uncomputed, prefilling.added_at)
