"""What `PdserveClient` tells of traffic, of requests and of a worker's inside: frozen values, made of messages."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime

from protos import insights_pb2 as pb
from protos.values import Timeline


@dataclass(frozen=True, slots=True)
class Percentiles:
    """Of times, in seconds; within 1 %. All are 0 if there are none."""

    count: int
    p50: float
    p90: float
    p99: float

    @staticmethod
    def from_message(message: pb.Percentiles) -> Percentiles:
        return Percentiles(message.count, message.p50, message.p90, message.p99)


@dataclass(frozen=True, slots=True)
class TrafficSlice:
    at: datetime  # its end, in UTC
    requests_per_s: float
    output_tokens_per_s: float
    ttft_p90_s: float
    tpot_p90_s: float
    refused_per_s: float

    @staticmethod
    def from_message(message: pb.TrafficSlice) -> TrafficSlice:
        return TrafficSlice(
            at=message.at.ToDatetime(UTC),
            requests_per_s=message.requests_per_s,
            output_tokens_per_s=message.output_tokens_per_s,
            ttft_p90_s=message.ttft_p90_s,
            tpot_p90_s=message.tpot_p90_s,
            refused_per_s=message.refused_per_s,
        )


@dataclass(frozen=True, slots=True)
class ClassTraffic:
    """Of the answers of one SLO class. `attainment`: the share that met its SLOs, `share` that which is to."""

    slo_class: str
    num_answers: int
    attainment: float
    share: float

    @staticmethod
    def from_message(message: pb.ClassTraffic) -> ClassTraffic:
        return ClassTraffic(message.slo_class, message.num_answers, message.attainment, message.share)


@dataclass(frozen=True, slots=True)
class Traffic:
    window_s: float  # that it covers
    ttft_s: Percentiles
    tpot_s: Percentiles
    requests_per_s: float
    prompt_tokens_per_s: float  # as the next, of answers that ended
    output_tokens_per_s: float
    cached_share: float
    attainment: float
    num_failed: int
    num_refused: int
    slices: tuple[TrafficSlice, ...]  # oldest first
    classes: tuple[ClassTraffic, ...] = ()  # the default one first; none where it is the only one

    @staticmethod
    def from_message(message: pb.Traffic) -> Traffic:
        return Traffic(
            window_s=message.window_s,
            ttft_s=Percentiles.from_message(message.ttft_s),
            tpot_s=Percentiles.from_message(message.tpot_s),
            requests_per_s=message.requests_per_s,
            prompt_tokens_per_s=message.prompt_tokens_per_s,
            output_tokens_per_s=message.output_tokens_per_s,
            cached_share=message.cached_share,
            attainment=message.attainment,
            num_failed=message.num_failed,
            num_refused=message.num_refused,
            slices=tuple(map(TrafficSlice.from_message, message.slices)),
            classes=tuple(map(ClassTraffic.from_message, message.classes)),
        )


@dataclass(frozen=True, slots=True)
class RequestSummary:
    request_id: str
    received_at: datetime  # in UTC
    state: str  # queued, prefill, decode, done, failed, cancelled
    error: str
    prefill_worker: str
    decode_worker: str
    num_prompt_tokens: int
    num_cached_tokens: int
    num_output_tokens: int
    timeline: Timeline
    num_retries: int
    num_resumes: int
    num_moves: int
    tenant: str
    slo_class: str = ""  # empty: the default one

    @staticmethod
    def from_message(message: pb.RequestSummary) -> RequestSummary:
        return RequestSummary(
            request_id=message.request_id,
            received_at=message.received_at.ToDatetime(UTC),
            state=message.state,
            error=message.error,
            prefill_worker=message.prefill_worker,
            decode_worker=message.decode_worker,
            num_prompt_tokens=message.num_prompt_tokens,
            num_cached_tokens=message.num_cached_tokens,
            num_output_tokens=message.num_output_tokens,
            timeline=Timeline.from_message(message.timeline),
            num_retries=message.num_retries,
            num_resumes=message.num_resumes,
            num_moves=message.num_moves,
            tenant=message.tenant,
            slo_class=message.slo_class,
        )


@dataclass(frozen=True, slots=True)
class DraftInsights:
    source: str  # ngram, eagle, medusa, model
    acceptance: tuple[float, ...]  # by position
    lengths: tuple[int, ...]  # times that a sequence drafted 0, 1, 2, ... tokens
    tokens_per_step: float
    speedup: float  # 0: not known
    drafted_tokens: int
    accepted_tokens: int

    @staticmethod
    def from_message(message: pb.DraftInsights) -> DraftInsights:
        return DraftInsights(
            source=message.source,
            acceptance=tuple(message.acceptance),
            lengths=tuple(message.lengths),
            tokens_per_step=message.tokens_per_step,
            speedup=message.speedup,
            drafted_tokens=message.drafted_tokens,
            accepted_tokens=message.accepted_tokens,
        )


@dataclass(frozen=True, slots=True)
class ExpertLoad:
    layer: int
    shares: tuple[float, ...]  # they sum to 1
    imbalance: float  # 1 is even

    @staticmethod
    def from_message(message: pb.ExpertLoad) -> ExpertLoad:
        return ExpertLoad(message.layer, tuple(message.shares), message.imbalance)


@dataclass(frozen=True, slots=True)
class TransferInsights:
    sent_bytes_per_s: float
    received_bytes_per_s: float
    exposed_p50_s: float
    exposed_p90_s: float
    num_leases: int
    num_expired_leases: int
    num_quarantined_blocks: int
    oldest_quarantine_s: float
    num_failed_writes: int
    num_rejected: int
    num_handovers: int

    @staticmethod
    def from_message(message: pb.TransferInsights) -> TransferInsights:
        return TransferInsights(
            sent_bytes_per_s=message.sent_bytes_per_s,
            received_bytes_per_s=message.received_bytes_per_s,
            exposed_p50_s=message.exposed_p50_s,
            exposed_p90_s=message.exposed_p90_s,
            num_leases=message.num_leases,
            num_expired_leases=message.num_expired_leases,
            num_quarantined_blocks=message.num_quarantined_blocks,
            oldest_quarantine_s=message.oldest_quarantine_s,
            num_failed_writes=message.num_failed_writes,
            num_rejected=message.num_rejected,
            num_handovers=message.num_handovers,
        )


@dataclass(frozen=True, slots=True)
class WorkerInsights:
    worker_id: str
    drafts: tuple[DraftInsights, ...]
    experts: tuple[ExpertLoad, ...]
    transfers: TransferInsights
    draft_reason: str
    uptime_s: float

    @staticmethod
    def from_message(message: pb.WorkerInsights) -> WorkerInsights:
        return WorkerInsights(
            worker_id=message.worker_id,
            drafts=tuple(map(DraftInsights.from_message, message.drafts)),
            experts=tuple(map(ExpertLoad.from_message, message.experts)),
            transfers=TransferInsights.from_message(message.transfers),
            draft_reason=message.draft_reason,
            uptime_s=message.uptime_s,
        )
