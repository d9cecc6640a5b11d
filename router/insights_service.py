"""What people see of requests and of workers: the gRPC edge."""

from __future__ import annotations

import time
from dataclasses import asdict

from protos import insights_pb2, insights_pb2_grpc
from protos.calls import Context
from protos.channel import service_errors
from protos.errors import DeadlineExceeded, InvalidArgument, ServiceError, Unavailable, Unimplemented
from router.history import History
from router.links import Links
from router.traffic import LEAST_WINDOW_S, MOST_WINDOW_S, Percentiles, Traffic, TrafficSlice
from router.workers import WorkerTable

MAX_LISTED = 500
_WINDOW_S = 60.0
_LISTED = 50
_ASK_S = 3.0  # a worker answers from its event loop, at once


class InsightsService(insights_pb2_grpc.InsightsServicer):
    def __init__(self, history: History, traffic: Traffic, table: WorkerTable, links: Links) -> None:
        self._history = history
        self._traffic = traffic
        self._table = table
        self._links = links

    async def GetTraffic(self, request: insights_pb2.GetTrafficRequest, context: Context) -> insights_pb2.Traffic:
        window_s = request.window_s if request.HasField("window_s") else _WINDOW_S
        if not LEAST_WINDOW_S <= window_s <= MOST_WINDOW_S:
            limits = f"it must be {LEAST_WINDOW_S:g} to {MOST_WINDOW_S:g} s"
            raise InvalidArgument(f"window_s is {window_s:g}; {limits}", field="window_s")
        report, now = self._traffic.report(window_s), time.time()
        return insights_pb2.Traffic(
            window_s=report.window_s,
            ttft_s=_percentiles(report.ttft_s),
            tpot_s=_percentiles(report.tpot_s),
            requests_per_s=report.requests_per_s,
            prompt_tokens_per_s=report.prompt_tokens_per_s,
            output_tokens_per_s=report.output_tokens_per_s,
            cached_share=report.cached_share,
            attainment=report.attainment,
            num_failed=report.num_failed,
            num_refused=report.num_refused,
            slices=[_slice(each, now) for each in report.slices],
            classes=[insights_pb2.ClassTraffic(**asdict(each)) for each in report.classes],
        )

    async def ListRequests(
        self, request: insights_pb2.ListRequestsRequest, context: Context
    ) -> insights_pb2.ListRequestsResponse:
        limit = request.limit if request.HasField("limit") else _LISTED
        if not 1 <= limit <= MAX_LISTED:
            raise InvalidArgument(f"limit is {limit}; it must be 1 to {MAX_LISTED}", field="limit")
        match request.order:
            case insights_pb2.REQUEST_ORDER_UNSPECIFIED | insights_pb2.REQUEST_ORDER_NEWEST:
                listed = self._history.newest(limit, running_only=request.running_only)
            case insights_pb2.REQUEST_ORDER_SLOWEST:
                listed = self._history.slowest(limit, running_only=request.running_only)
            case unknown:
                allowed = "REQUEST_ORDER_NEWEST or REQUEST_ORDER_SLOWEST"
                raise InvalidArgument(f"order is {unknown}; it must be {allowed}", field="order")
        return insights_pb2.ListRequestsResponse(requests=map(insights_pb2.RequestSummary.FromString, listed))

    async def GetWorkerInsights(
        self, request: insights_pb2.GetWorkerInsightsRequest, context: Context
    ) -> insights_pb2.WorkerInsights:
        worker = self._table.registered(request.worker_id)
        name, question = worker.id.name, insights_pb2.GetInsightsRequest()
        try:
            async with self._links.to(worker) as link:
                with service_errors(f"worker {name!r} cannot be reached at {worker.address}"):
                    return await insights_pb2_grpc.InsideStub(link.channel).GetInsights(question, timeout=_ASK_S)
        except Unimplemented:
            raise Unimplemented(f"worker {name!r} is of a version that tells nothing of its inside") from None
        except DeadlineExceeded:
            raise Unavailable(f"worker {name!r} did not answer within {_ASK_S:g} s") from None
        except ServiceError as error:  # what it has against the router is not the caller's fault
            raise Unavailable(f"worker {name!r} did not answer: {error}") from error


def _percentiles(percentiles: Percentiles) -> insights_pb2.Percentiles:
    return insights_pb2.Percentiles(**asdict(percentiles))


def _slice(each: TrafficSlice, now: float) -> insights_pb2.TrafficSlice:
    message = insights_pb2.TrafficSlice(
        requests_per_s=each.requests_per_s,
        output_tokens_per_s=each.output_tokens_per_s,
        ttft_p90_s=each.ttft_p90_s,
        tpot_p90_s=each.tpot_p90_s,
        refused_per_s=each.refused_per_s,
    )
    message.at.FromMicroseconds(round((now - each.ended_ago_s) * 1e6))
    return message
