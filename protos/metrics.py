"""What Prometheus sees of the calls of every gRPC server."""

from __future__ import annotations

from prometheus_client import Counter, Gauge, Histogram

_SECONDS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0)

CALLS = Counter("pdserve_grpc_calls", "Calls that have ended, by how.", ["method", "code"])
CALLS_IN_FLIGHT = Gauge("pdserve_grpc_calls_in_flight", "Calls being served.", ["method"])
SLOW_READERS = Counter("pdserve_grpc_slow_readers", "Calls ended because their caller did not read.", ["method"])
CALL_SECONDS = Histogram("pdserve_grpc_call_seconds", "From a call's start to its end.", ["method"], buckets=_SECONDS)
