"""An open Decode call, and what it answers: in the worker's bundle, or in a stream of its own where there is none."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass

import grpc.aio

from protos import decode_pb2
from protos.channel import bytes_stream
from protos.errors import ServiceError, WorkerLost, from_rpc_error, is_connection_failure
from protos.tracing import Headers
from router.candidate import Candidate, WorkerId
from router.inbox import Inbox
from router.links import Link

DECODE_METHOD = "/pdserve.v1.Decode/Decode"
_LAST_S = 5.0  # between the end of a call and the last message of it in the bundle, or the other way round


class AttemptFailed(Exception):
    """A leg failed. `is_connection`: the worker said nothing, it is gone or going."""

    def __init__(self, error: ServiceError, worker_id: WorkerId, *, is_connection: bool) -> None:
        super().__init__(str(error))
        self.error = error
        self.worker_id = worker_id
        self.is_connection = is_connection


@dataclass(frozen=True, slots=True)
class DecodeLeg:
    worker: Candidate
    call: grpc.aio.UnaryStreamCall[bytes, bytes]
    inbox: Inbox

    async def read(self) -> bytes | None:
        """What has come, as one message; None at the end. Raises AttemptFailed."""
        try:
            return await self.inbox.read()
        except ServiceError as error:  # the bundle's
            lost = WorkerLost(f"worker {self.worker.id.name!r} is lost: {error}")
            raise AttemptFailed(lost, self.worker.id, is_connection=True) from None


@asynccontextmanager
async def decode_leg(
    worker: Candidate,
    link: Link,
    request: decode_pb2.DecodeRequest,
    timeout_s: float | None,
    headers: Headers = (),
) -> AsyncIterator[DecodeLeg]:
    """Ends the call on leaving."""
    bundle = link.current_bundle()
    is_bundled = await bundle.opened()
    with bundle.stream() as (number, inbox):
        if is_bundled:
            request.bundle_id, request.stream = bundle.id, number
        call = bytes_stream(link.channel, DECODE_METHOD)(
            request.SerializeToString(), timeout=timeout_s, metadata=headers
        )
        with link.follow(call):
            following = asyncio.create_task(_follow(worker, link, call, inbox, is_bundled=is_bundled))
            try:
                yield DecodeLeg(worker, call, inbox)
                if inbox.is_read_out:  # the worker has still to say that all is well
                    await asyncio.wait([following], timeout=_LAST_S)
            finally:
                call.cancel()
                following.cancel()
                await asyncio.wait([following])


async def _follow(
    worker: Candidate, link: Link, call: grpc.aio.UnaryStreamCall[bytes, bytes], inbox: Inbox, *, is_bundled: bool
) -> None:
    """Takes what comes in the call's own stream: everything if the worker knows no bundle, and else how it ended."""
    try:
        with leg_errors(worker, link):
            while isinstance(raw := await call.read(), bytes):
                is_bundled = False  # the worker has not found the bundle
                inbox.put(raw)
                await inbox.has_room.wait()
        if is_bundled:
            with suppress(TimeoutError):
                async with asyncio.timeout(_LAST_S):
                    await inbox.ended.wait()
    except Exception as failure:
        inbox.end(failure)
    finally:
        inbox.end()


@contextmanager
def leg_errors(worker: Candidate, link: Link) -> Iterator[None]:
    """What goes wrong on a worker's call, as AttemptFailed."""
    try:
        yield
    except asyncio.CancelledError:
        task = asyncio.current_task()
        if not link.is_given_up or (task is not None and task.cancelling()):
            raise
        error = WorkerLost(f"worker {worker.id.name!r} has fallen silent")
        raise AttemptFailed(error, worker.id, is_connection=True) from None
    except grpc.aio.AioRpcError as error:
        is_connection = is_connection_failure(error)
        failure = from_rpc_error(error)
        if is_connection:
            failure = WorkerLost(f"worker {worker.id.name!r} is lost: {failure}")
        raise AttemptFailed(failure, worker.id, is_connection=is_connection) from None


def ended_early(worker: Candidate) -> AttemptFailed:
    error = WorkerLost(f"worker {worker.id.name!r} ended its stream before the answer was complete")
    return AttemptFailed(error, worker.id, is_connection=False)
