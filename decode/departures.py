"""Hands sequences that decode here over to other decode workers, while they run. The counterpart of `Arrivals`.

Full blocks are written while the sequence decodes on, for at most a block of tokens; it stands still for what is not
written by then, its last block, the drafter's state and the record. Whatever fails, it goes on here: it keeps its
blocks until the other worker has it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from decode import metrics
from decode.decoding import DecodeSequence, Halt
from decode.scheduler import DecodeScheduler
from decode.turns import Turns
from kvtransfer.outgoing import Outgoing
from kvtransfer.sender import Sender
from kvtransfer.ticket import HandoverTarget, SendStats
from model.runner import DraftingStates
from protos.errors import FailedPrecondition, ServiceError

# Most of a turn is waiting for the end of a block, which takes nothing of the link: with two at once a worker would be
# emptied of little more than four sequences a second, whatever their size. But each may stand still for what others
# have on their way: for as much, at most, as is posted for one peer anyway.
_MOST_AT_ONCE = 8
_BYTES_AT_ONCE = 256 << 20
_RESERVE_TIMEOUT_S = 1.0


@dataclass(frozen=True, slots=True)
class Departure:
    """A sequence that another worker has taken, with KV of `num_tokens` tokens. `pause_s`: it stood still for."""

    num_tokens: int
    sent: SendStats
    pause_s: float


class Departures:
    """Event loop only. `wake` tells the engine that a sequence goes on."""

    def __init__(
        self,
        *,
        sender: Sender,
        scheduler: DecodeScheduler,
        states: DraftingStates,
        block_bytes: int,
        wake: Callable[[], None],
    ) -> None:
        self._sender = sender
        self._scheduler = scheduler
        self._states = states
        self._wake = wake
        self._block_bytes = block_bytes
        self._turns = Turns(most=_MOST_AT_ONCE, budget=_BYTES_AT_ONCE)

    async def hand_over(
        self, decoding: DecodeSequence, target: HandoverTarget, *, attempt_id: str, request_id: str
    ) -> Departure:
        """Returns when `target` has the sequence, which has ended here by then; it goes on there as `attempt_id`.

        Raises a ServiceError if it has not, or may not have: then the sequence decodes on here. So it does if this is
        cancelled.
        """
        async with self._turns.turn(len(decoding.sequence.block_ids) * self._block_bytes):
            await self._sender.connect(target)  # before it has to stand still
            halt = self._scheduler.halt(decoding)
            try:
                departure = await self._hand_over(decoding, halt, target, attempt_id, request_id)
            except BaseException as error:
                self._stay(decoding, halt)
                metrics.DEPARTURES.labels(error.reason.lower() if isinstance(error, ServiceError) else "failed").inc()
                raise
        self._scheduler.handed_over(decoding)
        metrics.DEPARTURES.labels("ok").inc()
        metrics.DEPARTURE_PAUSE_SECONDS.observe(departure.pause_s)
        return departure

    async def _hand_over(
        self, decoding: DecodeSequence, halt: Halt, target: HandoverTarget, attempt_id: str, request_id: str
    ) -> Departure:
        # Shielded: the scheduler fulfils these futures, and must not find them cancelled.
        sequence, num_tokens = decoding.sequence, await asyncio.shield(halt.at)
        outgoing = await self._sender.reserve(
            target,
            attempt_id=attempt_id,
            request_id=request_id,
            num_tokens=num_tokens,
            block_hashes=sequence.block_hashes[: num_tokens // sequence.block_size],
            timeout_s=_RESERVE_TIMEOUT_S,
        )
        try:
            num_full = sequence.num_computed_tokens // sequence.block_size
            await _write(outgoing, 0, sequence.block_ids[:num_full])
            stopped_at = await asyncio.shield(halt.reached)
            await _write(outgoing, num_full, sequence.block_ids[num_full : -(-num_tokens // sequence.block_size)])
            drafting = await asyncio.to_thread(self._states.export_drafting, sequence.drafting)
            if decoding.ended_at is not None:
                raise FailedPrecondition("the stream ended before it was handed over", field="attempt_id")
            sent = await outgoing.commit(sequence.token_ids[num_tokens], num_tokens, drafting)
        except BaseException:
            self._stay(decoding, halt)  # at once: what was posted may take long to end, and has blocks of its own
            await outgoing.abort("the sequence stays where it was")
            raise
        return Departure(num_tokens, sent, time.monotonic() - stopped_at)

    def _stay(self, decoding: DecodeSequence, halt: Halt) -> None:
        if decoding.halt is halt:  # and not yet that of another try
            self._scheduler.go_on(decoding)
            self._wake()


async def _write(outgoing: Outgoing, first_block: int, block_ids: Sequence[int]) -> None:
    """In a thread, since queueing a write may have to wait."""
    outgoing.hold(block_ids)
    await asyncio.to_thread(outgoing.write_all_layers, first_block, tuple(block_ids))
