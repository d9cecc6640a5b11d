"""A request of a simulation: what became of it so far, and each attempt to serve it. Mutable, as sequences are."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from model.block_pool import BlockHash
from router.candidate import WorkerId
from router.dispatch import Dispatch
from router.simulated_pool import Held
from router.traced_request import TracedRequest
from router.turns import Admitted

if TYPE_CHECKING:
    from router.simulated_worker import SimulatedWorker

_GOLDEN, _MASK = 0x9E3779B97F4A7C15, (1 << 64) - 1


@dataclass(slots=True, eq=False)
class SimulatedRequest:
    traced: TracedRequest
    max_tokens: int
    groups: tuple[BlockHash, ...]
    num_emitted: int = 0
    first_token_at: float = 0.0
    last_token_at: float = 0.0
    worst_gap_s: float = 0.0
    wait_s: float = 0.0
    prefill: str = ""
    decode: str = ""
    num_cached_tokens: int = 0
    num_retries: int = 0
    num_resumes: int = 0
    num_moves: int = 0
    num_preemptions: int = 0
    avoid: set[WorkerId] = field(default_factory=set)
    admitted: Admitted | None = None

    @property
    def num_tokens(self) -> int:
        """Of the prompt and of the answer so far."""
        return self.traced.num_prompt_tokens + self.num_emitted

    def emitted_in_all(self, num_tokens: int, at: float) -> None:
        """Prompt and answer have so many tokens, the last one since this moment."""
        if self.num_emitted == 0:
            self.first_token_at = at
        self.num_emitted, self.last_token_at = num_tokens - self.traced.num_prompt_tokens, at


@dataclass(slots=True, eq=False)
class Attempt:
    """`num_tokens` have to be prefilled: those of the prompt, and of the answer so far. Workers are None as in a
    placement. `is_over`: whatever is still under way of it comes too late."""

    request: SimulatedRequest
    num_tokens: int
    prefill: SimulatedWorker | None
    decode: SimulatedWorker | None
    dispatch: Dispatch
    is_over: bool = False
    reserved: Held | None = None  # at the decode worker, until it has the sequence
    num_held_tokens: int = 0  # there, before anything was sent
    prefilling: Prefilling | None = None
    decoding: Decoding | None = None

    @property
    def groups(self) -> tuple[BlockHash, ...]:
        return self.request.groups

    @property
    def num_tokens_at_end(self) -> int:
        return self.request.traced.num_prompt_tokens + self.request.traced.num_output_tokens


@dataclass(slots=True, eq=False)
class Prefilling:
    """A prompt at its prefill worker, as `prefill.scheduler.PrefillSequence`."""

    attempt: Attempt
    added_at: float
    num_computed: int = 0
    num_cached: int = 0
    held: Held | None = None
    is_granted: bool = False
    was_refused: bool = False
    is_backing_off: bool = False
    is_started: bool = False
    is_removed: bool = False
    written_at: float = 0.0  # when the last byte is there of what was sent so far

    @property
    def num_uncomputed(self) -> int:
        return self.attempt.num_tokens - self.num_computed

    @property
    def may_run(self) -> bool:
        return self.held is not None and (self.is_granted or self.attempt.decode is None)


@dataclass(slots=True, eq=False)
class Decoding:
    """A sequence at its decode worker. While it decodes, its tokens are `base` and one for each round of the batch."""

    attempt: Attempt
    num_tokens: int
    held: Held | None
    num_uncomputed: int = 1
    is_computing: bool = False  # its KV, before it decodes
    base: int = 0
    joined_round: int = 0
    stop_round: int = 0
    last_token_at: float = 0.0

    @property
    def num_tokens_at_end(self) -> int:
        return self.attempt.num_tokens_at_end


def group_of(prefix_block: int) -> BlockHash:
    """Spread evenly over its first bits, as hashes are."""
    return ((prefix_block + 1) * _GOLDEN & _MASK).to_bytes(8, "big")
