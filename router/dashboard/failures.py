"""What went wrong, as the page is told it."""

from __future__ import annotations

from typing import Any

from grpc import StatusCode

from protos.errors import ServiceError

_HTTP = {
    StatusCode.INVALID_ARGUMENT: 400,
    StatusCode.FAILED_PRECONDITION: 409,
    StatusCode.UNIMPLEMENTED: 501,
    StatusCode.UNAUTHENTICATED: 401,
    StatusCode.PERMISSION_DENIED: 403,
    StatusCode.NOT_FOUND: 404,
    StatusCode.RESOURCE_EXHAUSTED: 429,
    StatusCode.DEADLINE_EXCEEDED: 504,
    StatusCode.UNAVAILABLE: 503,
}


def as_failure(error: ServiceError) -> dict[str, Any]:
    return {"code": error.code.name, "reason": error.reason, "message": error.message, "field": error.field}


def http_status(error: ServiceError) -> int:
    return _HTTP.get(error.code, 500)
