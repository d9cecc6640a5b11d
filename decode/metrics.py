"""What Prometheus sees of decode."""

from __future__ import annotations

from prometheus_client import Counter, Histogram

from protos.inference_pb2 import DecodeStats

_SECONDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0)

REQUESTS = Counter("pdserve_decode_requests", "Streams opened.")
OUTPUT_TOKENS = Counter("pdserve_decode_output_tokens", "Tokens streamed, the prefill worker's first not among them.")
TOKENS = Counter("pdserve_decode_tokens", "Tokens by where their KV came from.", ["source"])
PREEMPTIONS = Counter("pdserve_decode_preemptions", "Times a sequence dropped its KV for want of blocks.")
STAGE_SECONDS = Histogram("pdserve_decode_stage_seconds", "Seconds per stage.", ["stage"], buckets=_SECONDS)


def observe(stats: DecodeStats) -> None:
    """Counts a sequence that ended by itself."""
    TOKENS.labels("received").inc(stats.received_tokens)
    TOKENS.labels("cached").inc(stats.cached_tokens)
    TOKENS.labels("computed").inc(stats.computed_tokens)
    TOKENS.labels("recomputed").inc(stats.recomputed_tokens)
    PREEMPTIONS.inc(stats.num_preemptions)
    STAGE_SECONDS.labels("wait").observe(stats.wait_s)
    STAGE_SECONDS.labels("decode").observe(stats.decode_s)
