"""Spans as a collector receives them, and what is passed on where nobody collects."""

from __future__ import annotations

import time

import pytest

from protos import tracing
from protos.otlp import exported_to
from tests.protos.collector import Collector

TRACE, CALLER = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"  # the example of the W3C recommendation
TRACEPARENT = f"00-{TRACE}-{CALLER}-01"


def test_a_tree_of_spans() -> None:
    before_s = time.time()
    with Collector() as collector:
        with (
            exported_to(collector.endpoint, "router", "router at a"),
            tracing.span("request", (("traceparent", TRACEPARENT), ("tracestate", "a=b")), request_id="r") as request,
            request.child("attempt", number=1) as attempt,
        ):
            now = time.monotonic()
            attempt.part("queue", now - 2.0, now - 0.5, num_tokens=7)
            with pytest.raises(ValueError), attempt.child("leg"):
                raise ValueError("broke")
            headers = dict(attempt.headers)
        request_, attempt_, queue, leg = map(collector.named, ("request", "attempt", "queue", "leg"))
    assert {span.trace_id for span in collector.spans} == {TRACE}
    assert request_.parent_id == CALLER and attempt_.parent_id == request_.span_id
    assert queue.parent_id == leg.parent_id == attempt_.span_id
    assert headers == {"traceparent": f"00-{TRACE}-{attempt_.span_id}-01", "tracestate": "a=b"}
    assert queue.end_s - queue.start_s == pytest.approx(1.5, abs=0.01)
    assert before_s - 2.5 < queue.start_s < before_s + 60
    assert request_.attributes == {"pdserve.request_id": "r"} and queue.attributes == {"pdserve.num_tokens": 7}
    assert [span.name for span in collector.spans if span.is_error] == ["leg"]
    assert request_.service == "router"


def test_a_caller_that_is_not_sampled_is_not_recorded_but_its_context_goes_on() -> None:
    with Collector() as collector:
        with (
            exported_to(collector.endpoint, "router", "a"),
            tracing.span("request", (("traceparent", TRACEPARENT[:-1] + "0"),)) as span,
        ):
            assert dict(span.headers)["traceparent"].startswith(f"00-{TRACE}-")
            assert dict(span.headers)["traceparent"].endswith("-00")
        assert collector.spans == []


def test_without_a_collector_the_context_goes_on_as_it_came() -> None:
    headers = (("traceparent", TRACEPARENT),)
    with tracing.span("request", headers) as span, span.child("attempt") as attempt:
        attempt.part("queue", 0.0, 1.0)
        assert attempt.headers == headers


@pytest.mark.parametrize("wrong", ["", "00-xyz", "0" * 5000, "00-" + "0" * 32 + "-" + "0" * 16 + "-01", "\x00"])
def test_a_wrong_context_begins_a_trace_of_its_own(wrong: str) -> None:
    with Collector() as collector:
        headers = tracing.headers_of([("traceparent", wrong)])
        with exported_to(collector.endpoint, "router", "a"), tracing.span("request", headers):
            pass
        assert collector.named("request").parent_id == ""


def test_only_the_trace_context_is_taken_from_a_call() -> None:
    metadata: list[tuple[str, str | bytes]] = [
        ("traceparent", TRACEPARENT),
        ("authorization", "Bearer secret"),
        ("tracestate", b"bytes"),
        ("x", "y"),
    ]
    assert tracing.headers_of(metadata) == (("traceparent", TRACEPARENT),)
    assert tracing.headers_of(None) == ()


@pytest.mark.timeout(20)  # without an end of its own the last export would take 25 s
def test_a_collector_that_is_away_holds_up_nothing() -> None:
    collector = Collector()  # its port is taken, and nobody listens
    with exported_to(collector.endpoint, "router", "a"):
        for _ in range(5000):  # more than are kept
            with tracing.span("request", ()):
                pass
