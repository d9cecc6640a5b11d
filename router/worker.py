"""One worker that has registered: what it says of itself, once and again and again, and what was sent to it."""

from __future__ import annotations

import asyncio
import enum
from dataclasses import dataclass, field

from protos.errors import FailedPrecondition, ServiceError
from router.candidate import Role
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
