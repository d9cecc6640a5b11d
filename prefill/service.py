"""The gRPC edge of prefill: one call is one sequence, from its tokens to the hand-over's end."""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import AsyncIterator, Callable, Iterator

from kvtransfer.errors import DecodePoolFull
from kvtransfer.outgoing import Outgoing
from kvtransfer.sender import Sender
from kvtransfer.sequence_messages import (
    check_followed,
    follow_grammar,
    prompt_messages,
    scores_for,
    sequence_from_message,
    target_from_message,
    tokens_message,
)
from kvtransfer.ticket import SendStats
from model.answer_text import AnswerText
from model.block_pool import BlockPool
from model.grammar import Grammars
from model.kv_layout import KVLayout
from model.runner import DraftingStates, SampledToken
from model.sequence import Sequence
from model.tokenizer import Tokenizer
from prefill import metrics
from prefill.scheduler import PrefillScheduler, PrefillSequence
from protos import inference_pb2, prefill_pb2, prefill_pb2_grpc, tracing
from protos.calls import Context
from protos.errors import AlreadyExists, Internal, InvalidArgument, ServiceError

logger = logging.getLogger(__name__)

_RESERVE_TIMEOUT_S = 5.0
_RETRY_S = 0.05  # if the decode worker names no time


class PrefillService(prefill_pb2_grpc.PrefillServicer):
    """Owns the tasks that reserve for its sequences and that end them; `close` waits for these."""

    def __init__(
        self,
        *,
        pool: BlockPool,
        layout: KVLayout,
        sender: Sender,
        tokenizer: Tokenizer,
        vocab_size: int,
        states: DraftingStates,
        wake: Callable[[], None],
        grammars: Grammars | None = None,
    ) -> None:
        self._pool = pool
        self._layout = layout
        self._sender = sender
        self._tokenizer = tokenizer
        self._grammars = grammars or Grammars(tokenizer)
        self._vocab_size = vocab_size
        self._states = states
        self._wake = wake
        self.scheduler = PrefillScheduler(pool, ask_for_ticket=self._ask_for_ticket)
        self._calls: dict[str, _Call] = {}
        self._endings: set[asyncio.Task[None]] = set()

    async def Prefill(
        self, request: prefill_pb2.PrefillRequest, context: Context
    ) -> AsyncIterator[prefill_pb2.PrefillResponse]:
        sequence = self._sequence(request)
        await follow_grammar(sequence, self._grammars)
        if request.attempt_id in self._calls:
            raise AlreadyExists(f"attempt_id {request.attempt_id!r} is being prefilled already", field="attempt_id")
        call = _Call(request, sequence)
        self._calls[request.attempt_id] = call
        metrics.REQUESTS.inc()
        with tracing.span(
            "prefill", tracing.incoming.get(), request_id=request.request_id, attempt_id=request.attempt_id
        ) as span:
            try:
                self.scheduler.add(call.prefilling)
                self._wake()
                token = await call.first_token
                text = self._appended(sequence, token)
                check_followed(sequence)
                call.first_token_at = time.monotonic()
                for message in _scored_prompt(sequence):
                    yield prefill_pb2.PrefillResponse(prompt=message)
                yield prefill_pb2.PrefillResponse(first_token=_first_token(call, token, text))
                stats = await self._hand_over(call, token)
                call.trace(span, stats)
                yield prefill_pb2.PrefillResponse(handed_over=stats)
            finally:
                await asyncio.shield(self._ending(call))

    async def close(self) -> None:
        """Ends every call that is still open; their clients get UNAVAILABLE from the server's own stop."""
        for call in list(self._calls.values()):
            self._ending(call)
        await asyncio.gather(*self._endings)

    def _sequence(self, request: prefill_pb2.PrefillRequest) -> Sequence:
        if request.HasField("decode"):
            target_from_message(request.decode, "decode")
        sequence = sequence_from_message(request, vocab_size=self._vocab_size, block_size=self._layout.block_size)
        sequence.scores = scores_for(sequence)
        num_blocks = self._layout.num_blocks(sequence.num_tokens)
        if num_blocks > self._pool.num_blocks:
            raise InvalidArgument(
                f"token_ids has {sequence.num_tokens} tokens, which need {num_blocks} blocks; "
                f"this worker's cache holds {self._pool.num_blocks}",
                field="token_ids",
            )
        return sequence

    def _ask_for_ticket(self, prefilling: PrefillSequence) -> None:
        call = self._calls[prefilling.sequence.sequence_id]
        call.reserving = asyncio.create_task(self._reserve(call))

    async def _reserve(self, call: _Call) -> None:
        """Asks the decode worker once. One that is full is asked again later; any other refusal ends the call."""
        sequence = call.prefilling.sequence
        try:
            call.outgoing = await self._sender.reserve(
                target_from_message(call.request.decode, "decode"),
                attempt_id=call.request.attempt_id,
                request_id=call.request.request_id,
                num_tokens=sequence.num_tokens,
                block_hashes=sequence.block_hashes,
                timeout_s=_RESERVE_TIMEOUT_S,
            )
            self.scheduler.grant(call.prefilling, call.outgoing)
        except DecodePoolFull as full:
            metrics.RESERVE_RETRIES.inc()
            self.scheduler.refuse(call.prefilling)
            # At random, or two workers that are full of each other's prompts might refuse each other in step for ever.
            await asyncio.sleep((full.retry_after_s or _RETRY_S) * random.uniform(0.5, 1.5))
            self.scheduler.ask_again(call.prefilling)
        except Exception as error:
            if not isinstance(error, ServiceError):
                logger.exception("no ticket could be asked for, for attempt %s", call.request.attempt_id)
            call.finish(error)
        self._wake()

    def _appended(self, sequence: Sequence, token: SampledToken) -> str:
        """The text that may go out with it."""
        text = AnswerText(self._tokenizer, sequence.token_ids, sequence.num_prompt_tokens, sequence.sampling)
        sequence.text = text
        sequence.append(token.token_id)
        return text.take()

    async def _hand_over(self, call: _Call, token: SampledToken) -> prefill_pb2.PrefillStats:
        sequence = call.prefilling.sequence
        sent = SendStats(sent_tokens=0, sent_bytes=0)
        if call.outgoing is not None and sequence.finish_reason is None:
            drafting = await asyncio.to_thread(self._states.export_drafting, sequence.drafting)
            sent = await call.outgoing.commit(token.token_id, sequence.num_computed_tokens, drafting)
            call.outgoing = None
        stats = call.stats(sent)
        metrics.observe(stats)
        return stats

    def _ending(self, call: _Call) -> asyncio.Task[None]:
        """A task of its own: a call that has failed may be cancelled in the very moment in which it lets go."""
        ending = asyncio.create_task(self._end(call))
        self._endings.add(ending)
        ending.add_done_callback(self._endings.discard)
        return ending

    async def _end(self, call: _Call) -> None:
        """Lets everything the call holds go; blocks being written stay held by the Outgoing until that ends."""
        self.scheduler.remove(call.prefilling)  # first: from here on nobody asks for its ticket
        self._calls.pop(call.request.attempt_id, None)
        if call.reserving is not None:
            call.reserving.cancel()
            await asyncio.wait([call.reserving])
        if call.outgoing is not None:
            outgoing, call.outgoing = call.outgoing, None
            await outgoing.abort("the request ended before it was handed over")


def _first_token(call: _Call, token: SampledToken, text: str) -> inference_pb2.GenerateResponse:
    sequence = call.prefilling.sequence
    return tokens_message(sequence.num_output_tokens - 1, [token], text, sequence.finish_reason)


def _scored_prompt(sequence: Sequence) -> Iterator[inference_pb2.GenerateResponse]:
    if sequence.scores is not None:
        yield from prompt_messages(sequence.token_ids, sequence.scores)


class _Call:
    """What one Prefill call holds."""

    def __init__(self, request: prefill_pb2.PrefillRequest, sequence: Sequence) -> None:
        self.request = request
        self.first_token: asyncio.Future[SampledToken] = asyncio.get_running_loop().create_future()
        decode_worker_id = request.decode.worker_id if request.HasField("decode") else None
        self.prefilling = PrefillSequence(sequence, decode_worker_id, self.finish, time.monotonic())
        self.outgoing: Outgoing | None = None
        self.reserving: asyncio.Task[None] | None = None
        self.first_token_at = 0.0

    def finish(self, result: SampledToken | Exception) -> None:
        """The first token, or why there will be none."""
        if self.first_token.done():
            return
        if isinstance(result, SampledToken):
            self.first_token.set_result(result)
        elif isinstance(result, ServiceError):
            self.first_token.set_exception(result)
        else:
            self.first_token.set_exception(Internal("this prompt could not be computed; the worker's log says why"))

    def stats(self, sent: SendStats) -> prefill_pb2.PrefillStats:
        prefilling, sequence = self.prefilling, self.prefilling.sequence
        started_at = prefilling.started_at or prefilling.added_at
        return prefill_pb2.PrefillStats(
            prompt_tokens=inference_pb2.PromptTokens(
                computed=sequence.num_computed_tokens - sequence.num_cached_tokens, cached=sequence.num_cached_tokens
            ),
            queue_s=started_at - prefilling.added_at,
            compute_s=self.first_token_at - started_at,
            handover_s=time.monotonic() - self.first_token_at,
            sent_tokens=sent.sent_tokens,
            sent_bytes=sent.sent_bytes,
        )

    def trace(self, span: tracing.Span, stats: prefill_pb2.PrefillStats) -> None:
        started_at, computed_at = self.first_token_at - stats.compute_s, self.first_token_at
        span.part("queue", started_at - stats.queue_s, started_at)
        span.part(
            "compute",
            started_at,
            computed_at,
            computed_tokens=stats.prompt_tokens.computed,
            cached_tokens=stats.prompt_tokens.cached,
        )
        if stats.sent_tokens:
            handed_over_at = computed_at + stats.handover_s
            span.part("hand-over", computed_at, handed_over_at, tokens=stats.sent_tokens, bytes=stats.sent_bytes)
