"""A simulated worker: its engine's steps, as the real one runs them, and what it reports of itself.

A step decodes first and computes prompts with what is left of its tokens. Steps that only decode are run many at a
time, and cut short after the current one when something comes that the next one would take up.
"""

from __future__ import annotations

from collections.abc import Sequence

from model.block_pool import BlockHash
from model.kv_layout import KVLayout
from router.candidate import Role, WorkerId
from router.profile import WorkerProfile
from router.scenario import WorkerSpec
from router.simulated_batch import SimulatedBatch
from router.simulated_meter import SimulatedMeter
from router.simulated_pool import Held, SimulatedPool
from router.simulated_queue import SimulatedQueue
from router.simulated_request import Attempt, Decoding, Prefilling
from router.simulated_step import Listener, Step
from router.traced_request import PREFIX_BLOCK_TOKENS
from router.virtual_time import VirtualTime
from router.worker import WorkerLoad, WorkerState


class SimulatedWorker:
    def __init__(self, spec: WorkerSpec, layout: KVLayout, time: VirtualTime, listener: Listener) -> None:
        self.spec = spec
        self.layout = layout
        self.role = spec.role
        self.is_alive = False
        self.prefill_busy_s = self.decode_busy_s = 0.0
        self.sent_until = self.received_until = 0.0  # its link is taken
        self.attempts: dict[Attempt, None] = {}
        self._time = time
        self._listener = listener
        self._num_starts = 0

    def start(self) -> None:
        """A process of its own, with nothing in its cache."""
        spec, block_size = self.spec, self.layout.block_size
        self._num_starts += 1
        self.id = WorkerId(spec.name, f"epoch-{self._num_starts}")
        self.is_alive = True
        self.pool = SimulatedPool(spec.num_blocks, PREFIX_BLOCK_TOKENS // block_size)
        self.queue = SimulatedQueue(self.pool, block_size, self._listener.ask_for_ticket)
        self.batch = SimulatedBatch(self.pool, spec.costs, block_size, spec.max_running)
        self.meter = SimulatedMeter(self._time.clock)
        self._step: Step | None = None

    @property
    def is_idle(self) -> bool:
        return self.is_alive and self._step is None

    def die(self) -> None:
        self.settle()
        self.is_alive = False
        self._step = None

    @property
    def profile(self) -> WorkerProfile:
        spec = self.spec
        return WorkerProfile(
            id=self.id,
            address=spec.name,
            role=self.role,
            flippable=spec.flippable,
            model_name="",
            tokenizer_digest="",
            layout=self.layout,
            num_blocks=spec.num_blocks,
            max_running=spec.max_running,
            max_step_tokens=spec.max_step_tokens,
            runner="simulated",
            hardware=spec.hardware,
        )

    def load(self) -> WorkerLoad:
        self.settle()
        pool, queue, batch, meter = self.pool, self.queue, self.batch, self.meter
        num_waiting = queue.num_waiting if len(queue) else 0
        transfer_bytes, transfer_s = meter.transfers
        return WorkerLoad(
            state=WorkerState.READY,
            queued_prefill_tokens=queue.num_queued_tokens + batch.num_queued_tokens,
            num_waiting=num_waiting + len(batch.waiting),
            num_running=len(queue) - num_waiting + batch.num_running,
            num_free_blocks=pool.num_free,
            num_used_blocks=pool.num_used,
            prefill_tokens_per_s=meter.prefill_tokens_per_s,
            decode_step_s=meter.decode_step_s,
            decode_batch=meter.decode_batch,
            tokens_per_step=meter.tokens_per_step,
            prefill_age_s=meter.prefill_age_s,
            decode_age_s=meter.decode_age_s,
            transfer_bytes=transfer_bytes,
            transfer_s=transfer_s,
        )

    def wake(self) -> None:
        """There may be something to do."""
        if not self.is_alive:
            return
        if self._step is None:
            self._begin()
        elif not self._step.is_mixed and (self.batch.waiting or len(self.queue)):
            self._cut_short(self._num_rounds_over() + 1)

    def prompt_came(self, prefilling: Prefilling) -> None:
        self.settle()
        self.queue.add(prefilling)
        self._allocated()
        self.wake()

    def prompt_refused(self, prefilling: Prefilling) -> None:
        """Its decode worker has no room for it now."""
        self.queue.refuse(prefilling)
        self.wake()

    def prompt_may_ask(self, prefilling: Prefilling) -> None:
        self.settle()
        self.queue.ask_again(prefilling)
        self._allocated()
        self.wake()

    def prompt_left(self, prefilling: Prefilling) -> None:
        """It was handed over, or nobody wants it any more."""
        self.queue.remove(prefilling)
        self.wake()

    def reserve(self, groups: Sequence[BlockHash], num_blocks: int) -> Held:
        """For a sequence that comes from another worker. There must be room."""
        held = self.pool.hold(groups, num_blocks)
        self._allocated()
        return held

    def settle(self) -> None:
        """Has the pool know of blocks that were taken since the step began."""
        if self._step is not None and not self._step.is_mixed:
            self.batch.hold_in(self._num_rounds_over() + 1)

    def _allocated(self) -> None:
        """Others than those that decode have taken blocks: there may be fewer rounds than was thought."""
        if self._step is not None and not self._step.is_mixed:
            num_fitting = self.batch.num_fitting(self._step.num_rounds)
            self._cut_short(max(num_fitting, self._num_rounds_over() + 1))

    def halting_at(self, decoding: Decoding) -> int | None:
        """After how many tokens it would stop to be handed over, its last block all but full; None if it ends before.
        It is fixed with the next step."""
        num_tokens, _ = self.num_emitted_tokens(decoding)
        num_tokens += self._step is not None
        block_size = self.layout.block_size
        at = (num_tokens // block_size + 1) * block_size
        return at if at < decoding.num_tokens_at_end else None

    def halt(self, decoding: Decoding, num_tokens: int) -> None:
        """Has it stop there, sooner than was planned if need be."""
        self.batch.halt(decoding, num_tokens)
        if self._step is not None and not self._step.is_mixed:
            self._cut_short(decoding.stop_round - self.batch.round)

    def go_on(self, decoding: Decoding) -> None:
        """One that stands still decodes on here."""
        self.batch.go_on(decoding)
        if self._step is not None and not self._step.is_mixed:
            self._cut_short(self._num_rounds_over() + 1)
        self.wake()

    def num_emitted_tokens(self, decoding: Decoding) -> tuple[int, float]:
        """Tokens in all that one which decodes has by now, and when the last came."""
        if self._step is None or self._step.is_mixed:
            return self.batch.num_tokens(decoding), self._time.now if self._step is None else self._step.began_at
        num_over = self._num_rounds_over()
        return self.batch.num_tokens(decoding) + num_over, self._step.began_at + self.batch.rounds_s(num_over)

    def _num_rounds_over(self) -> int:
        assert self._step is not None
        return self.batch.rounds_within(self._time.now - self._step.began_at, self._step.num_rounds - 1)

    def _cut_short(self, num_rounds: int) -> None:
        step = self._step
        assert step is not None
        if num_rounds < step.num_rounds:
            self._step = Step(step.began_at, num_rounds)
            self._time.at(step.began_at + self.batch.rounds_s(num_rounds), self._ended, self._step)

    def _begin(self) -> None:
        batch, now, budget = self.batch, self._time.now, self.spec.max_step_tokens
        batch.admit()
        for decoding in batch.begin_round():
            if decoding.joined_round < batch.round and decoding.num_tokens > decoding.attempt.num_tokens:
                decoding.attempt.request.emitted_in_all(decoding.num_tokens, now)
            self._listener.preempted(decoding)
        budget -= batch.num_decoding
        computing = []
        for decoding in batch.computing:
            if budget > 0:
                computing.append((decoding, min(budget, decoding.num_uncomputed)))
                budget -= computing[-1][1]
        prompts = self.queue.schedule(budget)
        if computing or prompts:
            self._step = step = Step(now, 1, prompts, computing)
            until = now + self._mixed_s(step)
        elif batch.num_decoding:
            self._step = step = Step(now, batch.num_rounds())
            until = now + batch.rounds_s(step.num_rounds)
        else:
            self._step = None
            return
        if batch.fresh:
            self._note_first_gaps(until if step.is_mixed else now + batch.rounds_s(1))
        self._time.at(until, self._ended, step)

    def _note_first_gaps(self, first_end: float) -> None:
        for decoding in self.batch.fresh:
            request = decoding.attempt.request
            request.worst_gap_s = max(request.worst_gap_s, first_end - decoding.last_token_at)

    def _mixed_s(self, step: Step) -> float:
        """A chunk of one token costs what decoding does."""
        chunks = _chunks_of(step)
        prompts = [(count, context) for count, context in chunks if count > 1]
        num_sequences = self.batch.num_decoding + len(chunks) - len(prompts)
        num_context = self.batch.num_context_tokens + sum(context for count, context in chunks if count == 1)
        costs = self.spec.costs
        if not prompts:
            return costs.decode_s(num_sequences, num_context)
        return costs.mixed_s(prompts, num_sequences, num_context)

    def _ended(self, step: Step) -> None:
        if step is not self._step:
            return  # it was cut short, or the worker has died
        batch, now = self.batch, self._time.now
        num_decoding, took_s = batch.num_decoding, now - step.began_at
        if step.is_mixed:
            gap_s, self.prefill_busy_s = took_s, self.prefill_busy_s + took_s
            self._meter_prompts(step, num_decoding, took_s)
        else:
            self.decode_busy_s += took_s
            per_step = self.spec.costs.tokens_per_step
            first_s = per_step * batch.rounds_s(1)
            gap_s = per_step * (took_s - batch.rounds_s(step.num_rounds - 1))
            context = batch.num_context_tokens + num_decoding * (step.num_rounds - 1) / 2
            self.meter.decoded(step.num_rounds, num_decoding, first_s, gap_s, per_step, context)
        stopped = batch.advance(1 if step.is_mixed else step.num_rounds, gap_s) if num_decoding else []
        firsts = self._computed(step)
        written = self.queue.complete() if step.prompts else []
        self._step = None
        self._begin()
        self._tell(step, stopped, firsts, written)

    def _meter_prompts(self, step: Step, num_decoding: int, took_s: float) -> None:
        chunks = _chunks_of(step)
        num_tokens = num_decoding + sum(count for count, _ in chunks)
        if num_tokens > num_decoding + len(chunks):
            is_mixed = num_decoding or any(count == 1 for count, _ in chunks)
            self.meter.prefilled(num_tokens, took_s, 0 if is_mixed else sum(n * context for n, context in chunks))

    def _computed(self, step: Step) -> list[Decoding]:
        """Returns who has a token of it."""
        firsts = []
        for decoding, count in step.computing:
            is_last = count == decoding.num_uncomputed
            if is_last:
                decoding.last_token_at = self._time.now
                firsts.append(decoding)
            self.batch.computed(decoding, count)
        return firsts

    def _tell(
        self,
        step: Step,
        stopped: Sequence[Decoding],
        firsts: Sequence[Decoding],
        written: Sequence[tuple[Prefilling, int]],
    ) -> None:
        for decoding in stopped:
            decoding.last_token_at = self._time.now
            self._listener.stopped(self, decoding)
        for decoding in firsts:
            self._listener.first_token(decoding)
            if decoding.num_tokens == decoding.num_tokens_at_end and decoding.held is None:
                self._listener.stopped(self, decoding)
        for prefilling, count in written:
            self._listener.wrote(self, prefilling, count, step.began_at)
            if prefilling.num_uncomputed == 0:
                self._listener.prefilled(self, prefilling)

    @property
    def does_decode(self) -> bool:
        return Role.DECODE in self.role


def _chunks_of(step: Step) -> list[tuple[int, int]]:
    """Tokens, and tokens of context with them, while it is in progress."""
    prompts = [(count, each.num_computed + count) for each, count in step.prompts]
    return prompts + [(count, each.num_tokens - each.num_uncomputed + count) for each, count in step.computing]
