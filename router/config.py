"""The router's settings, as one frozen value."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from protos.security import Security
from protos.serve import ServerLimits


@dataclass(frozen=True, slots=True)
class RelayPolicy:
    """How far the router goes for one request when workers fail. Attempts count the first one."""

    max_attempts: int = 4
    retry_delay_s: float = 0.05  # doubled with each attempt, up to a second, less some jitter
    wait_for_worker_s: float = 5.0  # for one to register when none fits


@dataclass(frozen=True, slots=True)
class SloPolicy:
    """What is promised: the first token and, on average, each later one in time, to this share of requests."""

    ttft_s: float = 1.0
    tpot_s: float = 0.1
    percentile: float = 0.9

    def __post_init__(self) -> None:
        """Raises ValueError."""
        for name in ("ttft_s", "tpot_s"):
            if not 0 < getattr(self, name) < math.inf:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be a number of seconds above 0")
        if not 0 < self.percentile < 1:
            raise ValueError(f"percentile is {self.percentile}; it must be above 0 and below 1")


@dataclass(frozen=True, slots=True)
class LimitPolicy:
    """What a worker may have before more had better wait at the router. One that has nothing is within any limit."""

    max_backlog_s: float = 10.0  # to compute the prompts that wait at a worker, as predicted
    max_backlog_tokens: int = 65536  # of these prompts, while no speed is known
    max_sequences: int | None = None  # on a decode worker; None: as many as it says it runs at once


@dataclass(frozen=True, slots=True)
class PlacementPolicy:
    """What placement assumes where nothing is measured, and what it may trade for what."""

    limits: LimitPolicy = LimitPolicy()
    transfer_bytes_per_s: float = 4e9  # of a hand-over
    max_added_step_s: float = 0.0  # a decode worker may prefill a prompt itself that holds up others no longer; 0: none
    slo: SloPolicy | None = None  # a prompt that would be late by it is prefilled by a decode worker that keeps to it
    affinity_s: float = 0.1  # how much later an answer may come for the sake of staying where its session was
    max_sessions: int = 10_000  # remembered


@dataclass(frozen=True, slots=True)
class AdmissionPolicy:
    """How many requests may wait at the router, and for how long: one that is predicted to wait longer is refused."""

    max_queued: int = 1024  # requests
    max_queued_tokens: int = 2_000_000
    max_queue_s: float = 60.0


@dataclass(frozen=True, slots=True)
class SteeringPolicy:
    """How the pools get their sizes, until somebody says otherwise.

    `is_automatic`: a planner decides. `dry_run`: it only says what it would do.
    """

    is_automatic: bool = True
    dry_run: bool = False
    every_s: float = 10.0  # from plan to plan
    flip_deadline_s: float = 600.0  # a change of a role that takes longer has failed


@dataclass(frozen=True, slots=True)
class RouterConfig:
    """`metrics_port` None serves no metrics, `http_port` None no HTTP; port 0 takes any that is free.

    Without `keys_file` no keys are asked for.
    """

    model: str
    host: str = "127.0.0.1"
    port: int = 8500
    metrics_port: int | None = None
    http_port: int | None = None  # of OpenAI's interface
    direct: bool = False  # clients may be sent to the decode workers for their answers
    kserve: bool = True  # KServe's v2 gRPC, at `port` too
    store: str = ""  # URL of the Redis that several routers share; empty: this one is alone
    store_namespace: str = "pdserve"
    drain_s: float = 30.0  # what is running may go on for so long when the router stops
    max_prompt_bytes: int = 4 * 2**20
    relay: RelayPolicy = RelayPolicy()
    admission: AdmissionPolicy = AdmissionPolicy()
    placement: PlacementPolicy = PlacementPolicy()
    slo: SloPolicy = SloPolicy()  # of the default class
    slo_classes: Mapping[str, SloPolicy] = field(default_factory=dict)  # of the others, by name
    steering: SteeringPolicy = SteeringPolicy()
    security: Security = field(default_factory=Security)
    keys_file: Path | None = None
    limits: ServerLimits = field(default_factory=ServerLimits)

    def __post_init__(self) -> None:
        """Raises Exposed."""
        self.security.check(self.host, asks_for_keys=self.keys_file is not None)
