"""KServe's v2 gRPC, as Triton speaks it, onto the service: one whole answer, or streams of them in one call."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import aclosing
from importlib import metadata as packages
from typing import TypeAlias

from protos import inference_pb2 as pb
from protos import kserve_pb2 as kserve
from protos import kserve_pb2_grpc
from protos.calls import Context
from protos.errors import Internal, ServiceError
from protos.values import FINISH_REASONS
from router.answering import Answering
from router.card import ModelCard
from router.kserve_messages import VERSION, Ask, check_version, metadata, put_in_kserve_words, read_request
from router.kserve_tensors import Output, add_output

logger = logging.getLogger(__name__)

Write: TypeAlias = Callable[[kserve.ModelStreamInferResponse], Awaitable[None]]

_MAX_AT_ONCE = 64  # requests of one stream; those after them wait in the connection
_EXTENSIONS = ("binary_tensor_data", "parameters", "sequence")


class KServeService(kserve_pb2_grpc.GRPCInferenceServiceServicer):
    def __init__(self, service: Answering, card: ModelCard, is_ready: Callable[[], bool]) -> None:
        self._service = service
        self._card = card
        self._is_ready = is_ready
        self._streamed: set[asyncio.Task[None]] = set()

    async def drained(self) -> None:
        """Requests in streams have been answered. The streams themselves may last as long as their clients."""
        while self._streamed:
            await asyncio.wait(self._streamed)

    async def ServerLive(self, request: kserve.ServerLiveRequest, context: Context) -> kserve.ServerLiveResponse:
        return kserve.ServerLiveResponse(live=True)

    async def ServerReady(self, request: kserve.ServerReadyRequest, context: Context) -> kserve.ServerReadyResponse:
        return kserve.ServerReadyResponse(ready=self._takes_requests())

    async def ModelReady(self, request: kserve.ModelReadyRequest, context: Context) -> kserve.ModelReadyResponse:
        check_version(request.name, request.version, self._card)
        return kserve.ModelReadyResponse(ready=self._takes_requests())

    async def ServerMetadata(
        self, request: kserve.ServerMetadataRequest, context: Context
    ) -> kserve.ServerMetadataResponse:
        version = packages.version("pdserve")
        return kserve.ServerMetadataResponse(name="pdserve", version=version, extensions=_EXTENSIONS)

    async def ModelMetadata(
        self, request: kserve.ModelMetadataRequest, context: Context
    ) -> kserve.ModelMetadataResponse:
        check_version(request.name, request.version, self._card)
        return metadata(self._card)

    async def ModelConfig(self, request: kserve.ModelConfigRequest, context: Context) -> kserve.ModelConfigResponse:
        check_version(request.name, request.version, self._card)
        policy = kserve.ModelTransactionPolicy(decoupled=True)
        config = kserve.ModelConfig(
            name=self._card.name, platform="pdserve", backend="pdserve", model_transaction_policy=policy
        )
        return kserve.ModelConfigResponse(config=config)

    async def ModelInfer(self, request: kserve.ModelInferRequest, context: Context) -> kserve.ModelInferResponse:
        said, reason, usage = [], "", pb.Usage()
        try:
            ask = read_request(request, self._card)
            async with aclosing(self._service.generate(ask.message, _sooner(context, ask))) as messages:
                async for raw in messages:
                    message = pb.GenerateResponse.FromString(raw)
                    said.append(message.text)
                    reason = FINISH_REASONS[message.finish_reason] or reason
                    usage = message.usage if message.HasField("usage") else usage
        except ServiceError as error:
            put_in_kserve_words(error)
            raise
        return self._response(request, _outputs(ask, "".join(said), reason, usage))

    async def ModelStreamInfer(  # type: ignore[override]  # it writes by itself, which gRPC takes as well
        self, requests: AsyncIterator[kserve.ModelInferRequest], context: Context
    ) -> None:
        """Requests are answered side by side. What one is refused for ends that one only."""
        slots, writing = asyncio.Semaphore(_MAX_AT_ONCE), asyncio.Lock()

        async def write(response: kserve.ModelStreamInferResponse) -> None:
            async with writing:  # gRPC takes one message of a call at a time
                await context.write(response)

        async def answer(request: kserve.ModelInferRequest) -> None:
            try:
                await self._stream(request, context, write)
            finally:
                slots.release()

        try:
            async with asyncio.TaskGroup() as answering:
                async for request in requests:
                    await slots.acquire()
                    task = answering.create_task(answer(request))
                    self._streamed.add(task)
                    task.add_done_callback(self._streamed.discard)
        except* ServiceError as unreadable:
            raise unreadable.exceptions[0] from None

    async def _stream(self, request: kserve.ModelInferRequest, context: Context, write: Write) -> None:
        try:
            ask = read_request(request, self._card)
            async with aclosing(self._service.generate(ask.message, _sooner(context, ask))) as messages:
                async for raw in messages:
                    message = pb.GenerateResponse.FromString(raw)
                    if message.text or message.finish_reason or message.HasField("usage"):
                        await write(self._part(request, ask, message))
            if ask.wants_empty_end:
                await write(kserve.ModelStreamInferResponse(infer_response=self._response(request, (), is_last=True)))
        except ServiceError as error:
            put_in_kserve_words(error)
            await write(self._failure(request, error))
        except Exception:
            logger.exception("a request in a stream failed")
            await write(self._failure(request, Internal("the service failed on this request; its log says why")))

    def _part(
        self, request: kserve.ModelInferRequest, ask: Ask, message: pb.GenerateResponse
    ) -> kserve.ModelStreamInferResponse:
        """The numbers of tokens come with the last one, which has no text: as the service's own last message."""
        is_last = message.HasField("usage")
        outputs = _outputs(ask, message.text, FINISH_REASONS[message.finish_reason] or "", message.usage)
        if not is_last:
            outputs = [output for output in outputs if output.datatype == "BYTES"]
        response = self._response(request, outputs, is_last=is_last and not ask.wants_empty_end)
        return kserve.ModelStreamInferResponse(infer_response=response)

    def _failure(self, request: kserve.ModelInferRequest, error: ServiceError) -> kserve.ModelStreamInferResponse:
        """Its words alone: a stream has no place for a status."""
        response = self._response(request, (), is_last=True)
        return kserve.ModelStreamInferResponse(error_message=error.message, infer_response=response)

    def _response(
        self, request: kserve.ModelInferRequest, outputs: Iterable[Output], *, is_last: bool | None = None
    ) -> kserve.ModelInferResponse:
        response = kserve.ModelInferResponse(model_name=self._card.name, model_version=VERSION, id=request.id)
        if is_last is not None:
            response.parameters["triton_final_response"].bool_param = is_last
        for output in outputs:
            add_output(response, output)
        return response

    def _takes_requests(self) -> bool:
        return self._is_ready() and not self._service.is_draining


def _outputs(ask: Ask, said: str, reason: str, usage: pb.Usage) -> list[Output]:
    told = (
        Output("text_output", "BYTES", [said]),
        Output("finish_reason", "BYTES", [reason]),
        Output("num_input_tokens", "INT64", [usage.prompt_tokens]),
        Output("num_output_tokens", "INT64", [usage.output_tokens]),
    )
    return [output for output in told if output.name in ask.outputs]


def _sooner(context: Context, ask: Ask) -> float | None:
    """The call's deadline or the request's own."""
    given = [each for each in (context.time_remaining(), ask.timeout_s) if each is not None]
    return min(given, default=None)
