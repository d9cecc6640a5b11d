"""What a worker tells of its inside, for people: how drafts fare, which experts are busy, what is handed over."""

from __future__ import annotations

import time

from decode.draft_log import DraftReport
from decode.draft_planner import DraftPlanner
from deploy.expert_shares import ExpertShares, LayerShares
from kvtransfer import metrics
from kvtransfer.receiver import Receiver
from kvtransfer.sender import Sender
from protos import insights_pb2, insights_pb2_grpc
from protos.calls import Context


class InsideService(insights_pb2_grpc.InsideServicer):
    """Counts since the start are those that the metrics have, which are of the process."""

    def __init__(
        self, worker_id: str, planner: DraftPlanner, experts: ExpertShares, sender: Sender, receiver: Receiver
    ) -> None:
        self._worker_id = worker_id
        self._planner = planner
        self._experts = experts
        self._sender = sender
        self._receiver = receiver
        self._started_at = time.monotonic()

    async def GetInsights(
        self, request: insights_pb2.GetInsightsRequest, context: Context
    ) -> insights_pb2.WorkerInsights:
        return insights_pb2.WorkerInsights(
            worker_id=self._worker_id,
            drafts=map(_drafts, self._planner.reports()),
            experts=map(_expert_load, self._experts.layers()),
            transfers=self._transfers(),
            draft_reason=self._planner.reason,
            uptime_s=time.monotonic() - self._started_at,
        )

    def _transfers(self) -> insights_pb2.TransferInsights:
        receiver = self._receiver
        return insights_pb2.TransferInsights(
            sent_bytes_per_s=self._sender.transferred.bytes_per_s,
            received_bytes_per_s=metrics.RECEIVED_LATELY.per_s,
            exposed_p50_s=metrics.EXPOSED_LATELY.percentile(0.5),
            exposed_p90_s=metrics.EXPOSED_LATELY.percentile(0.9),
            num_leases=receiver.leases.num_open(),
            num_expired_leases=metrics.total(metrics.LEASES_EXPIRED),
            num_quarantined_blocks=receiver.num_quarantined_blocks,
            oldest_quarantine_s=receiver.oldest_quarantine_s,
            num_failed_writes=metrics.total(metrics.FAILED_WRITES),
            num_rejected=metrics.total(metrics.REJECTED),
            num_handovers=metrics.total(metrics.HANDOVERS, outcome="ok"),
        )


def _drafts(report: DraftReport) -> insights_pb2.DraftInsights:
    return insights_pb2.DraftInsights(
        source=report.source,
        acceptance=report.acceptance,
        lengths=report.lengths,
        tokens_per_step=report.tokens_per_step,
        speedup=report.speedup,
        drafted_tokens=report.num_drafted,
        accepted_tokens=report.num_accepted,
    )


def _expert_load(layer: LayerShares) -> insights_pb2.ExpertLoad:
    return insights_pb2.ExpertLoad(layer=layer.layer, shares=layer.shares, imbalance=layer.imbalance)
