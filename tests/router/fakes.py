"""Workers that speak the real contract over real gRPC, with a model of a few lines in place of a transformer."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any

import grpc.aio

from decode.bundles import serve_decode
from model.chat_template import ChatMessage, ChatRejected
from protos import decode_pb2, decode_pb2_grpc, inference_pb2, prefill_pb2, prefill_pb2_grpc, workers_pb2
from protos import workers_pb2_grpc as workers_grpc
from protos.caller import Authenticator
from protos.channel import open_channel
from protos.serve import GrpcServer
from router.card import ModelCard
from router.config import RelayPolicy, RouterConfig
from router.server import Router
from router.steering import Planner

VOCAB_SIZE = 1000
EOS = 2
MAX_CONTEXT = 256
BLOCK_SIZE = 4
POLICY = RelayPolicy(max_attempts=4, retry_delay_s=0.001, wait_for_worker_s=0.2)

Hook = Callable[[str, int], Awaitable[None]]
"""Called with the attempt id and the number of tokens of the sequence; may raise, wait, or end the worker."""


class FakeTokenizer:
    """One token for each character."""

    def encode(self, text: str) -> list[int]:
        return [3 + ord(character) % 100 for character in text]

    def encode_chat(self, messages: Sequence[ChatMessage]) -> list[int]:
        if messages[0].role == "assistant":
            raise ChatRejected("the chat template rejects the messages: the user speaks first")
        return self.encode("".join(f"<{message.role}>{message.content}" for message in messages))

    num_leading_spaces = 0

    def token_strings(self, token_ids: Sequence[int]) -> list[str]:
        return [f"t{token_id}" for token_id in token_ids]

    def token_bytes(self, token_id: int) -> bytes:
        return b"" if token_id == EOS else f"<{token_id}>".encode()


CARD = ModelCard("tiny", "TinyForCausalLM", MAX_CONTEXT, VOCAB_SIZE, (EOS,), FakeTokenizer(), "digest-1")


def next_token(token_ids: Sequence[int]) -> int:
    """The model: depends on every token before, is never an end token."""
    digest = hashlib.sha256(repr(list(token_ids)).encode()).digest()
    return 10 + int.from_bytes(digest[:4], "big") % 900


def plain_loop(prompt: Sequence[int], num_tokens: int) -> list[int]:
    """What any way of serving has to give."""
    token_ids = list(prompt)
    for _ in range(num_tokens):
        token_ids.append(next_token(token_ids))
    return token_ids[len(prompt) :]


class HandOver:
    """What stands for NIXL: tells decode that prefill has committed."""

    def __init__(self) -> None:
        self.commits: dict[str, asyncio.Future[None]] = {}

    def of(self, attempt_id: str) -> asyncio.Future[None]:
        return self.commits.setdefault(attempt_id, asyncio.get_running_loop().create_future())


class FakeWorker(prefill_pb2_grpc.PrefillServicer):
    """`hooks` by name of the moment: prefill.start, .scored (a part of the prompt), .first, .committed, decode.start,
    .scored, .token, .left (its stream is open still), handover.start, .left."""

    def __init__(self, name: str, role: int, hand_over: HandOver, epoch: str, num_blocks: int) -> None:
        self.name = name
        self.epoch = epoch
        self.role = role
        self.num_blocks = num_blocks
        self.max_context_tokens = 0
        self.tokenizer_digest = CARD.tokenizer_digest
        self.hooks: dict[str, Hook] = {}
        self.num_open = 0
        self.prefills: list[prefill_pb2.PrefillRequest] = []
        self.decodes: list[decode_pb2.DecodeRequest] = []
        self.departures: list[decode_pb2.HandOverRequest] = []
        self.leaving: dict[str, asyncio.Event] = {}  # by attempt: set when its stream has ended for another worker
        self.deadlines_s: list[float | None] = []  # of all calls
        self.commands: list[int] = []
        self.registered = asyncio.Event()
        self.registration: asyncio.Task[None] | None = None
        self.server = GrpcServer("127.0.0.1", 0)
        self.server.add(prefill_pb2_grpc.add_PrefillServicer_to_server, self)
        serve_decode(self.server, _FakeDecode(self))  # type: ignore[abstract]
        self._hand_over = hand_over
        self._reports: asyncio.Queue[workers_pb2.WorkerLoad | None] = asyncio.Queue()

    async def start(self, router_address: str) -> None:
        await self.server.start()
        self.registration = asyncio.create_task(self._register(router_address))
        await asyncio.wait_for(self.registered.wait(), 5)

    async def die(self) -> None:
        """As a killed process does: connections break, nothing is said."""
        if self.registration is not None:
            self.registration.cancel()
        await self.server.stop()
        if self.registration is not None:
            await asyncio.wait([self.registration])

    def report(self, load: workers_pb2.WorkerLoad) -> None:
        self._reports.put_nowait(load)

    def hello(self) -> workers_pb2.WorkerHello:
        return workers_pb2.WorkerHello(
            worker_id=self.name,
            epoch=self.epoch,
            address=self.server.address,
            role=self.role,  # type: ignore[arg-type]
            flippable=True,
            model_name="tiny",
            tokenizer_digest=self.tokenizer_digest,
            layout=layout_message(),
            num_blocks=self.num_blocks,
            runner="fake",
            max_context_tokens=self.max_context_tokens,
        )

    async def Prefill(self, request: prefill_pb2.PrefillRequest, context: Any) -> AsyncIterator[Any]:
        self.prefills.append(request)
        self.deadlines_s.append(context.time_remaining())
        self.num_open += 1
        try:
            await self.at("prefill.start", request.attempt_id, len(request.token_ids))
            for message in _scores(request):
                yield prefill_pb2.PrefillResponse(prompt=message)
                await self.at("prefill.scored", request.attempt_id, len(request.token_ids))
            token = next_token(request.token_ids)
            first = _tokens(request, [token], len(request.token_ids))
            yield prefill_pb2.PrefillResponse(first_token=first)
            await self.at("prefill.first", request.attempt_id, len(request.token_ids))
            if request.HasField("decode") and first.finish_reason == 0:
                self._hand_over.of(request.attempt_id).set_result(None)
            await self.at("prefill.committed", request.attempt_id, len(request.token_ids))
            yield prefill_pb2.PrefillResponse(handed_over=_prefill_stats(request))
        finally:
            self.num_open -= 1

    async def decode(self, request: decode_pb2.DecodeRequest) -> AsyncIterator[inference_pb2.GenerateResponse]:
        self.decodes.append(request)
        self.num_open += 1
        try:
            await self.at("decode.start", request.attempt_id, len(request.token_ids))
            token_ids = list(request.token_ids)
            if not request.prefill_here:
                await self._hand_over.of(request.attempt_id)
                token_ids.append(next_token(token_ids))
            for message in _scores(request) if request.prefill_here else ():
                yield message
                await self.at("decode.scored", request.attempt_id, len(request.token_ids))
            while True:
                await self.at("decode.token", request.attempt_id, len(token_ids))
                token_ids.append(next_token(token_ids))
                message = _tokens(request, token_ids[-1:], len(token_ids) - 1)
                if message.finish_reason:
                    message.decode_stats.CopyFrom(_decode_stats(request))
                yield message
                if message.finish_reason:
                    return
                if request.attempt_id in self.leaving:
                    self.leaving[request.attempt_id].set()
                    await self.at("decode.left", request.attempt_id, len(token_ids))
                    return
        finally:
            self.num_open -= 1

    async def depart(self, request: decode_pb2.HandOverRequest) -> decode_pb2.HandOverResponse:
        self.departures.append(request)
        await self.at("handover.start", request.attempt_id, 0)
        left = self.leaving[request.attempt_id] = asyncio.Event()
        await left.wait()
        await self.at("handover.left", request.attempt_id, 0)
        self._hand_over.of(request.next_attempt_id).set_result(None)
        stats = inference_pb2.DecodeStats(received_tokens=20, cached_tokens=1, num_steps=100, decode_s=1.0)
        return decode_pb2.HandOverResponse(stats=stats)

    async def at(self, moment: str, attempt_id: str, num_tokens: int) -> None:
        if moment in self.hooks:
            await self.hooks[moment](attempt_id, num_tokens)

    async def _register(self, router_address: str) -> None:
        async with open_channel(router_address) as channel:
            call = workers_grpc.WorkersStub(channel).Register(self._say())
            try:
                async for command in call:
                    self.commands.append(command.set_role)
                    self.registered.set()
            finally:
                call.cancel()  # or what it has still to say is waited for until it is collected

    async def _say(self) -> AsyncIterator[workers_pb2.WorkerReport]:
        yield workers_pb2.WorkerReport(hello=self.hello(), load=ready_load())
        while (load := await self._reports.get()) is not None:
            yield workers_pb2.WorkerReport(load=load)


class _FakeDecode(decode_pb2_grpc.DecodeServicer):
    def __init__(self, worker: FakeWorker) -> None:
        self._worker = worker

    async def Decode(self, request: decode_pb2.DecodeRequest, context: Any) -> AsyncIterator[Any]:
        self._worker.deadlines_s.append(context.time_remaining())
        answer = self._worker.decode(request)
        try:
            async for message in answer:
                yield message
        finally:
            await answer.aclose()  # type: ignore[attr-defined]

    async def HandOver(self, request: decode_pb2.HandOverRequest, context: Any) -> decode_pb2.HandOverResponse:
        self._worker.deadlines_s.append(context.time_remaining())
        return await self._worker.depart(request)


class FakeFleet:
    """A real router with fake workers, which it ends with itself."""

    def __init__(self, router: Router) -> None:
        self.router = router
        self.workers: dict[str, FakeWorker] = {}
        self.hand_over = HandOver()

    async def add(
        self, name: str, role: int, epoch: str = "e1", num_blocks: int = 100, max_context_tokens: int = 0
    ) -> FakeWorker:
        worker = FakeWorker(name, role, self.hand_over, epoch, num_blocks)
        worker.max_context_tokens = max_context_tokens
        self.workers[name] = worker
        await worker.start(self.router.address)
        return worker

    @property
    def num_open(self) -> int:
        return sum(worker.num_open for worker in self.workers.values())

    async def settled(self) -> None:
        """Nothing is in flight any more, anywhere."""
        async with asyncio.timeout(5):
            while self.num_open or self.router.inference.num_in_flight:
                await asyncio.sleep(0.001)
        assert not any(worker.dispatches for worker in self.router.table.workers())


@asynccontextmanager
async def running_fleet(
    num_prefill: int = 0,
    num_decode: int = 0,
    num_both: int = 0,
    policy: RelayPolicy = POLICY,
    authenticator: Authenticator | None = None,
    planner: Planner | None = None,
    **settings: Any,
) -> AsyncIterator[FakeFleet]:
    """`settings` are other fields of the router's configuration."""
    config = RouterConfig("tiny", port=0, drain_s=1.0, max_prompt_bytes=1000, relay=policy, **settings)
    async with Router(config, CARD, authenticator=authenticator, planner=planner) as router:
        fleet = FakeFleet(router)
        try:
            for index in range(num_prefill):
                await fleet.add(f"p{index}", workers_pb2.ROLE_PREFILL)
            for index in range(num_decode):
                await fleet.add(f"d{index}", workers_pb2.ROLE_DECODE)
            for index in range(num_both):
                await fleet.add(f"w{index}", workers_pb2.ROLE_BOTH)
            yield fleet
        finally:
            for worker in fleet.workers.values():
                with suppress(grpc.aio.AioRpcError, asyncio.CancelledError):
                    await worker.die()


def layout_message() -> decode_pb2.KVLayout:
    return decode_pb2.KVLayout(
        model_digest="m1", dtype="float32", num_layers=2, num_kv_heads=2, head_dim=8, block_size=BLOCK_SIZE
    )


def ready_load(**numbers: int) -> workers_pb2.WorkerLoad:
    numbers.setdefault("num_free_blocks", 100)
    return workers_pb2.WorkerLoad(state=workers_pb2.WORKER_STATE_READY, **numbers)


def _tokens(
    request: prefill_pb2.PrefillRequest | decode_pb2.DecodeRequest, tokens: list[int], position: int
) -> inference_pb2.GenerateResponse:
    """As the workers do: a stop token wins over the length."""
    output_index = position - request.num_prompt_tokens
    reason = inference_pb2.FINISH_REASON_UNSPECIFIED
    if tokens[-1] in request.sampling.stop_token_ids:
        reason = inference_pb2.FINISH_REASON_STOP
    elif output_index + len(tokens) >= request.sampling.max_tokens:
        reason = inference_pb2.FINISH_REASON_LENGTH
    text = "".join(f"<{token}>" for token in tokens)
    return inference_pb2.GenerateResponse(output_index=output_index, token_ids=tokens, text=text, finish_reason=reason)


def _scores(
    request: prefill_pb2.PrefillRequest | decode_pb2.DecodeRequest,
) -> list[inference_pb2.GenerateResponse]:
    """Of the prompt's tokens, in two messages: each is as likely as its place says."""
    if not request.sampling.HasField("prompt_logprobs"):
        return []
    entries = [inference_pb2.TokenLogprobs()] + [
        inference_pb2.TokenLogprobs(chosen=inference_pb2.TokenLogprob(token_id=token, logprob=-place))
        for place, token in enumerate(request.token_ids[1 : request.num_prompt_tokens], start=1)
    ]
    chunks = [inference_pb2.PromptChunk(logprobs=part) for part in (entries[:5], entries[5:])]
    return [inference_pb2.GenerateResponse(prompt=chunk) for chunk in chunks]


def _prefill_stats(request: prefill_pb2.PrefillRequest) -> prefill_pb2.PrefillStats:
    prompt_tokens = inference_pb2.PromptTokens(computed=len(request.token_ids) - 1, cached=1)
    return prefill_pb2.PrefillStats(prompt_tokens=prompt_tokens, queue_s=0.001, compute_s=0.002, handover_s=0.0005)


def _decode_stats(request: decode_pb2.DecodeRequest) -> inference_pb2.DecodeStats:
    num_tokens = len(request.token_ids)
    if request.prefill_here:
        return inference_pb2.DecodeStats(computed_tokens=num_tokens, num_steps=1, decode_s=0.001)
    return inference_pb2.DecodeStats(received_tokens=num_tokens - 1, cached_tokens=1, num_steps=1, decode_s=0.001)
