"""Decode policy: who runs in the next step, who waits, and who gives its blocks back when they run out.

Every running sequence gets one token a step; what is left of the token budget goes to sequences whose KV is computed
here: colocated requests and those that were preempted. When blocks run out the newest sequence drops its KV, keeps its
tokens and is computed again when there is room. Randomness is a function of (seed, position), so it goes on exactly as
it would have.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from collections.abc import Sequence as Items

from decode import metrics
from decode.decoding import DecodeSequence, Halt
from decode.draft_planner import DraftPlanner, NoDrafts
from model.block_pool import BlockPool, NoFreeBlocks
from model.engine import ScheduledChunk
from model.runner import NonFiniteLogits, Outcome, SampledToken, StepOutput, VerifiedDraft
from protos.errors import FailedPrecondition, ResourceExhausted


class DecodeScheduler:
    """Implements `model.engine.Scheduler`. Event loop only.

    `prompts_wait` tells whether another scheduler has prompts that could be computed in the next step.
    """

    def __init__(
        self,
        pool: BlockPool,
        *,
        max_running: int,
        planner: DraftPlanner | None = None,
        prompts_wait: Callable[[], bool] = lambda: False,
    ) -> None:
        self._pool = pool
        self._max_running = max_running
        self._planner = planner or NoDrafts()
        self._prompts_wait = prompts_wait
        self._waiting: deque[DecodeSequence] = deque()  # preempted ones first
        self._running: list[DecodeSequence] = []  # oldest first
        self._halted: set[DecodeSequence] = set()  # with their blocks, which stay theirs
        self._in_step: dict[DecodeSequence, int] = {}  # to the number of tokens it runs

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        return len(self._running) + len(self._halted)

    @property
    def num_queued_prefill_tokens(self) -> int:
        """Tokens whose KV has still to be computed here, beside the one that each decode step computes."""
        everyone = [*self._waiting, *self._running]
        return sum(decoding.sequence.num_uncomputed_tokens - 1 for decoding in everyone)

    @property
    def num_wanted_blocks(self) -> int:
        """Blocks that sequences here are about to need: whoever reserves for others must leave these free."""
        waiting = sum(d.sequence.num_blocks_for(d.sequence.num_tokens + 1) for d in self._waiting if not d.holds_blocks)
        return waiting + self.num_running

    def add(self, decoding: DecodeSequence) -> None:
        self._waiting.append(decoding)

    def remove(self, decoding: DecodeSequence) -> None:
        """Ends a sequence early, because its stream has gone. Blocks of a step that is running are let go after it."""
        if decoding.ended_at is None:
            self._end(decoding)

    def halt(self, decoding: DecodeSequence) -> Halt:
        """Lets a sequence decode on to where its last block is all but full, and stop there.

        Raises FailedPrecondition: it has ended, or is being halted already. ResourceExhausted: it does not decode yet.
        """
        if decoding.ended_at is not None or decoding.halt is not None:
            raise FailedPrecondition("the sequence has ended, or is being handed over already", field="attempt_id")
        if decoding not in self._running or decoding.sequence.num_uncomputed_tokens > 1:
            raise ResourceExhausted("the sequence waits here for its KV, or for room", field="attempt_id")
        decoding.halt = Halt()
        return decoding.halt

    def go_on(self, decoding: DecodeSequence) -> None:
        """Takes `halt` back."""
        decoding.halt = None
        if decoding in self._halted:
            self._halted.remove(decoding)
            self._running.insert(0, decoding)  # one of the oldest: newer ones give way to it, if need be

    def handed_over(self, decoding: DecodeSequence) -> None:
        """Another worker has the sequence: it ends here, without a finish reason."""
        if decoding.ended_at is None:
            self._end(decoding)
            decoding.outbox.close()

    def schedule(self, num_tokens: int) -> list[ScheduledChunk]:
        self._admit()
        self._in_step = {}
        for decoding in [d for d in self._running if d.sequence.num_uncomputed_tokens == 1]:
            if len(self._in_step) < num_tokens and decoding in self._running and self._hold_next_block(decoding):
                self._in_step[decoding] = 1
                _fix_halt(decoding)
        drafts = self._plan_drafts(num_tokens)
        budget = num_tokens - len(self._in_step) - sum(drafts.values())
        for decoding in [d for d in self._running if d.sequence.num_uncomputed_tokens > 1]:
            if budget > 0:
                self._in_step[decoding] = min(budget, decoding.sequence.num_uncomputed_tokens)
                budget -= self._in_step[decoding]
        for decoding in self._in_step:
            decoding.started_at = decoding.started_at or time.monotonic()
        return [
            ScheduledChunk(decoding.sequence.next_chunk(count, drafts.get(decoding, 0)))
            for decoding, count in self._in_step.items()
        ]

    def _plan_drafts(self, num_tokens: int) -> dict[DecodeSequence, int]:
        """Blocks for drafts are taken only where they are free: nobody is preempted for a guess.

        Nor is a prompt kept waiting for guesses: half of what the step has left is for prompts.
        """
        decoding = list(self._in_step)
        if self._prompts_wait() or any(each.sequence.num_uncomputed_tokens > 1 for each in self._running):
            num_tokens -= -(-(num_tokens - len(decoding)) // 2)
        planned = dict(zip(decoding, self._planner.plan(decoding, num_tokens), strict=True))
        for each, count in planned.items():
            has_room = each.sequence.num_blocks_for(each.sequence.num_tokens + count) <= self._pool.num_free
            if count and (each.halt is not None or not has_room):
                planned[each] = 0
                self._planner.withdraw(each)
            elif count:
                each.sequence.grow(self._pool, each.sequence.num_tokens + count)
        return planned

    def complete(self, sampled: Items[Outcome], output: StepOutput) -> None:
        ran, self._in_step = self._in_step, {}
        was_mixed = len(output.sampled) > len(ran) or any(count > 1 for count in ran.values())
        self._planner.learn(list(zip(ran, sampled, strict=True)), output, was_mixed=was_mixed)
        for (decoding, num_tokens), outcome in zip(ran.items(), sampled, strict=True):
            if decoding.ended_at is not None:
                self._planner.forget(decoding)  # it has just learnt of this step, in which the sequence ended
                decoding.sequence.drop_blocks(self._pool)
            else:
                self._advance(decoding, num_tokens, outcome)

    def fail(self, error: Exception) -> None:
        failed, self._in_step = self._in_step, {}
        for decoding in failed:
            if decoding.ended_at is None:
                self._end(decoding)
                decoding.outbox.close(error)
            else:
                decoding.sequence.drop_blocks(self._pool)

    def _admit(self) -> None:
        """Moves waiting sequences into the batch, in order; one without KV first takes blocks for all its tokens.

        Once one has not found its blocks, no later one may take any: a long prompt that short ones overtake might wait
        for ever. Sequences whose KV was handed over are admitted all the same: they hold their blocks already, and
        give them back when they end.
        """
        blocks_ran_short = False
        for decoding in list(self._waiting):
            if self.num_running >= self._max_running:
                return
            if not decoding.holds_blocks:
                blocks_ran_short = blocks_ran_short or not self._take_blocks(decoding)
            if decoding.holds_blocks:
                self._waiting.remove(decoding)
                self._running.append(decoding)

    def _take_blocks(self, decoding: DecodeSequence) -> bool:
        sequence = decoding.sequence
        sequence.take_prefix(self._pool)
        # One block more for each running sequence, or the newcomer would be preempted as soon as they grow.
        if sequence.num_blocks_for(sequence.num_tokens) + len(self._running) > self._pool.num_free:
            sequence.drop_blocks(self._pool)
            return False
        sequence.grow(self._pool, sequence.num_tokens)
        if decoding.num_preemptions == 0:
            decoding.num_cached_tokens = sequence.num_cached_tokens
            decoding.prefill_until = sequence.num_tokens
        else:
            decoding.prefill_until = sequence.num_tokens - 1  # the last token's step is one it had to run anyway
        return True

    def _hold_next_block(self, decoding: DecodeSequence) -> bool:
        """Makes room for the next token's KV, if need be by preempting newer sequences or, last, this one."""
        while True:
            try:
                decoding.sequence.grow(self._pool, decoding.sequence.num_tokens)
                return True
            except NoFreeBlocks:
                if sum(each.sequence.trim(self._pool) for each in (*self._running, *self._halted)):
                    continue  # nobody is preempted for what others guessed in vain
                victim = self._newest_holder()
                self._preempt(victim)
                if victim is decoding:
                    return False

    def _newest_holder(self) -> DecodeSequence:
        for decoding in reversed(self._waiting):
            if decoding.holds_blocks:
                return decoding
        return self._running[-1]

    def _preempt(self, decoding: DecodeSequence) -> None:
        decoding.sequence.drop_blocks(self._pool)
        decoding.num_preemptions += 1
        if decoding in self._running:
            self._running.remove(decoding)
            self._waiting.appendleft(decoding)

    def _advance(self, decoding: DecodeSequence, num_tokens: int, outcome: Outcome) -> None:
        sequence = decoding.sequence
        decoding.num_steps += 1
        self._count_prefill(decoding, num_tokens)
        sequence.num_computed_tokens += num_tokens
        if isinstance(outcome, VerifiedDraft):
            num_kept = self._emit(decoding, outcome.tokens)
            sequence.num_computed_tokens += num_kept - 1  # the KV of the drafts that stand is that of the sequence
            metrics.DRAFTS.verified(outcome, num_kept)
            decoding.num_drafted_tokens += outcome.num_drafted
            decoding.num_accepted_tokens += min(num_kept, len(outcome.tokens) - 1)
        elif isinstance(outcome, SampledToken):
            self._emit(decoding, (outcome,))
        sequence.publish(self._pool)
        if isinstance(outcome, NonFiniteLogits):
            self._pool.withdraw(sequence.block_ids)  # nobody else is to start from them
            self._end(decoding)
            decoding.outbox.close(outcome)
        elif sequence.finish_reason is not None:
            self._end(decoding)
            decoding.outbox.close()
        elif decoding.has_reached_halt and decoding in self._running:
            self._running.remove(decoding)
            self._halted.add(decoding)
            assert decoding.halt is not None
            decoding.halt.reached.set_result(time.monotonic())

    def _emit(self, decoding: DecodeSequence, tokens: Items[SampledToken]) -> int:
        """Up to the one that ends the sequence. Returns how many."""
        for count, token in enumerate(tokens, start=1):
            decoding.sequence.append(token.token_id)
            decoding.outbox.put(token)
            if decoding.sequence.finish_reason is not None:
                return count
        return len(tokens)

    def _count_prefill(self, decoding: DecodeSequence, num_tokens: int) -> None:
        start = decoding.sequence.num_computed_tokens
        num_prefilled = max(0, min(start + num_tokens, decoding.prefill_until) - start)
        if decoding.num_preemptions:
            decoding.num_recomputed_tokens += num_prefilled
        else:
            decoding.num_computed_tokens += num_prefilled

    def _end(self, decoding: DecodeSequence) -> None:
        decoding.ended_at = time.monotonic()
        self._planner.forget(decoding)
        if decoding in self._running:
            self._running.remove(decoding)
        elif decoding in self._waiting:
            self._waiting.remove(decoding)
        self._halted.discard(decoding)
        if decoding.halt is not None:
            decoding.halt.fail(FailedPrecondition("the sequence ended before it was handed over", field="attempt_id"))
        if decoding not in self._in_step:
            decoding.sequence.drop_blocks(self._pool)


def _fix_halt(decoding: DecodeSequence) -> None:
    """Before the block that its last token is in is full: hashes of full blocks are known from here on."""
    if decoding.halt is not None and not decoding.halt.at.done():
        sequence = decoding.sequence
        at = (sequence.num_tokens // sequence.block_size + 1) * sequence.block_size - 1
        if at > sequence.num_prompt_tokens + sequence.sampling.max_tokens - 2:
            decoding.halt.fail(FailedPrecondition("the sequence ends before it could leave", field="attempt_id"))
        else:
            decoding.halt.at.set_result(at)
