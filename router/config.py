"""The router's settings, as one frozen value."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RelayPolicy:
    """How far the router goes for one request when workers fail. Attempts count the first one."""

    max_attempts: int = 4
    retry_delay_s: float = 0.05  # doubled with each attempt, up to a second, less some jitter
    wait_for_worker_s: float = 5.0  # for one to register when none fits


@dataclass(frozen=True, slots=True)
class AdmissionPolicy:
    """How many requests may wait at the router, for how long, and when a worker has room for one more.

    A request that is predicted to wait longer is refused at once. A worker that has nothing to do takes any.
    """

    max_queued: int = 1024  # requests
    max_queued_tokens: int = 2_000_000
    max_queue_s: float = 60.0
    max_decoding: int = 256  # requests on a worker that decodes
    max_prefilling: int = 65_536  # tokens queued on a worker that prefills


@dataclass(frozen=True, slots=True)
class RouterConfig:
    """`metrics_port` None serves no metrics; port 0 takes any that is free."""

    model: str
    host: str = "127.0.0.1"
    port: int = 8500
    metrics_port: int | None = None
    drain_s: float = 30.0  # what is running may go on for so long when the router stops
    max_prompt_bytes: int = 4 * 2**20
    relay: RelayPolicy = RelayPolicy()
    admission: AdmissionPolicy = AdmissionPolicy()
