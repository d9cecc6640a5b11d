"""What Prometheus sees of the router."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence

from prometheus_client import Counter, Gauge, Histogram
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from protos import inference_pb2 as pb
from router.breaker import Breakers
from router.fleet_models import KindModel
from router.placement import Placement
from router.timeline import RequestClock
from router.workers import WorkerTable

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
_TOKEN_SECONDS = (0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1.0)

REQUESTS = Counter("pdserve_router_requests", "Requests that have ended, by how.", ["outcome"])
IN_FLIGHT = Gauge("pdserve_router_requests_in_flight", "Requests being served.")
TOKENS = Counter(
    "pdserve_router_tokens",
    "Tokens of finished requests: prompt by where its KV came from, and output.",
    ["kind"],
)
TTFT_SECONDS = Histogram("pdserve_router_ttft_seconds", "From request to first token.", buckets=_SECONDS)
TPOT_SECONDS = Histogram(
    "pdserve_router_tpot_seconds", "Per token after the first, as the mean.", buckets=_TOKEN_SECONDS
)
SLO_ANSWERS = Counter(
    "pdserve_router_slo_answers", "Answers by SLO class, and whether they met both its SLOs.", ["slo_class", "met"]
)
STAGE_SECONDS = Histogram("pdserve_router_stage_seconds", "Parts of a request.", ["stage"], buckets=_SECONDS)
RETRIES = Counter("pdserve_router_retries", "Requests placed again before their first token.")
RESUMES = Counter("pdserve_router_resumes", "Requests placed again after their first token.")
DIRECT = Counter("pdserve_router_direct_attempts", "Attempts whose answer a client reads at the decode worker.")
MOVES = Counter("pdserve_router_moves", "Running sequences taken away from a decode worker that leaves.", ["outcome"])
FLIPS = Counter(
    "pdserve_router_flips", "Changes of a worker's role that were asked for here, by how they ended.", ["outcome"]
)
FLIP_SECONDS = Histogram(
    "pdserve_router_flip_seconds",
    "From the change of a role until nothing of the old one ran there any more.",
    buckets=_SECONDS,
)
FLIP_MOVES = Counter("pdserve_router_flip_moves", "Running sequences that left a worker for a change of its role.")
PLANNER_FAILURES = Counter("pdserve_router_planner_failures", "Plans that came to nothing, as the planner failed.")
STORE_AWAY = Gauge("pdserve_router_store_away", "1 while the store that routers share does not answer.")
PLACEMENTS = Counter("pdserve_router_placements", "Attempts, by what decided where they went.", ["grounds"])
TTFT_RATIO = Histogram(
    "pdserve_router_ttft_observed_ratio",
    "From placement to first token, over what was predicted: 1 is as predicted.",
    buckets=(0.1, 0.25, 0.5, 0.67, 0.8, 0.9, 1.1, 1.25, 1.5, 2.0, 4.0, 10.0),
)
PREFIX_TOKENS = Counter(
    "pdserve_router_prefix_tokens",
    "Prompt tokens in workers' caches: predicted at placement, and found, where prefilled and where decoded.",
    ["pool", "kind"],
)
WAIT_SECONDS = Histogram(
    "pdserve_router_wait_seconds", "From asking to be placed to having been, of those admitted.", buckets=_SECONDS
)
REFUSALS = Counter(
    "pdserve_router_refusals",
    "Requests that were not admitted: full, wait, deadline (at once), late (after waiting), limit (of their key).",
    ["reason"],
)
RETRIES_REFUSED = Counter("pdserve_router_retries_refused", "Failures that the retry budget left as they were.")
LEG_FAILURES = Counter("pdserve_router_leg_failures", "Calls to workers that failed, by reason.", ["reason"])

UNKNOWN_ROUTE = "unknown"  # whatever was asked for: paths are the clients' own, and would be labels without number
HTTP_REQUESTS = Counter("pdserve_http_requests", "HTTP requests that have ended, by how.", ["route", "status"])
HTTP_SECONDS = Histogram(
    "pdserve_http_request_seconds",
    "From a request's headers to the end of its answer.",
    ["route"],
    buckets=_SECONDS,
)


def observe_http(route: str, status: int, elapsed_s: float) -> None:
    HTTP_REQUESTS.labels(route, str(status)).inc()
    HTTP_SECONDS.labels(route).observe(elapsed_s)


def observe(summary: pb.GenerateResponse) -> None:
    usage, timeline = summary.usage, summary.timeline
    kinds = {
        "prompt": usage.prompt_tokens,
        "prompt_computed": usage.prefill.computed,
        "prompt_cached": usage.prefill.cached,
        "decode_received": usage.decode.received_tokens,
        "decode_cached": usage.decode.cached_tokens if usage.disaggregated else 0,
        "decode_recomputed": usage.decode.recomputed_tokens,
        "output": usage.output_tokens,
    }
    for kind, number in kinds.items():
        TOKENS.labels(kind).inc(number)
    TTFT_SECONDS.observe(timeline.ttft_s)
    if usage.output_tokens > 1:
        TPOT_SECONDS.observe(timeline.tpot_s)
    for stage in timeline.stages:
        STAGE_SECONDS.labels(stage.name).observe(stage.duration_s)


def observe_ttft(placement: Placement, clock: RequestClock) -> None:
    """Of an attempt whose first token is there."""
    if placement.ttft_s:
        TTFT_RATIO.observe((clock.attempt_token_at - clock.placed_at) / placement.ttft_s)


def observe_prefix(placement: Placement, usage: pb.Usage) -> None:
    """Of the last attempt: its placement, and what came of it."""
    PREFIX_TOKENS.labels("prefill", "predicted").inc(placement.num_cached_tokens)
    PREFIX_TOKENS.labels("prefill", "found").inc(usage.prefill.cached)
    if usage.disaggregated:
        PREFIX_TOKENS.labels("decode", "predicted").inc(placement.num_held_tokens)
        PREFIX_TOKENS.labels("decode", "found").inc(usage.decode.cached_tokens)


class WorkersCollector(Collector):
    """Workers by role and state, and their circuit breakers."""

    def __init__(self, table: WorkerTable, breakers: Breakers) -> None:
        self._table = table
        self._breakers = breakers

    def collect(self) -> Iterable[GaugeMetricFamily]:
        family = GaugeMetricFamily("pdserve_router_workers", "Registered workers.", labels=["role", "state"])
        for labels, number in self._counts():
            family.add_metric(labels, number)
        yield family
        about = "Circuit breakers of workers: 0 closed, 1 half open, 2 open."
        family, now = GaugeMetricFamily("pdserve_router_breaker_state", about, labels=["worker"]), time.monotonic()
        for worker in self._table.workers():
            family.add_metric([worker.profile.id.name], self._breakers.state(worker.profile.id, now).value)
        yield family

    def _counts(self) -> Iterator[tuple[list[str], int]]:
        kinds = [(worker.role.name or "", self._table.state(worker).name) for worker in self._table.workers()]
        for role, state in sorted(set(kinds)):
            yield [role.lower(), state.lower()], kinds.count((role, state))


class StepModelsCollector(Collector):
    """How well the step times of each kind of worker are known. `kinds` is `router.fleet_models.FleetModels.kinds`."""

    def __init__(self, kinds: Callable[[], Sequence[KindModel]]) -> None:
        self._kinds = kinds

    def collect(self) -> Iterable[GaugeMetricFamily]:
        about, labels = "How well the step times of a kind of worker are known, 0 to 1.", ["kind", "step"]
        confidence = GaugeMetricFamily("pdserve_router_step_time_confidence", about, labels=labels)
        about = "How far off step times were predicted lately, relative, as a decayed mean."
        error = GaugeMetricFamily("pdserve_router_step_time_error_ratio", about, labels=labels)
        for each in self._kinds():
            confidence.add_metric([each.kind, "prefill"], each.prefill_confidence)
            confidence.add_metric([each.kind, "decode"], each.decode_confidence)
            error.add_metric([each.kind, "prefill"], each.prefill_error)
            error.add_metric([each.kind, "decode"], each.decode_error)
        return confidence, error


class QueueCollector(Collector):
    """What waits at the gate, by priority. `counts` is `router.admission.Gate.counts`."""

    def __init__(self, counts: Callable[[], Sequence[tuple[int, int]]]) -> None:
        self._counts = counts

    def collect(self) -> Iterable[GaugeMetricFamily]:
        about = "Requests that wait for a worker to have room."
        requests = GaugeMetricFamily("pdserve_router_queued_requests", about, labels=["priority"])
        about = "Tokens that the requests that wait are expected to take."
        tokens = GaugeMetricFamily("pdserve_router_queued_tokens", about, labels=["priority"])
        for priority, (num_requests, num_tokens) in enumerate(self._counts()):
            requests.add_metric([str(priority)], num_requests)
            tokens.add_metric([str(priority)], num_tokens)
        return requests, tokens
