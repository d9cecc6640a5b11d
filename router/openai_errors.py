"""Errors in OpenAI's shape: which HTTP status and type a ServiceError has, and what a refusal of the door itself is."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from grpc import StatusCode

from protos.errors import ServiceError

INVALID, SERVER = "invalid_request_error", "server_error"

_HTTP = {  # by gRPC status: HTTP status, type, and code where the error's own reason would not say it as OpenAI does
    StatusCode.INVALID_ARGUMENT: (400, INVALID, None),
    StatusCode.FAILED_PRECONDITION: (400, INVALID, None),
    StatusCode.UNIMPLEMENTED: (400, INVALID, "unsupported"),
    StatusCode.UNAUTHENTICATED: (401, INVALID, "invalid_api_key"),
    StatusCode.PERMISSION_DENIED: (403, INVALID, "permission_denied"),
    StatusCode.NOT_FOUND: (404, INVALID, "model_not_found"),
    StatusCode.ALREADY_EXISTS: (409, INVALID, "already_exists"),
    StatusCode.RESOURCE_EXHAUSTED: (429, "rate_limit_error", "rate_limit_exceeded"),
    StatusCode.CANCELLED: (499, INVALID, "cancelled"),
    StatusCode.DEADLINE_EXCEEDED: (504, SERVER, "deadline_exceeded"),
    StatusCode.UNAVAILABLE: (503, SERVER, ""),
    StatusCode.ABORTED: (503, SERVER, ""),
}


@dataclass(eq=False)  # not frozen: Python itself writes to what is raised
class Problem(Exception):
    """What is told instead of an answer. `param`: the field of the request that is wrong."""

    status: int
    message: str
    param: str | None = None
    code: str | None = None
    type: str = INVALID
    headers: Mapping[str, str] = field(default_factory=dict)

    @property
    def body(self) -> dict[str, Any]:
        return {"error": {"message": self.message, "type": self.type, "param": self.param, "code": self.code}}


def internal() -> Problem:
    """A defect of ours, of which the log says more."""
    return Problem(500, "the service failed on this request; its log says why", code="internal", type=SERVER)


def problem_of(error: ServiceError, name_of: Callable[[str], str]) -> Problem:
    """`name_of` tells how the client wrote a field of the service's message."""
    status, kind, code = _HTTP.get(error.code, (500, SERVER, ""))
    param, message = None, error.message
    if error.field:
        param = name_of(error.field)
        if message.startswith(error.field):
            message = param + message[len(error.field) :]
    headers = {}
    if error.retry_after_s is not None:
        headers = {
            "retry-after": str(math.ceil(error.retry_after_s)),
            "retry-after-ms": str(math.ceil(error.retry_after_s * 1000)),
        }
    if status == 401:
        headers["www-authenticate"] = "Bearer"
    return Problem(status, message, param, error.reason.lower() if code == "" else code, kind, headers)
