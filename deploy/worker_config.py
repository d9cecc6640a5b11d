"""A worker's settings, as one frozen value."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path

from kvtransfer.faults import FaultPlan
from model.sampling_params import MAX_DRAFT_TOKENS
from protos.security import Security
from protos.serve import ServerLimits
from protos.status_values import ROLES

# The router gives up a client that does not read well before we give up the router that waits for it.
LIMITS = ServerLimits(unread_s=60.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerConfig:
    """The flags of `pdserve worker`; their defaults are in `deploy.options`.

    Without `num_blocks` or `kv_cache_gb` the cache takes a share of the memory that is free.
    """

    model: str
    router_address: str
    role: str
    host: str
    port: int
    worker_id: str
    metrics_port: int
    num_threads: int | None
    runner: str
    kv_cache_gb: float | None
    num_blocks: int | None
    block_size: int
    max_context: int | None
    device: str
    dtype: str
    max_step_tokens: int
    max_running: int
    lease_s: float
    drain_s: float
    verify_kv: str
    wire_kv: str
    calibrate: str
    timing: Path | None
    drafter: str
    draft_model: str | None
    verification: str
    max_draft_tokens: int
    draft_length: str
    draft_shape: str
    faults: FaultPlan | None = None
    security: Security = field(default_factory=Security)

    def __post_init__(self) -> None:
        self.security.check(self.host)
        for name in ("num_threads", "num_blocks", "block_size", "max_step_tokens", "max_running"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"--{name.replace('_', '-')} is {value}; it must be at least 1")
        if self.kv_cache_gb is not None and not 0 < self.kv_cache_gb < math.inf:
            raise ValueError(f"--kv-cache-gb is {self.kv_cache_gb:g}; it must be a number above 0")
        if self.num_blocks is not None and self.num_blocks * self.block_size < 2:
            raise ValueError(
                f"--num-blocks is {self.num_blocks}; it must be at least 2 where --block-size is 1: "
                "a token of a prompt and one of its answer have to fit"
            )
        if self.lease_s <= 0:
            raise ValueError(f"--lease-s is {self.lease_s:g}; it must be above 0")
        if self.drain_s < 0:
            raise ValueError(f"--drain-s is {self.drain_s:g}; it must be at least 0")
        if not 0 <= self.max_draft_tokens <= MAX_DRAFT_TOKENS:
            raise ValueError(f"--max-draft-tokens is {self.max_draft_tokens}; it must be 0 to {MAX_DRAFT_TOKENS}")
        if self.role not in ROLES:
            raise ValueError(f"--role is {self.role!r}; it must be one of {', '.join(ROLES)}")
