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
class RouterConfig:
    """`metrics_port` None serves no metrics, `http_port` None no HTTP; port 0 takes any that is free."""

    model: str
    host: str = "127.0.0.1"
    port: int = 8500
    metrics_port: int | None = None
    http_port: int | None = None  # of OpenAI's interface
    kserve: bool = True  # KServe's v2 gRPC, at `port` too
    drain_s: float = 30.0  # what is running may go on for so long when the router stops
    max_prompt_bytes: int = 4 * 2**20
    relay: RelayPolicy = RelayPolicy()
