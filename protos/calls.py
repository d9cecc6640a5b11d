"""What happens around every call of a server: parsing that explains, errors with details, metrics."""

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
from protos.errors import DETAILS_KEY, Internal, InvalidArgument, ServiceError, to_status

logger = logging.getLogger(__name__)

Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"
Context: TypeAlias = grpc.aio.ServicerContext[Any, Any]
Parse: TypeAlias = Callable[[bytes], object]


class CallInterceptor(grpc.aio.ServerInterceptor):
    """`requests` are the methods, by full name, whose calls count as requests."""

    def __init__(self) -> None:
        self.requests: set[str] = set()
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
        return self._around(handler_call_details.method, handler)

    def _around(self, method: str, handler: Handler) -> Handler:
        parse, behavior = _parser(method, handler), _behavior(handler)

        async def call(request: Any, context: Context) -> Any:
            """Of streams too: what they yield is written here, so that they are closed at once when the call ends."""
            tracing.incoming.set(tracing.headers_of(context.invocation_metadata()))
            with self._counted(method) as outcome:
                try:
                    answer = behavior(_parsed(request, parse) if handler.request_streaming else parse(request), context)
                    return await _written(answer, context) if inspect.isasyncgen(answer) else await answer
                except ServiceError as error:
                    failure = error
                except (grpc.aio.AbortError, grpc.aio.UsageError):  # the handler has spoken to gRPC itself
                    outcome.code = grpc.StatusCode.UNKNOWN
                    raise
                except Exception:
                    logger.exception("%s failed", method)
                    failure = Internal("the service failed on this request; its log says why")
                outcome.code = failure.code
                await _abort(context, failure)

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


async def _written(answers: Any, context: Context) -> None:
    async with aclosing(answers):
        async for answer in answers:
            await context.write(answer)


async def _abort(context: Context, error: ServiceError) -> None:
    details = ((DETAILS_KEY, to_status(error).SerializeToString()),)
    await context.abort(error.code, error.message, details)
