"""What happens around every call of a server: who may, parsing that explains, errors with details, metrics."""

from __future__ import annotations

import asyncio
import inspect
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import aclosing, contextmanager
from typing import Any, TypeAlias

import grpc
import grpc.aio
from google.protobuf import descriptor_pool

from protos import metrics, tracing
from protos.caller import Caller, current_caller
from protos.deliveries import Deliveries, Delivery
from protos.errors import DETAILS_KEY, Internal, InvalidArgument, ServiceError, to_status
from protos.guard import Guard
from protos.request_id import current_request_id

logger = logging.getLogger(__name__)

Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"
Context: TypeAlias = grpc.aio.ServicerContext[Any, Any]
Parse: TypeAlias = Callable[[bytes], object]

_MAX_ID = 200  # characters of a request id that are logged, before anybody has checked it
_TELL_S = 1.0  # for a status to get past what is not read; gRPC keeps it, whether or not we wait


class CallInterceptor(grpc.aio.ServerInterceptor):
    """`requests` are the methods, by full name, whose calls count as requests."""

    def __init__(self, guard: Guard, unread_s: float) -> None:
        self.requests: set[str] = set()
        self._guard = guard
        self._deliveries = Deliveries(unread_s)
        self._requests_running, self._calls_running = _Tally(), _Tally()

    @property
    def num_requests(self) -> int:
        return self._requests_running.number

    async def no_requests(self) -> None:
        await self._requests_running.is_zero.wait()

    async def no_calls(self) -> None:
        """Every handler has returned, from its `finally` too: gRPC's own stop does not wait for that."""
        await self._calls_running.is_zero.wait()

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Handler | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Handler | None:
        handler = await continuation(handler_call_details)
        if handler is None:  # unknown method: gRPC answers UNIMPLEMENTED
            return None
        method = handler_call_details.method
        try:
            caller = self._guard.admit(method, handler_call_details.invocation_metadata)
        except ServiceError as refusal:
            return self._refusing(method, refusal)
        return self._around(method, handler, caller)

    def _refusing(self, method: str, refusal: ServiceError) -> Handler:
        """Whatever kind of call it is: as a stream its request is not even received."""

        async def refuse(request: object, context: Context) -> None:
            with self._counted(method) as outcome:
                outcome.code = refusal.code
                await _abort(context, refusal)

        return _KINDS[True, True](refuse)

    def _around(self, method: str, handler: Handler, caller: Caller) -> Handler:
        parse, behavior = _parser(method, handler), _behavior(handler)

        async def call(request: Any, context: Context) -> Any:
            """Of streams too: what they yield is written here, so that they are closed at once when the call ends."""
            tracing.incoming.set(tracing.headers_of(context.invocation_metadata()))
            current_caller.set(caller)  # of this call's task, which ends with it
            with self._counted(method) as outcome, self._deliveries.follow() as delivery:
                try:
                    asked = _parsed(request, parse) if handler.request_streaming else parse(request)
                    current_request_id.set(str(getattr(asked, "request_id", ""))[:_MAX_ID])
                    answer = behavior(asked, context)
                    return await _written(answer, context, delivery) if inspect.isasyncgen(answer) else await answer
                except ServiceError as error:
                    failure = error
                except asyncio.CancelledError:
                    if not delivery.is_given_up:
                        raise
                    delivery.taken_back()
                    failure = self._deliveries.failure()
                    metrics.SLOW_READERS.labels(method).inc()
                except (grpc.aio.AbortError, grpc.aio.UsageError):  # the handler has spoken to gRPC itself
                    outcome.code = grpc.StatusCode.UNKNOWN
                    raise
                except Exception:
                    logger.exception("%s failed", method)
                    failure = Internal("the service failed on this request; its log says why")
                outcome.code = failure.code
                await (_abort_unread if delivery.is_given_up else _abort)(context, failure)

        make = _KINDS[handler.request_streaming, handler.response_streaming]
        return make(call, None, handler.response_serializer)

    @contextmanager
    def _counted(self, method: str) -> Iterator[_Outcome]:
        outcome, started_at = _Outcome(), time.monotonic()
        tallies = [self._calls_running, self._requests_running] if method in self.requests else [self._calls_running]
        metrics.CALLS_IN_FLIGHT.labels(method).inc()
        for tally in tallies:
            tally.add(1)
        try:
            yield outcome
        except asyncio.CancelledError:
            if outcome.code is grpc.StatusCode.OK:
                outcome.code = grpc.StatusCode.CANCELLED
            raise
        finally:
            for tally in tallies:
                tally.add(-1)
            metrics.CALLS_IN_FLIGHT.labels(method).dec()
            metrics.CALLS.labels(method, outcome.code.name).inc()
            metrics.CALL_SECONDS.labels(method).observe(time.monotonic() - started_at)


class _Tally:
    """A number that can be waited for to be zero."""

    def __init__(self) -> None:
        self.number = 0
        self.is_zero = asyncio.Event()
        self.is_zero.set()

    def add(self, change: int) -> None:
        self.number += change
        if self.number:
            self.is_zero.clear()
        else:
            self.is_zero.set()


class _Outcome:
    """How a call ended."""

    def __init__(self) -> None:
        self.code = grpc.StatusCode.OK


_KINDS: dict[tuple[bool, bool], Callable[..., Handler]] = {  # by whether requests and responses are streams
    (False, False): grpc.unary_unary_rpc_method_handler,
    (False, True): grpc.unary_stream_rpc_method_handler,
    (True, False): grpc.stream_unary_rpc_method_handler,
    (True, True): grpc.stream_stream_rpc_method_handler,
}


def _behavior(handler: Handler) -> Callable[[Any, Context], Any]:
    kinds: tuple[Any, ...] = (handler.unary_unary, handler.unary_stream, handler.stream_unary, handler.stream_stream)
    behavior: Callable[[Any, Context], Any] = next(kind for kind in kinds if kind is not None)
    return behavior


def _parser(method: str, handler: Handler) -> Parse:
    """The handler's own, with an error that the client understands: gRPC's is INTERNAL and does not say what of."""
    service, _, name = method.lstrip("/").partition("/")
    deserialize = handler.request_deserializer or bytes

    def parse(raw: bytes) -> object:
        try:
            return deserialize(raw)
        except Exception as error:
            message = descriptor_pool.Default().FindMethodByName(f"{service}.{name}").input_type.full_name
            problem = f"the request is not a valid {message}: broken encoding, or text that is not UTF-8"
            raise InvalidArgument(problem) from error

    return parse


async def _parsed(raw_requests: AsyncIterator[bytes], parse: Parse) -> AsyncIterator[object]:
    async for raw in raw_requests:
        yield parse(raw)


async def _written(answers: Any, context: Context, delivery: Delivery) -> None:
    """gRPC takes a message when the one before it has left, which is when its caller reads."""
    async with aclosing(answers):
        async for answer in answers:
            delivery.since = time.monotonic()
            await context.write(answer)
            delivery.since = None


async def _abort(context: Context, error: ServiceError) -> None:
    details = ((DETAILS_KEY, to_status(error).SerializeToString()),)
    await context.abort(error.code, error.message, details)


async def _abort_unread(context: Context, error: ServiceError) -> None:
    """The status stands behind what is not read, and goes out if it ever is; the handler does not wait for that."""
    telling = asyncio.ensure_future(_abort(context, error))
    await asyncio.wait([telling], timeout=_TELL_S)
    telling.cancel()
    await asyncio.wait([telling])
    if not telling.cancelled():
        telling.exception()  # told
    raise asyncio.CancelledError
