"""A cluster as `PdserveClient` tells of it, and what was decided: frozen values, and how messages become them."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime

from protos import workers_pb2

ROLES = {"prefill": workers_pb2.ROLE_PREFILL, "decode": workers_pb2.ROLE_DECODE, "both": workers_pb2.ROLE_BOTH}
STATES = {
    workers_pb2.WORKER_STATE_UNSPECIFIED: "unknown",
    workers_pb2.WORKER_STATE_READY: "ready",
    workers_pb2.WORKER_STATE_DRAINING: "draining",
    workers_pb2.WORKER_STATE_LOST: "lost",
    workers_pb2.WORKER_STATE_SILENT: "silent",
}
ROLE_NAMES = {role: name for name, role in ROLES.items()}


@dataclass(frozen=True, slots=True)
class WorkerStatus:
    """A worker as the router knows it; its load as last reported."""

    worker_id: str
    epoch: str
    address: str
    metrics_address: str
    role: str  # prefill, decode, both
    flippable: bool
    state: str  # ready, draining, silent, lost
    model_name: str
    runner: str
    kernels: str
    drafter: str
    num_blocks: int
    num_free_blocks: int
    num_used_blocks: int
    num_quarantined_blocks: int
    queued_prefill_tokens: int
    num_waiting: int
    num_running: int
    prefill_tokens_per_s: float
    decode_step_s: float
    reported_ago_s: float
    num_requests: int  # that the router has there
    num_known_blocks: int | None = None  # of its prefix cache; None while the router waits for a dump
    transfer_bytes_per_s: float = 0.0  # of its hand-overs lately; 0 while there was none

    @staticmethod
    def from_message(message: workers_pb2.WorkerStatus) -> WorkerStatus:
        hello, load = message.hello, message.load
        return WorkerStatus(
            worker_id=hello.worker_id,
            epoch=hello.epoch,
            address=hello.address,
            metrics_address=hello.metrics_address,
            role=ROLE_NAMES.get(message.role, "unknown"),
            flippable=hello.flippable,
            state=STATES[load.state],
            model_name=hello.model_name,
            runner=hello.runner,
            kernels=hello.kernels,
            drafter=hello.drafter,
            num_blocks=hello.num_blocks,
            num_free_blocks=load.num_free_blocks,
            num_used_blocks=load.num_used_blocks,
            num_quarantined_blocks=load.num_quarantined_blocks,
            queued_prefill_tokens=load.queued_prefill_tokens,
            num_waiting=load.num_waiting,
            num_running=load.num_running,
            prefill_tokens_per_s=load.prefill_tokens_per_s,
            decode_step_s=load.decode_step_s,
            reported_ago_s=message.reported_ago_s,
            num_requests=message.num_requests,
            num_known_blocks=message.num_known_blocks if message.HasField("num_known_blocks") else None,
            transfer_bytes_per_s=load.transfer_bytes / load.transfer_s if load.transfer_s > 0 else 0.0,
        )


@dataclass(frozen=True, slots=True)
class Status:
    model_name: str
    num_requests_in_flight: int
    uptime_s: float
    metrics_address: str  # of the router
    workers: tuple[WorkerStatus, ...]
    is_draining: bool = False  # the router
    num_requests_waiting: int = 0  # of those in flight: for a worker to have room

    @staticmethod
    def from_message(message: workers_pb2.Status) -> Status:
        return Status(
            model_name=message.model_name,
            num_requests_in_flight=message.num_requests_in_flight,
            uptime_s=message.uptime_s,
            metrics_address=message.metrics_address,
            workers=tuple(WorkerStatus.from_message(each) for each in message.workers),
            is_draining=message.draining,
            num_requests_waiting=message.num_requests_waiting,
        )


@dataclass(frozen=True, slots=True)
class Decision:
    """What was decided at a router, by whom and why."""

    at: datetime  # in UTC
    what: str  # role, drain, no drain; plan, proposal, manual, auto, frozen; flip done, flip failed
    worker_id: str  # empty where it is about the pools
    role: str  # of what is a role or a flip
    key: str  # the name of it; empty where none is asked for
    router: str  # its address
    reason: str = ""
    gain: float = 0.0  # of a plan or a proposal: requests a second within the SLOs, as predicted
    num_prefill: int = 0  # of what is about the pools
    num_decode: int = 0
    took_s: float = 0.0  # of a flip
    num_moved: int = 0

    @staticmethod
    def from_message(message: workers_pb2.Decision) -> Decision:
        return Decision(
            at=message.at.ToDatetime(UTC),
            what=message.what,
            worker_id=message.worker_id,
            role=message.role,
            key=message.key,
            router=message.router,
            reason=message.reason,
            gain=message.gain,
            num_prefill=message.num_prefill,
            num_decode=message.num_decode,
            took_s=message.took_s,
            num_moved=message.num_moved,
        )
