"""A sequence that decodes on this worker: mutable, and owned by the decode scheduler."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from decode.outbox import Outbox
from model.sequence import Sequence


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

    @property
    def holds_blocks(self) -> bool:
        return bool(self.sequence.block_ids)
