"""Prefill policy: in which order prompts are computed, how they are cut into chunks, and when they may start.

Shortest remaining first, so that a short prompt need not wait for a long one; a sequence's rank improves as it waits,
so that the long one is not starved. A sequence starts only when its decode worker has granted a ticket: that is the
back-pressure, and it keeps the decode worker's memory from being held by prompts that are only queued.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from collections.abc import Sequence as Items
from dataclasses import dataclass

from kvtransfer.outgoing import Outgoing
from model.block_pool import BlockPool, NoFreeBlocks
from model.engine import ScheduledChunk
from model.runner import LayerDone, NonFiniteLogits, Outcome, SampledToken, StepOutput, VerifiedDraft
from model.sequence import Sequence

Clock = Callable[[], float]


@dataclass(slots=True, eq=False)
class PrefillSequence:
    """A sequence whose KV is built here for a decode worker; for none if one token is all that is wanted.

    It asks for its ticket once it holds its blocks here. `outgoing` is None until the ticket. `was_refused`: the decode
    worker had no room for it yet; `is_backing_off`: and it is not to be asked again just now.
    """

    sequence: Sequence
    decode_worker_id: str | None
    done: Callable[[SampledToken | Exception], None]
    added_at: float
    outgoing: Outgoing | None = None
    was_refused: bool = False
    is_backing_off: bool = False
    started_at: float | None = None
    ended: bool = False

    @property
    def holds_blocks(self) -> bool:
        return bool(self.sequence.block_ids)

    @property
    def may_run(self) -> bool:
        return self.holds_blocks and (self.outgoing is not None or self.decode_worker_id is None)


@dataclass(frozen=True, slots=True)
class PrefillPolicy:
    """`ageing_tokens_per_s`: each second of waiting counts like so many tokens less to compute."""

    ageing_tokens_per_s: float = 500.0
    lookahead_tokens: int = 2048


class PrefillScheduler:
    """Implements `model.engine.Scheduler`. Event loop only.

    `ask_for_ticket` is called for each sequence whose turn comes within the next `lookahead_tokens` tokens for its
    decode worker; the answer comes through `grant`, `refuse` or `remove`. Blocks here are taken before, and given back
    if the decode worker refuses: two workers that prefill for each other never wait for each other's blocks while
    holding some.
    """

    def __init__(
        self,
        pool: BlockPool,
        *,
        ask_for_ticket: Callable[[PrefillSequence], None],
        policy: PrefillPolicy | None = None,
        clock: Clock = time.monotonic,
    ) -> None:
        self._pool = pool
        self._ask_for_ticket = ask_for_ticket
        self._policy = policy or PrefillPolicy()
        self._clock = clock
        self._queue: list[PrefillSequence] = []
        self._in_step: dict[PrefillSequence, int] = {}  # to the number of tokens it runs

    @property
    def num_queued_tokens(self) -> int:
        return sum(prefilling.sequence.num_uncomputed_tokens for prefilling in self._queue)

    @property
    def num_waiting(self) -> int:
        return sum(prefilling.started_at is None for prefilling in self._queue)

    @property
    def num_running(self) -> int:
        return len(self._queue) - self.num_waiting

    @property
    def can_run(self) -> bool:
        """Whether a prompt could be computed in the next step."""
        return any(prefilling.may_run for prefilling in self._queue)

    def add(self, prefilling: PrefillSequence) -> None:
        self._queue.append(prefilling)
        self._take_turns(self._ranked())

    def grant(self, prefilling: PrefillSequence, outgoing: Outgoing) -> None:
        """The decode worker has granted a ticket: the sequence may start."""
        prefilling.outgoing = outgoing

    def refuse(self, prefilling: PrefillSequence) -> None:
        """The decode worker has no room now: the sequence waits, holding nothing, until `ask_again`."""
        prefilling.was_refused = prefilling.is_backing_off = True
        prefilling.sequence.drop_blocks(self._pool)

    def ask_again(self, prefilling: PrefillSequence) -> None:
        """Its turn may come again: now, since after the step that runs its place at the decode worker may be lost."""
        prefilling.is_backing_off = False
        self._take_turns(self._ranked())

    def remove(self, prefilling: PrefillSequence) -> None:
        """Lets the sequence's blocks go: it was handed over, or its request has gone. During a step, after it."""
        if prefilling.ended:
            return
        prefilling.ended = True
        if prefilling in self._queue:
            self._queue.remove(prefilling)
        if prefilling not in self._in_step:
            prefilling.sequence.drop_blocks(self._pool)

    def schedule(self, num_tokens: int) -> list[ScheduledChunk]:
        self._in_step = {}
        self._drop_lost()
        ranked = self._ranked()
        self._take_turns(ranked)
        scheduled: list[ScheduledChunk] = []
        for prefilling in ranked:
            if num_tokens == 0:
                break
            if not prefilling.may_run:
                continue
            if prefilling.started_at is None:
                self._start(prefilling)
            count = min(num_tokens, prefilling.sequence.num_uncomputed_tokens)
            num_tokens -= count
            self._in_step[prefilling] = count
            hook = _write_hook(prefilling.outgoing, prefilling.sequence, count)
            scheduled.append(ScheduledChunk(prefilling.sequence.next_chunk(count), hook))
        return scheduled

    def complete(self, sampled: Items[Outcome], output: StepOutput) -> None:
        ran, self._in_step = self._in_step, {}
        for (prefilling, num_tokens), outcome in zip(ran.items(), sampled, strict=True):
            if prefilling.ended:
                prefilling.sequence.drop_blocks(self._pool)
                continue
            prefilling.sequence.num_computed_tokens += num_tokens
            prefilling.sequence.publish(self._pool)
            if isinstance(outcome, NonFiniteLogits):
                self._pool.withdraw(prefilling.sequence.block_ids)  # nobody else is to start from them
            assert not isinstance(outcome, VerifiedDraft), "no draft was asked for"
            if outcome is not None:
                self._queue.remove(prefilling)  # it keeps its blocks until it is handed over and removed
                prefilling.done(outcome)

    def fail(self, error: Exception) -> None:
        failed, self._in_step = self._in_step, {}
        for prefilling in failed:
            if prefilling.ended:
                prefilling.sequence.drop_blocks(self._pool)
            else:
                self._queue.remove(prefilling)
                prefilling.done(error)

    def _ranked(self) -> list[PrefillSequence]:
        now, ageing = self._clock(), self._policy.ageing_tokens_per_s
        return sorted(self._queue, key=lambda p: p.sequence.num_uncomputed_tokens - ageing * (now - p.added_at))

    def _drop_lost(self) -> None:
        """What cannot be handed over any more, its decode worker or its ticket being lost, need not be computed."""
        for prefilling in list(self._queue):
            if prefilling.outgoing is not None and prefilling.outgoing.failed is not None:
                self._queue.remove(prefilling)
                prefilling.done(prefilling.outgoing.failed)

    def _take_turns(self, ranked: Items[PrefillSequence]) -> None:
        """Takes blocks for the sequences whose turn is near, and asks for their tickets.

        Each decode worker has a line of its own: one that is full does not keep back what goes to another. In a line
        nobody asks behind one that was refused, or short prompts would take every block that a long one waits for.
        """
        tokens_ahead: dict[str | None, float] = {}
        for prefilling in ranked:
            worker_id = prefilling.decode_worker_id
            num_ahead = tokens_ahead.get(worker_id, 0)
            if num_ahead > self._policy.lookahead_tokens:
                continue
            if not prefilling.holds_blocks and not prefilling.is_backing_off:
                if not self._hold_blocks(prefilling):
                    return  # nobody behind it takes blocks meanwhile, or a large prompt would wait for ever
                if worker_id is not None:
                    self._ask_for_ticket(prefilling)
            is_refused = prefilling.was_refused and prefilling.outgoing is None
            tokens_ahead[worker_id] = math.inf if is_refused else num_ahead + prefilling.sequence.num_uncomputed_tokens

    def _hold_blocks(self, prefilling: PrefillSequence) -> bool:
        """Takes blocks for the whole prompt, those of the prefix cache among them."""
        sequence = prefilling.sequence
        sequence.take_prefix(self._pool)
        try:
            sequence.grow(self._pool, sequence.num_tokens)
        except NoFreeBlocks:
            sequence.drop_blocks(self._pool)
            return False
        return True

    def _start(self, prefilling: PrefillSequence) -> None:
        """What the prefix cache held goes out at once."""
        sequence = prefilling.sequence
        prefilling.started_at = self._clock()
        if prefilling.outgoing is not None:
            prefilling.outgoing.hold(sequence.block_ids)
            num_cached_blocks = sequence.num_cached_tokens // sequence.block_size
            if num_cached_blocks:
                prefilling.outgoing.write_all_layers(0, sequence.block_ids[:num_cached_blocks])


def _write_hook(outgoing: Outgoing | None, sequence: Sequence, num_tokens: int) -> LayerDone | None:
    """Sends the blocks that the next `num_tokens` tokens fill, and with the prompt's last token the partial one too."""
    start, end = sequence.num_computed_tokens, sequence.num_computed_tokens + num_tokens
    first = start // sequence.block_size
    stop = -(-end // sequence.block_size) if end == sequence.num_tokens else end // sequence.block_size
    if outgoing is None or first == stop:
        return None
    block_ids = sequence.block_ids[first:stop]

    def write(layer: int) -> None:
        outgoing.write(layer, first, block_ids)

    return write
