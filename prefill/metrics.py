"""What Prometheus sees of prefill."""

from __future__ import annotations

from prometheus_client import Counter, Histogram

from protos.prefill_pb2 import PrefillStats

_SECONDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0)

REQUESTS = Counter("pdserve_prefill_requests", "Sequences accepted for prefill.")
RESERVE_RETRIES = Counter("pdserve_prefill_reserve_retries", "Times a decode worker had no room yet.")
TOKENS = Counter("pdserve_prefill_tokens", "Prompt tokens by where their KV came from.", ["source"])
STAGE_SECONDS = Histogram("pdserve_prefill_stage_seconds", "Seconds per stage.", ["stage"], buckets=_SECONDS)


def observe(stats: PrefillStats) -> None:
    TOKENS.labels("computed").inc(stats.prompt_tokens.computed)
    TOKENS.labels("cached").inc(stats.prompt_tokens.cached)
    STAGE_SECONDS.labels("queue").observe(stats.queue_s)
    STAGE_SECONDS.labels("compute").observe(stats.compute_s)
    STAGE_SECONDS.labels("handover").observe(stats.handover_s)
