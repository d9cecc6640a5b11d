"""Every error that crosses a process, and its form as a gRPC status with google.rpc details. By who must act:

caller    InvalidArgument, NotFound, AlreadyExists, FailedPrecondition, DeadlineExceeded, Cancelled, Unimplemented,
          Unauthenticated, PermissionDenied; ResourceExhausted: SlowReader
capacity  ResourceExhausted: Overloaded, LimitExceeded; Unavailable: NoWorker
peer      Unavailable: WorkerLost, AttemptsExhausted, Interrupted; Aborted (packages add their own, each with a reason)
ours      Internal
"""

from __future__ import annotations

from typing import ClassVar

import grpc
import grpc.aio
from google.protobuf import duration_pb2
from google.rpc import error_details_pb2, status_pb2

DOMAIN = "pdserve"
MAX_MESSAGE_BYTES = 1000  # gRPC carries status as headers, which have a limit; what peers send is quoted in messages
DETAILS_KEY = "grpc-status-details-bin"  # where gRPC keeps a google.rpc.Status

_by_reason: dict[str, type[ServiceError]] = {}
_by_code: dict[grpc.StatusCode, type[ServiceError]] = {}


class ServiceError(Exception):
    """An expected failure. `retryable`: the request may succeed elsewhere or later. `field`: what in it is wrong."""

    code: ClassVar[grpc.StatusCode] = grpc.StatusCode.UNKNOWN
    retryable: bool = False
    reason: str = "UNKNOWN"

    def __init__(self, message: str, *, field: str = "", retry_after_s: float | None = None) -> None:
        self.message = _clipped(message)
        super().__init__(self.message)
        self.field = field
        self.retry_after_s = retry_after_s

    def __init_subclass__(cls) -> None:
        """A class is found again by its reason; the first one of a code stands for the code."""
        super().__init_subclass__()
        _by_code.setdefault(cls.code, cls)
        if "reason" in cls.__dict__:
            known = _by_reason.setdefault(cls.reason, cls)
            if known is not cls and (known.__module__, known.__qualname__) != (cls.__module__, cls.__qualname__):
                raise TypeError(f"{cls.__qualname__} and {known.__qualname__} have the same reason, {cls.reason}")


class InvalidArgument(ServiceError):
    """The request is wrong whatever the state of the service; `field` says where."""

    code = grpc.StatusCode.INVALID_ARGUMENT
    reason = "INVALID_ARGUMENT"


class NotFound(ServiceError):
    code = grpc.StatusCode.NOT_FOUND
    reason = "NOT_FOUND"


class AlreadyExists(ServiceError):
    code = grpc.StatusCode.ALREADY_EXISTS
    reason = "ALREADY_EXISTS"


class FailedPrecondition(ServiceError):
    """The service is not in the state that the request assumes, and waiting will not change that."""

    code = grpc.StatusCode.FAILED_PRECONDITION
    reason = "FAILED_PRECONDITION"


class DeadlineExceeded(ServiceError):
    code = grpc.StatusCode.DEADLINE_EXCEEDED
    reason = "DEADLINE_EXCEEDED"


class Cancelled(ServiceError):
    code = grpc.StatusCode.CANCELLED
    reason = "CANCELLED"


class Unimplemented(ServiceError):
    code = grpc.StatusCode.UNIMPLEMENTED
    reason = "UNIMPLEMENTED"


class Unauthenticated(ServiceError):
    """The caller showed no credentials, or none that are known here. The message never repeats them."""

    code = grpc.StatusCode.UNAUTHENTICATED
    reason = "UNAUTHENTICATED"


class PermissionDenied(ServiceError):
    """The caller is known, and may not do this; the message says what it lacks."""

    code = grpc.StatusCode.PERMISSION_DENIED
    reason = "PERMISSION_DENIED"


class ResourceExhausted(ServiceError):
    """Something is full now."""

    code = grpc.StatusCode.RESOURCE_EXHAUSTED
    reason = "RESOURCE_EXHAUSTED"
    retryable = True


class SlowReader(ResourceExhausted):
    """The caller did not read its stream for so long that it was ended."""

    reason = "SLOW_READER"
    retryable = False


class Overloaded(ResourceExhausted):
    """More is asked for than the workers can do in time: refused before any of it was done. `retry_after_s` says when
    there may be room."""

    reason = "OVERLOADED"


class LimitExceeded(ResourceExhausted):
    """The caller's key allows no more now; the message names the limit."""

    reason = "LIMIT_EXCEEDED"


class Unavailable(ServiceError):
    code = grpc.StatusCode.UNAVAILABLE
    reason = "UNAVAILABLE"
    retryable = True


class NoWorker(Unavailable):
    """No worker that is ready can take the request; the message says which role is missing."""

    reason = "NO_WORKER"


class WorkerLost(Unavailable):
    """A worker went away while it had the request."""

    reason = "WORKER_LOST"


class Interrupted(Unavailable):
    """An answer that the client reads from a worker has broken off there. It goes on where it is asked for again, with
    the tokens that have come."""

    reason = "INTERRUPTED"


class AttemptsExhausted(Unavailable):
    """Every attempt that the router's budget allows has failed; the message ends with the last failure."""

    reason = "ATTEMPTS_EXHAUSTED"


class Aborted(ServiceError):
    """The two sides disagree about what is still going on; the attempt is over."""

    code = grpc.StatusCode.ABORTED
    reason = "ABORTED"
    retryable = True


class Internal(ServiceError):
    """A defect of ours. The message says nothing about the inside: that is in the log."""

    code = grpc.StatusCode.INTERNAL
    reason = "INTERNAL"


def _clipped(message: str) -> str:
    encoded = message.encode(errors="replace")
    if len(encoded) <= MAX_MESSAGE_BYTES:
        return message
    return encoded[:MAX_MESSAGE_BYTES].decode(errors="ignore") + "..."


def to_status(error: ServiceError) -> status_pb2.Status:
    status = status_pb2.Status(code=error.code.value[0], message=error.message)
    info = error_details_pb2.ErrorInfo(reason=error.reason, domain=DOMAIN)
    info.metadata["retryable"] = "true" if error.retryable else "false"
    status.details.add().Pack(info)
    if error.field:
        violation = error_details_pb2.BadRequest.FieldViolation(field=error.field, description=error.message)
        status.details.add().Pack(error_details_pb2.BadRequest(field_violations=[violation]))
    if error.retry_after_s is not None:
        delay = duration_pb2.Duration()
        delay.FromNanoseconds(round(error.retry_after_s * 1e9))
        status.details.add().Pack(error_details_pb2.RetryInfo(retry_delay=delay))
    return status


def from_status(status: status_pb2.Status) -> ServiceError:
    """The error that became this status. If this process does not know its class, the general one of its code."""
    info, bad_request, retry = (
        error_details_pb2.ErrorInfo(),
        error_details_pb2.BadRequest(),
        error_details_pb2.RetryInfo(),
    )
    for detail in status.details:
        for known in (info, bad_request, retry):
            if detail.Is(known.DESCRIPTOR):
                detail.Unpack(known)
    code = _CODES.get(status.code, grpc.StatusCode.UNKNOWN)
    kind = _by_reason.get(info.reason) if info.domain == DOMAIN else None
    if kind is None or kind.code is not code:
        kind = _by_code.get(code, ServiceError)
    error = kind(
        status.message,
        field=bad_request.field_violations[0].field if bad_request.field_violations else "",
        retry_after_s=retry.retry_delay.ToNanoseconds() / 1e9 if retry.HasField("retry_delay") else None,
    )
    if info.domain == DOMAIN:
        error.reason, error.retryable = info.reason, info.metadata["retryable"] == "true"
    return error


def from_rpc_error(error: grpc.aio.AioRpcError) -> ServiceError:
    """A status without details of ours was made by gRPC itself; of these, only UNAVAILABLE is worth another try."""
    for key, value in error.trailing_metadata() or ():
        if key == DETAILS_KEY and isinstance(value, bytes):
            return from_status(status_pb2.Status.FromString(value))
    service_error = _by_code.get(error.code(), ServiceError)(error.details() or f"gRPC status {error.code().name}")
    service_error.retryable = error.code() is grpc.StatusCode.UNAVAILABLE
    return service_error


def is_connection_failure(error: grpc.aio.AioRpcError) -> bool:
    """Whether gRPC ended the call because the peer is gone or going. False if it answered with an error."""
    from_peer = any(key == DETAILS_KEY for key, _ in error.trailing_metadata() or ())
    return not from_peer and error.code() in _CONNECTION_CODES


_CODES = {code.value[0]: code for code in grpc.StatusCode}
_CONNECTION_CODES = {
    grpc.StatusCode.UNAVAILABLE,
    grpc.StatusCode.CANCELLED,  # a server that stops cancels what is still running
    grpc.StatusCode.INTERNAL,  # a stream that was reset
    grpc.StatusCode.UNKNOWN,
}
