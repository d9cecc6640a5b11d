"""What Prometheus sees of decode."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from functools import partial

from prometheus_client import REGISTRY, Counter, Gauge, Histogram
from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily
from prometheus_client.registry import Collector

from decode.coverage import ExpertCoverage
from decode.draft_meter import DraftMeter
from model.runner import VerifiedDraft
from model.sampling_params import MAX_DRAFT_TOKENS
from protos.inference_pb2 import DecodeStats

_SECONDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0)
_LENGTHS = (0, 1, 2, 3, 4, 5, 6, 7, 8, 12, 16, 32)
_EXPERTS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 256)

REQUESTS = Counter("pdserve_decode_requests", "Streams opened.")
OUTPUT_TOKENS = Counter("pdserve_decode_output_tokens", "Tokens streamed, the prefill worker's first not among them.")
TOKENS = Counter("pdserve_decode_tokens", "Tokens by where their KV came from.", ["source"])
PREEMPTIONS = Counter("pdserve_decode_preemptions", "Times a sequence dropped its KV for want of blocks.")
STAGE_SECONDS = Histogram("pdserve_decode_stage_seconds", "Seconds per stage.", ["stage"], buckets=_SECONDS)
DEPARTURES = Counter("pdserve_decode_departures", "Hand-overs of running sequences to other workers.", ["outcome"])
DEPARTURE_PAUSE_SECONDS = Histogram(
    "pdserve_decode_departure_pause_seconds", "For how long a sequence stood still to be handed over.", buckets=_SECONDS
)

DRAFT_FAILURES = Counter("pdserve_draft_failures", "Sequences that draft no more because the drafter failed.")
DECISIONS = Counter("pdserve_draft_decisions", "Steps by why so many tokens were drafted in them.", ["reason"])
EXPERTS = Histogram(
    "pdserve_draft_verify_experts", "Distinct experts per layer of a step that verifies drafts.", buckets=_EXPERTS
)
TOKENS_PER_STEP = Gauge("pdserve_draft_tokens_per_step", "Tokens a sequence emits in a step that drafts.", ["source"])
COST = Gauge("pdserve_draft_cost_ratio", "What drafting one token costs, in plain steps.", ["source"])
VERIFY_COST = Gauge("pdserve_draft_verify_cost_ratio", "What a step that verifies costs, in plain steps.", ["source"])
SPEEDUP = Gauge("pdserve_draft_speedup_ratio", "Of steps that draft, against the forecast plain step.", ["source"])
STEP_EXPERTS = Gauge("pdserve_draft_experts", "Distinct experts per layer of a step that drafts.", ["source"])
ACCEPTANCE = Gauge(
    "pdserve_draft_acceptance_ratio", "Expected chance of a draft, if those before it stand.", ["position"]
)
BETA = Gauge("pdserve_draft_coverage_beta", "0: drafts wake no further experts; 1: as many as independent tokens.")


def observe(stats: DecodeStats) -> None:
    """Counts a sequence that ended by itself."""
    TOKENS.labels("received").inc(stats.received_tokens)
    TOKENS.labels("cached").inc(stats.cached_tokens)
    TOKENS.labels("computed").inc(stats.computed_tokens)
    TOKENS.labels("recomputed").inc(stats.recomputed_tokens)
    PREEMPTIONS.inc(stats.num_preemptions)
    STAGE_SECONDS.labels("wait").observe(stats.wait_s)
    STAGE_SECONDS.labels("decode").observe(stats.decode_s)


class DraftCounts(Collector):
    """Lengths of drafts, asked for, drafted and accepted, as plain tallies: a label look-up for each draft is dear.

    `judged` are those whose predecessors all stand: accepted / judged of a position is its acceptance. The position of
    a node of a tree is its place among them, the best first, and all are judged.
    """

    def __init__(self) -> None:
        self._asked, self._drafted, self._judged, self._accepted = ([0] * (MAX_DRAFT_TOKENS + 1) for _ in range(4))
        self._accepted_nodes = [0] * (MAX_DRAFT_TOKENS + 1)
        self._num_emitted = 0

    def asked(self, num_draft_tokens: Iterable[int]) -> None:
        """By sequence of a step."""
        for length in num_draft_tokens:
            self._asked[length] += 1

    def verified(self, draft: VerifiedDraft, num_emitted: int) -> None:
        """Of one sequence in one step. Fewer may be emitted than stand, where the answer ends."""
        self._drafted[draft.num_drafted] += 1
        self._num_emitted += num_emitted
        if draft.nodes is None:
            num_accepted = len(draft.tokens) - 1
            self._judged[min(num_accepted + 1, draft.num_drafted)] += 1
            self._accepted[num_accepted] += 1
            return
        self._judged[draft.num_drafted] += 1
        for node in draft.nodes:
            self._accepted_nodes[node + 1] += 1

    def collect(self) -> Iterator[CounterMetricFamily | HistogramMetricFamily]:
        yield self._lengths()
        drafted = CounterMetricFamily(
            "pdserve_draft_drafted_tokens", "Tokens guessed, by place in the draft.", labels=["position"]
        )
        judged = CounterMetricFamily(
            "pdserve_draft_judged_tokens", "Of those, the ones behind guesses that all stand.", labels=["position"]
        )
        accepted = CounterMetricFamily(
            "pdserve_draft_accepted_tokens", "Of those, the ones that stand.", labels=["position"]
        )
        longest = max((length for length, count in enumerate(self._drafted) if count), default=0)
        for position in range(1, longest + 1):
            label = [str(position)]
            drafted.add_metric(label, sum(self._drafted[position:]))
            judged.add_metric(label, sum(self._judged[position:]))
            accepted.add_metric(label, sum(self._accepted[position:]) + self._accepted_nodes[position])
        yield from (drafted, judged, accepted)
        yield CounterMetricFamily(
            "pdserve_draft_emitted_tokens", "Tokens emitted by steps that verified drafts.", value=self._num_emitted
        )

    def _lengths(self) -> HistogramMetricFamily:
        cumulated = list(itertools.accumulate(self._asked))
        buckets = [(str(float(bound)), float(cumulated[bound])) for bound in _LENGTHS]
        return HistogramMetricFamily(
            "pdserve_draft_length",
            "Drafts asked for of a sequence in a step.",
            buckets=[*buckets, ("+Inf", float(cumulated[-1]))],
            sum_value=sum(length * count for length, count in enumerate(self._asked)),
        )


DRAFTS = DraftCounts()
REGISTRY.register(DRAFTS)


def watch_drafting(
    meter: DraftMeter, acceptance: Callable[[int], float], longest_draft: int, coverage: ExpertCoverage | None
) -> None:
    """Read when scraped; `acceptance` by position, from 0. A model without experts has no `coverage`."""
    for source, sums in (("forecast", meter.forecast), ("measured", meter.measured)):
        TOKENS_PER_STEP.labels(source).set_function(partial(meter.tokens_per_step, sums))
        COST.labels(source).set_function(partial(meter.draft_cost, sums))
        VERIFY_COST.labels(source).set_function(partial(meter.verify_cost, sums))
        SPEEDUP.labels(source).set_function(partial(meter.speedup, sums))
        if coverage is not None:
            STEP_EXPERTS.labels(source).set_function(partial(meter.experts_per_step, sums))
    for position in range(longest_draft):
        ACCEPTANCE.labels(str(position + 1)).set_function(partial(acceptance, position))
    if coverage is not None:
        BETA.set_function(partial(getattr, coverage, "beta"))
