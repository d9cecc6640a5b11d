"""Every error survives the wire: it comes back as the class it was, with everything it said."""

from __future__ import annotations

from collections.abc import Iterator

import grpc
import pytest
from google.protobuf import any_pb2
from google.rpc import error_details_pb2, status_pb2

from kvtransfer import errors as handover_errors
from protos import errors
from protos.errors import ServiceError, from_status, to_status


def tree(kind: type[ServiceError]) -> Iterator[type[ServiceError]]:
    for child in kind.__subclasses__():
        yield child
        yield from tree(child)


def every_kind() -> list[type[ServiceError]]:
    return [kind for kind in tree(ServiceError) if kind.__module__ in (errors.__name__, handover_errors.__name__)]


@pytest.mark.parametrize("kind", every_kind(), ids=lambda kind: kind.__name__)
def test_survives_the_wire(kind: type[ServiceError]) -> None:
    sent = kind("the message, with ümlauts", field="sampling.top_p", retry_after_s=1.25)
    wire = to_status(sent).SerializeToString()
    received = from_status(status_pb2.Status.FromString(wire))
    assert type(received) is kind
    assert str(received) == "the message, with ümlauts"
    assert (received.field, received.retry_after_s) == ("sampling.top_p", 1.25)
    assert (received.code, received.reason, received.retryable) == (kind.code, kind.reason, kind.retryable)


@pytest.mark.parametrize("kind", every_kind(), ids=lambda kind: kind.__name__)
def test_what_was_not_said_is_not_there(kind: type[ServiceError]) -> None:
    received = from_status(to_status(kind("plain")))
    assert (received.field, received.retry_after_s) == ("", None)


def test_status_is_what_google_says_it_is() -> None:
    """Read with google's own messages, as any client in any language would."""
    status = to_status(errors.InvalidArgument("top_p is 0", field="sampling.top_p"))
    assert status.code == 3 and status.message == "top_p is 0"
    info, bad_request = error_details_pb2.ErrorInfo(), error_details_pb2.BadRequest()
    assert status.details[0].Unpack(info) and status.details[1].Unpack(bad_request)
    assert (info.reason, info.domain, dict(info.metadata)) == ("INVALID_ARGUMENT", "pdserve", {"retryable": "false"})
    assert bad_request.field_violations[0].field == "sampling.top_p"


def test_reasons_are_upper_snake_and_unique() -> None:
    reasons = [kind.reason for kind in every_kind()]
    assert all(reason.replace("_", "").isalpha() and reason.isupper() for reason in reasons)
    assert len(set(reasons)) == len(reasons)


def test_two_classes_cannot_share_a_reason() -> None:
    with pytest.raises(TypeError, match="NOT_FOUND"):
        type("Other", (errors.NotFound,), {"reason": "NOT_FOUND", "__module__": __name__})


def test_class_unknown_here_is_stood_for_by_its_code() -> None:
    status = status_pb2.Status(code=grpc.StatusCode.ABORTED.value[0], message="over")
    info = error_details_pb2.ErrorInfo(reason="SOMETHING_NEW", domain="pdserve", metadata={"retryable": "false"})
    status.details.add().Pack(info)
    received = from_status(status)
    assert type(received) is errors.Aborted
    assert (received.reason, received.retryable) == ("SOMETHING_NEW", False)


def test_reason_of_another_domain_is_not_ours() -> None:
    status = status_pb2.Status(code=grpc.StatusCode.UNAVAILABLE.value[0], message="quota")
    status.details.add().Pack(error_details_pb2.ErrorInfo(reason="NO_WORKER", domain="example.com"))
    assert type(from_status(status)) is errors.Unavailable


def test_details_of_unknown_type_are_passed_over() -> None:
    status = to_status(errors.NotFound("nothing"))
    status.details.append(any_pb2.Any(type_url="type.googleapis.com/who.Knows", value=b"\xff"))
    assert type(from_status(status)) is errors.NotFound
