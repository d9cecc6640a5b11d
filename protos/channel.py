"""Client channels the way all our processes have them, and calls whose failures are `protos.errors.ServiceError`s."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TypeAlias

import grpc.aio

from protos.credentials import Credentials
from protos.errors import Unavailable, from_rpc_error, is_connection_failure
from protos.renewed_channel import RenewedChannel
from protos.tls import Pems, handshake_problem

MAX_MESSAGE_BYTES = 16 * 2**20
KEEPALIVE_S = 10.0

BytesStream: TypeAlias = grpc.aio.UnaryStreamMultiCallable[bytes, bytes]

Options: TypeAlias = tuple[tuple[str, int | str], ...]


def keepalive_options(keepalive_s: float) -> Options:
    """For both ends: a peer that has not said anything for so long is asked, and gone if it does not answer within
    half of that. gRPC waits for a minute, whatever the keepalive's timeout, unless the ping has one, too."""
    return (
        ("grpc.keepalive_time_ms", round(keepalive_s * 1000)),
        ("grpc.keepalive_timeout_ms", round(keepalive_s * 500)),
        ("grpc.http2.ping_timeout_ms", round(keepalive_s * 500)),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
    )


_OPTIONS: Options = (
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    # At most so much is on its way to us and not yet read: a sender that waits says more at once, and says it fresh.
    ("grpc.http2.lookahead_bytes", 16 * 1024),
    ("grpc.http2.bdp_probe", 0),
    ("grpc.max_send_message_length", -1),  # the server's refusal says what the limit is
    *keepalive_options(KEEPALIVE_S),
    ("grpc.use_local_subchannel_pool", 1),  # a restarted peer at the same address does not inherit a back-off
    ("grpc.enable_retries", 0),  # whether to try again is decided where the request is understood
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 2000),  # despite its name, how long a connection may take to be made
    ("grpc.max_reconnect_backoff_ms", 2000),
)


def open_channel(address: str, credentials: Credentials | None = None) -> grpc.aio.Channel:
    """An async context manager; close it. It connects at the first call and again after every loss.

    Raises FailedPrecondition if a secret would go over a network unencrypted.
    """
    if credentials is None:
        return grpc.aio.insecure_channel(address, options=_OPTIONS)
    credentials.check_address(address)
    name = credentials.peer_name
    options: Options = (*_OPTIONS, ("grpc.ssl_target_name_override", name)) if name else _OPTIONS

    def connect(pems: Pems | None) -> grpc.aio.Channel:
        if pems is None:
            return grpc.aio.insecure_channel(address, options=options)
        return grpc.aio.secure_channel(address, pems.for_channel(), options=options)

    return RenewedChannel(connect, credentials.metadata, credentials.pems)


@contextmanager
def service_errors(nobody_there: str = "") -> Iterator[None]:
    """Around a call, or around reading its stream: a gRPC failure comes out as the error the server raised.

    `nobody_there` is said, if given, where there is no such error because the server cannot be reached.
    """
    try:
        yield
    except grpc.aio.AioRpcError as error:
        if nobody_there and is_connection_failure(error):
            problem = handshake_problem(error.details() or "")
            raise Unavailable(f"{nobody_there}{problem and f' ({problem})'}") from error
        raise from_rpc_error(error) from None


def bytes_stream(channel: grpc.aio.Channel, method: str) -> BytesStream:
    """A server-streaming method by its full name, whose messages stay bytes: for passing them on untouched."""
    return channel.unary_stream(method)
