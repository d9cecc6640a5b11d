"""The gate that every new request passes: it goes at once if there is room for it and nobody is before it, waits in
order if that will be soon, and is refused otherwise, before anything was done for it.

What was admitted and has to go elsewhere (retries, resumes, moves) does not come here again. Event loop only.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Collection
from itertools import islice, takewhile

from protos.errors import DeadlineExceeded, NoWorker, Overloaded
from router import metrics
from router.candidate import WorkerId
from router.config import AdmissionPolicy
from router.drain_rate import DrainRate
from router.fair_queue import FairQueue, QueueLimits
from router.refusals import Refusals
from router.turns import Admitted, Ask, Ending, Timer, Timers, Turn

_LOOK_S = 0.25  # between looks while something waits: what changes without an event is a worker that falls silent
_LOOK_PAST = 8  # so many that do not fit: each look costs as many placements
_MAX_PASSED = 8  # after so many went first, the workers it would go to are held for it
_SURPRISE = 2.0  # times max_queue_s: one that was let in is kept for so long if it takes longer than predicted
_ANSWER_TOKENS = 256.0  # before any answer was seen
_ANSWER_SHARE = 0.05  # of each answer in the mean
_ROUNDING_S = 1e-3


class Gate:
    """`admit` new requests; call `look_soon` when load has ended, `workers_changed` when workers came or went."""

    def __init__(
        self,
        policy: AdmissionPolicy,
        wait_for_worker_s: float,
        rng: random.Random | None = None,
        clock: Callable[[], float] = time.monotonic,
        timers: Callable[[], Timers] = asyncio.get_running_loop,
    ) -> None:
        self._policy = policy
        self._wait_for_worker_s = wait_for_worker_s
        self._refusals = Refusals(rng or random.Random())
        self._clock = clock
        self._timers = timers
        self._queue: FairQueue[Turn] = FairQueue(QueueLimits(policy.max_queued, policy.max_queued_tokens))
        self._stranded: dict[Turn, NoWorker] = {}  # no worker fits
        self._drain = DrainRate()
        self._answer_tokens = _ANSWER_TOKENS
        self._holder: Turn | None = None
        self._held: frozenset[WorkerId] = frozenset()
        self._soon: Timer | None = None
        self._later: Timer | None = None

    @property
    def num_waiting(self) -> int:
        return len(self._queue) + len(self._stranded)

    def counts(self) -> list[tuple[int, int]]:
        return self._queue.counts()

    def refuse_if_full(self, tenant: str, priority: int) -> None:
        """Before even the prompt is tokenized. Raises Overloaded."""
        self._refuse_if_full(tenant, priority, 0)

    async def admit(self, ask: Ask) -> Admitted:
        """Raises Overloaded, DeadlineExceeded, NoWorker: nothing was done for it. Cancelled, it has left the queue."""
        ended: asyncio.Future[Admitted] = asyncio.get_running_loop().create_future()
        turn = self.turn(ask, ended)
        try:
            self.enter(turn)
            if not ended.done():
                await asyncio.wait([ended], timeout=self.patience_s(turn))
        except BaseException:
            self._leave(turn)
            raise
        if not ended.done():
            raise self.give_up(turn)
        return ended.result()

    def turn(self, ask: Ask, ended: Ending) -> Turn:
        """What `enter` takes, of a request that comes now."""
        return Turn(
            tenant=ask.tenant,
            priority=ask.priority,
            num_tokens=ask.num_prompt_tokens + ask.num_answers * round(min(ask.max_tokens, self._answer_tokens)),
            entered_at=self._clock(),
            deadline_at=ask.deadline_at,
            ask=ask,
            ended=ended,
        )

    def give_up(self, turn: Turn) -> Overloaded | DeadlineExceeded:
        """One that has waited as long as it may leaves; returns what it is told."""
        self._leave(turn)
        return self._out_of_time(turn)

    def answered(self, admitted: Admitted, num_prompt_tokens: int, *num_output_tokens: int) -> None:
        """What it took in the end, each answer by itself, for the shares of tenants and the guess at the next one."""
        self._queue.correct(admitted.charge, num_prompt_tokens + sum(num_output_tokens))
        for num_tokens in filter(None, num_output_tokens):
            self._answer_tokens += _ANSWER_SHARE * (num_tokens - self._answer_tokens)

    def look_soon(self) -> None:
        if self._queue and self._soon is None:
            self._soon = self._timers().call_soon(self._look)

    def workers_changed(self) -> None:
        now, stranded = self._clock(), list(self._stranded)
        self._stranded.clear()
        for turn in stranded:
            self._queue.push(turn, now)
        self.look_soon()

    def close(self) -> None:
        for handle in (self._soon, self._later):
            if handle is not None:
                handle.cancel()

    def enter(self, turn: Turn) -> None:
        """Lets it go at once, has it wait, or raises what refuses it. Who waits is to `give_up` after `patience_s`."""
        now = turn.entered_at
        if turn.deadline_at is not None and turn.deadline_at <= now:
            raise DeadlineExceeded("the deadline passed before the request could be placed")
        self._refuse_if_full(turn.tenant, turn.priority, turn.num_tokens)
        self._queue.push(turn, now)
        if self._soon is not None:  # room has come, and those before it are asked first
            self._look()
        else:
            self._try_newcomer(turn, now)
        if turn in self._queue:
            if (refusal := self._hopeless(turn, now)) is not None:
                self._queue.remove(turn)
                raise refusal
            self._drain.observe(now, is_waiting=True)
        self._plan_look()

    def _try_newcomer(self, turn: Turn, now: float) -> None:
        """Those before it were found not to fit, and nothing has changed since."""
        before = list(islice(takewhile(lambda other: other is not turn, self._queue.in_order(now)), _LOOK_PAST))
        turn.ttft_s = max((other.ttft_s for other in before), default=0.0)
        if len(before) < _LOOK_PAST and turn.as_small(before) is None:
            self._try(turn, before, now)

    def _look(self) -> None:
        """Lets go whoever can, in order."""
        if self._soon is not None:
            self._soon.cancel()
            self._soon = None
        now = self._clock()
        misfits: set[Turn] = set()
        if self._holder is not None and not self._try(self._holder, (), now):
            misfits.add(self._holder)
        while self._let_one_go(misfits, now):
            pass
        self._drain.observe(now, is_waiting=bool(self._queue))
        self._plan_look()

    def _let_one_go(self, misfits: set[Turn], now: float) -> bool:
        """The first that can. Those that cannot are among the misfits then, which are not tried again."""
        before: list[Turn] = []
        for turn in self._queue.in_order(now):
            if len(misfits) >= _LOOK_PAST:
                return False
            if turn not in misfits:
                is_hopeless = turn.num_passed < _MAX_PASSED and turn.as_small(misfits) is not None
                if not is_hopeless and self._try(turn, before, now):
                    return True
                misfits.add(turn)
            before.append(turn)
        return False

    def _try(self, turn: Turn, before: Collection[Turn], now: float) -> bool:
        """Whether it has left the queue: placed, stranded or failed. Those `before` it did not fit."""
        held = frozenset() if turn is self._holder else self._held
        try:
            has_left = self._place(turn, held, now)
        except NoWorker as error:
            if held:
                return False
            self._strand(turn, error, now)
            return True
        except Exception as error:  # refused, or a defect, which must not end the looking
            self._fail(turn, error)
            return True
        if has_left:
            for other in before:
                other.num_passed += 1
        return has_left

    def _place(self, turn: Turn, held: Collection[WorkerId], now: float) -> bool:
        """Whether there was room. Raises NoWorker, Overloaded; it is in the queue still then."""
        placement = turn.ask.find(held)
        turn.no_worker_at, turn.ttft_s = None, placement.ttft_s or 0.0
        if not placement.is_within_limits:
            if turn is self._holder or (self._holder is None and turn.num_passed >= _MAX_PASSED):
                self._holder, self._held = turn, frozenset(worker.id for worker in placement.workers)
            return False
        if turn.deadline_at is not None and now + turn.ttft_s > turn.deadline_at:
            raise self._refusals.cannot_meet(turn.deadline_at - now, 0.0, turn.ttft_s)
        dispatches, wait_s = turn.ask.dispatch(placement), now - turn.entered_at
        charge = self._queue.serve(turn)
        self._release(turn)
        self._drain.observe(now, is_waiting=bool(self._queue), num_tokens=turn.num_tokens)
        metrics.WAIT_SECONDS.observe(wait_s)
        turn.ended.set_result(Admitted(placement, dispatches, wait_s, charge))
        return True

    def _strand(self, turn: Turn, error: NoWorker, now: float) -> None:
        """It waits apart, for a worker to come (back)."""
        if turn.no_worker_at is None:
            turn.no_worker_at = now
        if now - turn.no_worker_at >= self._wait_for_worker_s:
            self._fail(turn, error)
            return
        self._queue.remove(turn)
        self._release(turn)
        self._stranded[turn] = error

    def _fail(self, turn: Turn, error: Exception) -> None:
        self._queue.remove(turn)
        self._release(turn)
        turn.ended.set_exception(error)

    def _release(self, turn: Turn) -> None:
        if turn is self._holder:
            self._holder, self._held = None, frozenset()

    def _leave(self, turn: Turn) -> None:
        """Nobody waits for it any more, wherever it is."""
        if turn in self._queue:
            self._queue.remove(turn)
            self._release(turn)
            self._drain.observe(self._clock(), is_waiting=bool(self._queue))
            self.look_soon()  # it may have held workers, or been one of those that are looked past
        elif self._stranded.pop(turn, None) is None and turn.ended.done() and turn.ended.exception() is None:
            admitted = turn.ended.result()
            for dispatch in admitted.dispatches:
                dispatch.end()
            self._queue.correct(admitted.charge, 0)

    def _plan_look(self) -> None:
        if self._later is None and self.num_waiting:
            self._later = self._timers().call_later(_LOOK_S, self._look_later)

    def _look_later(self) -> None:
        self._later = None
        now = self._clock()
        for turn, error in list(self._stranded.items()):
            assert turn.no_worker_at is not None
            if now - turn.no_worker_at >= self._wait_for_worker_s:
                del self._stranded[turn]
                turn.ended.set_exception(error)
        self._look()

    def patience_s(self, turn: Turn) -> float:
        patience_s = _SURPRISE * self._policy.max_queue_s
        return patience_s if turn.deadline_at is None else min(patience_s, turn.deadline_at - turn.entered_at)

    def _hopeless(self, turn: Turn, now: float) -> Overloaded | None:
        """What it is told if it would wait too long, as far as that can be told."""
        rate = self._drain.tokens_per_s(now, turn.num_tokens)
        if rate is None:
            return None
        wait_s = (self._queue.tokens_before(turn, now) + turn.num_tokens) / rate
        if turn.deadline_at is not None and now + wait_s + turn.ttft_s > turn.deadline_at:
            return self._refusals.cannot_meet(turn.deadline_at - now, wait_s, turn.ttft_s)
        return self._refusals.too_long(wait_s, self._policy.max_queue_s) if wait_s > self._policy.max_queue_s else None

    def _refuse_if_full(self, tenant: str, priority: int, num_tokens: int) -> None:
        is_free = self._queue.has_room(tenant, priority, num_tokens)
        if not is_free or self.num_waiting >= self._policy.max_queued:
            tokens = self._queue.num_tokens
            rate = self._drain.tokens_per_s(self._clock())
            raise self._refusals.full(self.num_waiting, tokens, tokens / rate if rate else 0.0)

    def _out_of_time(self, turn: Turn) -> Overloaded | DeadlineExceeded:
        now = self._clock()
        if turn.deadline_at is not None and turn.deadline_at <= now + _ROUNDING_S:
            return self._refusals.out_of_time(now - turn.entered_at)
        return self._refusals.in_vain(now - turn.entered_at, self._policy.max_queue_s)
