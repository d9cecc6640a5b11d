"""A worker as placement sees it: who it is, what it may do, how loaded it is and how fast it has been."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

from router.spill import Spilled


class Role(enum.Flag):
    """As numbered in workers.proto."""

    PREFILL = 1
    DECODE = 2
    BOTH = 3


@dataclass(frozen=True, slots=True)
class WorkerId:
    """One process: a restarted worker has the same name and another epoch."""

    name: str
    epoch: str


@dataclass(frozen=True, slots=True)
class PrefillTimes:
    """What a worker's steps that compute prompts take, as learnt: a base, each token, and each pair of one with one of
    its context. `max_step_tokens`: of one step, at least 1."""

    base_s: float
    token_s: float
    pair_s: float
    confidence: float  # 0 to 1
    max_step_tokens: int


@dataclass(frozen=True, slots=True)
class Candidate:
    """A worker at one moment, its load with what was sent there and is not yet in its reports.

    Speeds are what it has measured lately; 0 where it has not measured any yet. Ages are of the last measurement.
    """

    id: WorkerId
    address: str
    role: Role
    is_ready: bool
    fingerprint: str  # of the KV layout
    num_blocks: int  # of its whole cache
    num_queued_tokens: int  # to be prefilled
    num_active: int  # sequences that decode, wait to, or are on their way
    num_coming: int = field(default=0, kw_only=True)  # of these on their way: still being prefilled
    stay_s: float = field(default=0.0, kw_only=True)  # of a sequence that decodes, from its first token to its end
    spilled: Spilled = field(default=Spilled(), kw_only=True)
    num_spilled_elsewhere: int = field(default=0, kw_only=True)  # the same, tokens sent by other routers
    num_free_blocks: int
    max_context_tokens: int | None = None  # of a sequence; None: as many as the model allows
    max_running: int = 0  # sequences that decode at once; 0: not known
    prefill_tokens_per_s: float = 0.0
    decode_step_s: float = 0.0  # with `decode_batch` sequences
    decode_batch: float = 0.0
    tokens_per_step: float = 0.0  # of one sequence: above 1 where drafts are accepted
    prefill_age_s: float = 0.0
    decode_age_s: float = 0.0
    transfer_bytes: float = 0.0  # of its hand-overs lately, and how long they were under way
    transfer_s: float = 0.0
    flippable: bool = field(default=True, kw_only=True)  # whether its role may be changed
    releases: tuple[tuple[float, int], ...] = ()  # (when, blocks) of sequences that will have ended, soonest first
    prefill_times: PrefillTimes | None = None
    prompts: tuple[tuple[float, int], ...] = ()  # to be prefilled here: rank, as in `router.first_token`, and tokens
