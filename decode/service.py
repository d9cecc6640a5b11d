"""The gRPC edge of decode: the token stream towards the router, and the receiving side of the hand-over."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing

from decode import metrics
from decode.arrivals import Arrivals
from decode.decoding import DecodeSequence
from decode.departures import Departures
from decode.draft_planner import DraftPlanner
from decode.outbox import Outbox
from decode.scheduler import DecodeScheduler
from kvtransfer import messages
from kvtransfer.errors import LayoutMismatch
from kvtransfer.integrity import Verification
from kvtransfer.receiver import Receiver
from kvtransfer.receiver_options import ReceiverOptions
from kvtransfer.sender import Sender
from kvtransfer.sequence_messages import (
    check_followed,
    check_token_ids,
    follow_grammar,
    prompt_messages,
    scores_for,
    sequence_from_message,
    target_from_message,
    tokens_message,
)
from kvtransfer.ticket import PeerDescription, ReceivedSequence, SenderIdentity
from kvtransfer.unpacking import Unpacking
from model.answer_text import AnswerText
from model.block_pool import BlockPool
from model.grammar import Grammars
from model.runner import DraftingState, DraftingStates
from model.sequence import Sequence
from model.tokenizer import Tokenizer
from protos import decode_pb2, decode_pb2_grpc, inference_pb2, tracing
from protos.calls import Context
from protos.errors import AlreadyExists, FailedPrecondition, InvalidArgument, NotFound

logger = logging.getLogger(__name__)


class DecodeService(decode_pb2_grpc.DecodeServicer):
    def __init__(
        self,
        *,
        pool: BlockPool,
        description: PeerDescription,
        sender: Sender,
        tokenizer: Tokenizer,
        vocab_size: int,
        states: DraftingStates,
        max_running: int,
        lease_s: float,
        wake: Callable[[], None],
        planner: DraftPlanner | None = None,
        prompts_wait: Callable[[], bool] = lambda: False,
        verification: Verification | None = None,
        unpacking: Unpacking | None = None,
        grammars: Grammars | None = None,
    ) -> None:
        self._pool = pool
        self._layout = description.layout
        self._description = description
        self._tokenizer = tokenizer
        self._grammars = grammars or Grammars(tokenizer)
        self._vocab_size = vocab_size
        self._states = states
        self._wake = wake
        self.scheduler = DecodeScheduler(pool, max_running=max_running, planner=planner, prompts_wait=prompts_wait)
        self._departures = Departures(
            sender=sender,
            scheduler=self.scheduler,
            states=states,
            block_bytes=description.layout.block_bytes,
            wake=wake,
        )
        self._decoding: dict[str, DecodeSequence] = {}  # by attempt id, while its stream is open
        self._arrivals = Arrivals(unclaimed_s=lease_s, drop=lambda received: pool.release(received.block_ids))
        self.receiver = Receiver(
            pool,
            description.layout,
            description.epoch,
            options=ReceiverOptions.of_lease(lease_s),
            failed=self._arrivals.failed,
            headroom=lambda: self.scheduler.num_wanted_blocks,
            verification=verification,
            unpacking=unpacking,
        )
        sender.expect_writes_while(self._is_written_to)

    async def Decode(
        self, request: decode_pb2.DecodeRequest, context: Context
    ) -> AsyncIterator[inference_pb2.GenerateResponse]:
        sequence = self._sequence(request)
        await follow_grammar(sequence, self._grammars)
        if request.attempt_id in self._decoding:
            raise AlreadyExists(f"attempt_id {request.attempt_id!r} decodes here already", field="attempt_id")
        metrics.REQUESTS.inc()
        decoding, called_at = DecodeSequence(sequence, Outbox()), time.monotonic()
        with tracing.span(
            "decode", tracing.incoming.get(), request_id=request.request_id, attempt_id=request.attempt_id
        ) as span:
            if not request.prefill_here:
                await self._take_over(request.attempt_id, decoding)
                span.part("arrival", called_at, decoding.added_at, tokens=decoding.num_received_tokens)
            try:
                async with aclosing(self._stream(decoding)) as answer:
                    async for message in answer:
                        yield message
            finally:
                _trace(span, decoding)

    async def HandOver(self, request: decode_pb2.HandOverRequest, context: Context) -> decode_pb2.HandOverResponse:
        target = target_from_message(request.target, "target")
        decoding = self._decoding.get(request.attempt_id)
        if decoding is None:
            raise NotFound(f"no attempt {request.attempt_id!r} decodes here", field="attempt_id")
        if request.next_attempt_id in ("", request.attempt_id):
            raise InvalidArgument("next_attempt_id must be new and not empty", field="next_attempt_id")
        if target.epoch == self._description.epoch:
            raise InvalidArgument("the target is this worker itself", field="target")
        departure = await self._departures.hand_over(
            decoding, target, attempt_id=request.next_attempt_id, request_id=request.request_id
        )
        stats = _stats(decoding)
        metrics.observe(stats)
        return decode_pb2.HandOverResponse(
            stats=stats,
            num_tokens=departure.num_tokens,
            sent_tokens=departure.sent.sent_tokens,
            sent_bytes=departure.sent.sent_bytes,
            pause_s=departure.pause_s,
        )

    async def Describe(self, request: decode_pb2.DescribeRequest, context: Context) -> decode_pb2.PeerDescription:
        difference = self._layout.difference(messages.layout_from_message(request.layout))
        if difference is not None:
            raise LayoutMismatch(f"the two KV layouts differ: {difference}", field="layout")
        return messages.description_to_message(self._description)

    async def Reserve(self, request: decode_pb2.ReserveRequest, context: Context) -> decode_pb2.Ticket:
        reservation = messages.reservation_from_message(request)
        return messages.ticket_to_message(self.receiver.reserve(reservation))

    async def Commit(self, request: decode_pb2.HandoverRecord, context: Context) -> decode_pb2.CommitResponse:
        record = messages.record_from_message(request)
        check_token_ids("first_token_id", [record.first_token_id], self._vocab_size)
        received = await self.receiver.receive(record)
        if not received.drafting and not self._restored(received).blocks_are_whole:
            num_cached_blocks = received.num_cached_tokens // self._layout.block_size
            self._pool.withdraw(received.block_ids[num_cached_blocks:])  # the sender's drafter has failed on the way
        self._arrivals.committed(record.attempt_id, received)
        return decode_pb2.CommitResponse()

    async def Release(self, request: decode_pb2.ReleaseRequest, context: Context) -> decode_pb2.ReleaseResponse:
        self.receiver.release(request.ticket_id, request.sender_epoch, request.reason, mac=request.mac)
        return decode_pb2.ReleaseResponse()

    async def Attach(
        self, request_iterator: AsyncIterator[decode_pb2.Heartbeat], context: Context
    ) -> AsyncIterator[decode_pb2.HeartbeatResponse]:
        sender: SenderIdentity | None = None
        try:
            async for heartbeat in request_iterator:
                if sender is None:
                    sender = messages.heartbeat_sender(heartbeat)
                    self.receiver.sender_attached(sender.epoch)
                ended = self.receiver.heartbeat(sender, heartbeat.ticket_ids, heartbeat.heard_at)
                self.receiver.written(sender.epoch, heartbeat.num_written_blocks)
                yield decode_pb2.HeartbeatResponse(
                    ended_ticket_ids=ended, number=heartbeat.number, now=self.receiver.now
                )
        finally:
            if sender is not None:
                self.receiver.sender_gone(sender.epoch)

    def close(self) -> None:
        self._arrivals.close()

    def _is_written_to(self) -> bool:
        return self.receiver.num_reserved_blocks > 0 or self.receiver.num_quarantined_blocks > 0

    def _sequence(self, request: decode_pb2.DecodeRequest) -> Sequence:
        sequence = sequence_from_message(request, vocab_size=self._vocab_size, block_size=self._layout.block_size)
        sequence.scores = scores_for(sequence) if request.prefill_here else None
        num_tokens = sequence.num_prompt_tokens + sequence.sampling.max_tokens
        num_blocks = self._layout.num_blocks(num_tokens)
        if num_blocks > self._pool.num_blocks:
            raise InvalidArgument(
                f"prompt and max_tokens are {num_tokens} tokens together, which need {num_blocks} blocks; "
                f"this worker's cache holds {self._pool.num_blocks}",
                field="sampling.max_tokens",
            )
        return sequence

    async def _take_over(self, attempt_id: str, decoding: DecodeSequence) -> None:
        """Waits for the hand-over and gives the sequence the KV that arrived."""
        sequence = decoding.sequence
        if attempt_id not in self._arrivals:
            self.receiver.check_not_ended(attempt_id)  # or the stream would wait for ever
        try:
            received = await self._arrivals.claim(attempt_id)
        except asyncio.CancelledError:
            self.receiver.abort(attempt_id, "the router's stream ended")
            raise
        if received.num_tokens != sequence.num_tokens:
            self._pool.release(received.block_ids)
            raise FailedPrecondition(
                f"the prefill worker handed over {received.num_tokens} tokens; the router's stream has "
                f"{sequence.num_tokens}",
                field="token_ids",
            )
        sequence.drafting = self._restored(received)
        sequence.adopt(list(received.block_ids), received.num_tokens)
        sequence.append(received.first_token_id)
        decoding.num_received_tokens = received.num_received_tokens
        decoding.num_cached_tokens = received.num_cached_tokens
        decoding.added_at = time.monotonic()

    def _restored(self, received: ReceivedSequence) -> DraftingState:
        """To go on drafting. Where what came is of no use it has failed, and the answer is written without drafts."""
        drafting = DraftingState()
        try:
            self._states.restore_drafting(drafting, received.num_tokens, received.drafting)
        except Exception as error:
            traceback = None if isinstance(error, ValueError) else error
            logger.warning("attempt %s goes on without drafts: %s", received.attempt_id, error, exc_info=traceback)
            metrics.DRAFT_FAILURES.inc()
            return DraftingState(failed=True)
        return drafting

    async def _stream(self, decoding: DecodeSequence) -> AsyncGenerator[inference_pb2.GenerateResponse, None]:
        """Ends without a finish reason, or a message of its own for the end, if the sequence was handed over."""
        sequence = decoding.sequence
        output_index = sequence.num_output_tokens
        self._decoding[sequence.sequence_id] = decoding
        try:
            text = AnswerText(self._tokenizer, sequence.token_ids, sequence.num_prompt_tokens, sequence.sampling)
            sequence.text = text
            self.scheduler.add(decoding)
            self._wake()
            async for tokens, is_last in decoding.outbox.batches():
                finish_reason = sequence.finish_reason if is_last else None
                if finish_reason is not None:
                    check_followed(sequence)
                if not tokens and finish_reason is None:
                    break
                if (scores := sequence.scores) is not None:
                    sequence.scores = None
                    for part in prompt_messages(sequence.token_ids, scores):
                        yield part
                message = tokens_message(output_index, tokens, text.take(), finish_reason)
                if finish_reason is not None:
                    message.decode_stats.CopyFrom(_stats(decoding))
                    metrics.observe(message.decode_stats)
                output_index += len(tokens)
                metrics.OUTPUT_TOKENS.inc(len(tokens))
                yield message
        finally:
            del self._decoding[sequence.sequence_id]
            self.scheduler.remove(decoding)


def _trace(span: tracing.Span, decoding: DecodeSequence) -> None:
    ended_at = decoding.ended_at or time.monotonic()
    started_at = decoding.started_at or ended_at
    span.part("wait", decoding.added_at, started_at)
    span.part(
        "generate",
        started_at,
        ended_at,
        steps=decoding.num_steps,
        drafted_tokens=decoding.num_drafted_tokens,
        accepted_tokens=decoding.num_accepted_tokens,
    )


def _stats(decoding: DecodeSequence) -> inference_pb2.DecodeStats:
    ended_at = decoding.ended_at or time.monotonic()
    started_at = decoding.started_at or ended_at
    return inference_pb2.DecodeStats(
        received_tokens=decoding.num_received_tokens,
        cached_tokens=decoding.num_cached_tokens,
        computed_tokens=decoding.num_computed_tokens,
        recomputed_tokens=decoding.num_recomputed_tokens,
        num_preemptions=decoding.num_preemptions,
        wait_s=started_at - decoding.added_at,
        decode_s=ended_at - started_at,
        num_steps=decoding.num_steps,
        drafted_tokens=decoding.num_drafted_tokens,
        accepted_tokens=decoding.num_accepted_tokens,
    )
