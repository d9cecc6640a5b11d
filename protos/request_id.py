"""Which request a task works for: set where a request comes in, so that what is logged meanwhile can be found by it."""

from __future__ import annotations

from contextvars import ContextVar

current_request_id: ContextVar[str] = ContextVar("current_request_id", default="")
