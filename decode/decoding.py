"""A sequence that decodes on this worker: mutable, and owned by the decode scheduler."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field

from decode.outbox import Outbox
from model.sequence import Sequence


class Halt:
    """Where a sequence is to stop decoding here, so that it can be handed over. Made on a running event loop.

    `at`: the number of its tokens that will have KV here by then, known from its next step on; until then it decodes.
    `reached`: the instant from which it stands still there. Both raise what `fail` was given if it ends before.
    """

    def __init__(self) -> None:
        loop = asyncio.get_running_loop()
        self.at: asyncio.Future[int] = loop.create_future()
        self.reached: asyncio.Future[float] = loop.create_future()

    def fail(self, error: Exception) -> None:
        for future in (self.at, self.reached):
            if not future.done():
                future.set_exception(error)
                future.exception()  # seen: perhaps nobody waits for it


@dataclass(slots=True, eq=False)
class DecodeSequence:
    """A sequence that decodes here, where its tokens go, and what became of it so far.

    `num_received_tokens` and `num_cached_tokens` are set by whoever took the hand-over in; the scheduler counts the
    rest.
    """

    sequence: Sequence
    outbox: Outbox
    num_received_tokens: int = 0
    num_cached_tokens: int = 0
    num_computed_tokens: int = 0
    num_recomputed_tokens: int = 0
    num_preemptions: int = 0
    num_steps: int = 0
    num_drafted_tokens: int = 0
    num_accepted_tokens: int = 0
    prefill_until: int = 0  # tokens whose KV is computed here before decoding goes on
    added_at: float = field(default_factory=time.monotonic)
    started_at: float | None = None  # of its first step
    ended_at: float | None = None
    halt: Halt | None = None  # set while it is being handed over

    @property
    def holds_blocks(self) -> bool:
        return bool(self.sequence.block_ids)

    @property
    def has_reached_halt(self) -> bool:
        halt = self.halt
        return (
            halt is not None
            and halt.at.done()
            and halt.at.exception() is None
            and halt.at.result() == self.sequence.num_computed_tokens
        )
