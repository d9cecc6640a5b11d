"""Where a request's time went, over all processes: spans with the W3C trace context, passed on as gRPC metadata.

Off until `protos.otlp` is installed: a span then costs next to nothing, and passes the caller's context on.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextvars import ContextVar
from types import TracebackType
from typing import Protocol, Self, TypeAlias

Headers: TypeAlias = tuple[tuple[str, str], ...]  # of the trace context: metadata for the next process
Value: TypeAlias = str | int | float | bool

_NAMES = ("traceparent", "tracestate")
_MAX_CHARACTERS = 512  # what W3C asks everyone to pass on at least

incoming: ContextVar[Headers] = ContextVar("incoming_trace_headers", default=())  # set by the door, for one call


class Span(Protocol):
    """A part of a request, from `with` to its end; an exception is its error."""

    @property
    def headers(self) -> Headers:
        """What makes the spans of the next process parts of this one."""
        ...

    def child(self, name: str, **attributes: Value) -> Span: ...

    def part(self, name: str, start_s: float, end_s: float, **attributes: Value) -> None:
        """One that has ended already; on the clock of `time.monotonic`."""
        ...

    def set(self, **attributes: Value) -> None: ...
    def __enter__(self) -> Self: ...
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None: ...


class Tracer(Protocol):
    def span(self, name: str, parent: Headers, **attributes: Value) -> Span: ...


class Unrecorded:
    """A span that nobody looks at."""

    def __init__(self, headers: Headers = ()) -> None:
        self.headers = headers

    def child(self, name: str, **attributes: Value) -> Span:
        return self

    def part(self, name: str, start_s: float, end_s: float, **attributes: Value) -> None:
        return

    def set(self, **attributes: Value) -> None:
        return

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        return


NO_SPAN = Unrecorded()
_tracer: Tracer | None = None


def install(tracer: Tracer | None) -> None:
    """For the whole process, from now on. None: off."""
    global _tracer
    _tracer = tracer


def span(name: str, parent: Headers, **attributes: Value) -> Span:
    return Unrecorded(parent) if _tracer is None else _tracer.span(name, parent, **attributes)


def headers_of(metadata: Iterable[tuple[str, str | bytes]] | None) -> Headers:
    """The trace context among a call's metadata or a request's headers."""
    return tuple(
        (name, value)
        for name, value in metadata or ()
        if name in _NAMES and isinstance(value, str) and len(value) <= _MAX_CHARACTERS
    )
