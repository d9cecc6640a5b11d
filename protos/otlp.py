"""Spans to an OpenTelemetry collector, over OTLP/gRPC. The only file that imports opentelemetry.

What is sampled, and how spans are batched, is set with OpenTelemetry's own variables: OTEL_TRACES_SAMPLER, OTEL_BSP_...
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Self

from opentelemetry import trace
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import Status, StatusCode
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from protos import tracing
from protos.tracing import Headers, Span, Value

_EXPORT_TIMEOUT_S = 5.0
_LAST_EXPORT_S = 3.0
_propagator = TraceContextTextMapPropagator()


@contextmanager
def exported_to(endpoint: str, service: str, instance: str) -> Iterator[None]:
    """`endpoint` like http://127.0.0.1:4317 (https: TLS). On leaving, what is not exported yet is, for some seconds."""
    resource = Resource.create({"service.name": service, "service.instance.id": instance})
    provider = TracerProvider(resource=resource, shutdown_on_exit=False)
    exporter = OTLPSpanExporter(endpoint=endpoint, timeout=_EXPORT_TIMEOUT_S)
    provider.add_span_processor(BatchSpanProcessor(exporter))
    tracing.install(_OtlpTracer(provider.get_tracer("pdserve")))
    try:
        yield
    finally:
        tracing.install(None)
        with _after(_LAST_EXPORT_S, exporter.shutdown):  # it ends its waiting for a collector that is away
            provider.shutdown()


@contextmanager
def _after(delay_s: float, act: Callable[[], None]) -> Iterator[None]:
    timer = threading.Timer(delay_s, act)
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        timer.join()


class _OtlpTracer:
    def __init__(self, tracer: trace.Tracer) -> None:
        self._tracer = tracer

    def span(self, name: str, parent: Headers, **attributes: Value) -> Span:
        return _OtlpSpan(self._tracer, name, parent, attributes)


class _OtlpSpan:
    def __init__(self, tracer: trace.Tracer, name: str, parent: Headers, attributes: dict[str, Value]) -> None:
        self._tracer = tracer
        self._span = tracer.start_span(name, _propagator.extract(dict(parent)), attributes=_named(attributes))
        carrier: dict[str, str] = {}
        _propagator.inject(carrier, trace.set_span_in_context(self._span))
        self.headers: Headers = tuple(carrier.items())

    def child(self, name: str, **attributes: Value) -> Span:
        return _OtlpSpan(self._tracer, name, self.headers, attributes)

    def part(self, name: str, start_s: float, end_s: float, **attributes: Value) -> None:
        context = trace.set_span_in_context(self._span)
        part = self._tracer.start_span(name, context, attributes=_named(attributes), start_time=_unix_ns(start_s))
        part.end(_unix_ns(end_s))

    def set(self, **attributes: Value) -> None:
        self._span.set_attributes(_named(attributes))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if isinstance(error, asyncio.CancelledError | GeneratorExit):
            self._span.set_attribute("pdserve.cancelled", True)
        elif error is not None:
            self._span.set_status(Status(StatusCode.ERROR, str(error)))
        self._span.end()


def _named(attributes: dict[str, Value]) -> dict[str, Value]:
    return {f"pdserve.{name}": value for name, value in attributes.items()}


def _unix_ns(monotonic_s: float) -> int:
    return time.time_ns() - round((time.monotonic() - monotonic_s) * 1e9)
