"""One worker that has registered: what it says of itself, once and again and again, and what was sent to it."""

from __future__ import annotations

import asyncio
import enum
from dataclasses import dataclass, field

from protos.errors import FailedPrecondition, ServiceError
from router.candidate import Candidate, PrefillTimes, Role
from router.dispatch import Dispatches
from router.profile import WorkerProfile
from router.shared_records import SentLoad


class WorkerState(enum.Enum):
    READY = 1
    DRAINING = 2
    LOST = 3  # the router's own finding, as the next one
    SILENT = 4


@dataclass(frozen=True, slots=True)
class WorkerLoad:
    """What a worker reports again and again."""

    state: WorkerState
    queued_prefill_tokens: int = 0
    num_waiting: int = 0
    num_running: int = 0
    num_free_blocks: int = 0
    num_used_blocks: int = 0
    num_quarantined_blocks: int = 0
    prefill_tokens_per_s: float = 0.0
    decode_step_s: float = 0.0
    decode_batch: float = 0.0
    tokens_per_step: float = 0.0
    prefill_age_s: float = 0.0  # of the last measurement
    decode_age_s: float = 0.0
    transfer_bytes: float = 0.0  # of hand-overs lately, old ones less, and for how long they were under way
    transfer_s: float = 0.0


class DumpCache:
    """Asks a worker for all that is findable in its prefix cache."""


@dataclass(frozen=True, slots=True)
class Routers:
    """Tells a worker of all routers that live, this one among them: it is to register with each."""

    addresses: tuple[str, ...]


class Replaced(FailedPrecondition):
    """Another process has registered under this worker's name."""

    reason = "WORKER_REPLACED"


@dataclass(slots=True, eq=False)
class Worker:
    """One registration. `commands` carries what the worker is told, or an error that ends its stream."""

    profile: WorkerProfile
    role: Role
    load: WorkerLoad
    reported_at: float
    is_reachable: bool = True
    is_drained: bool = False  # an operator has said so
    commands: asyncio.Queue[Role | DumpCache | Routers | ServiceError | None] = field(default_factory=asyncio.Queue)
    dispatches: Dispatches = field(default_factory=Dispatches)
    sent_elsewhere: SentLoad = field(default_factory=SentLoad)  # by other routers
    fingerprint: str = field(init=False)

    def __post_init__(self) -> None:
        self.fingerprint = self.profile.layout.fingerprint  # it is a hash, and asked for with each placement

    @property
    def is_leaving(self) -> bool:
        """Whether what decodes here had better go on elsewhere."""
        return self.is_drained or self.load.state is WorkerState.DRAINING or Role.DECODE not in self.role

    def candidate(self, is_ready: bool, now: float, prefill_times: PrefillTimes | None = None) -> Candidate:
        """As placement sees it."""
        load, sent, other = self.load, self.dispatches, self.sent_elsewhere
        return Candidate(
            id=self.profile.id,
            address=self.profile.address,
            role=self.role,
            is_ready=is_ready,
            fingerprint=self.fingerprint,
            num_blocks=self.profile.num_blocks,
            num_queued_tokens=load.queued_prefill_tokens + sent.num_unreported_tokens + other.num_unreported_tokens,
            num_active=max(load.num_running + load.num_waiting, sent.num_decoding + other.num_decoding),
            num_coming=sent.num_coming + other.num_coming,
            stay_s=sent.stay_s,
            spilled=sent.spilled,
            num_spilled_elsewhere=other.num_spilled_tokens,
            num_free_blocks=load.num_free_blocks - sent.num_coming_blocks - other.num_coming_blocks,
            max_context_tokens=self.profile.max_context_tokens,
            max_running=self.profile.max_running,
            prefill_tokens_per_s=load.prefill_tokens_per_s,
            decode_step_s=load.decode_step_s,
            decode_batch=load.decode_batch,
            tokens_per_step=load.tokens_per_step,
            prefill_age_s=load.prefill_age_s,
            decode_age_s=load.decode_age_s,
            transfer_bytes=load.transfer_bytes,
            transfer_s=load.transfer_s,
            releases=sent.releases(now),
            flippable=self.profile.flippable,
            prefill_times=prefill_times,
            prompts=sent.prompts(),
        )
