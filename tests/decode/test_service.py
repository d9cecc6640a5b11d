"""Decode calls and the receiving side of a hand-over, over gRPC: what arrives, what is refused, what is let go."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
from prometheus_client import REGISTRY

from decode.decoding import DecodeSequence
from kvtransfer import metrics as kvtransfer_metrics
from kvtransfer.errors import DecodePoolFull, RecordMismatch
from kvtransfer.loopback_agent import LoopbackNetwork
from model.block_pool import hash_blocks
from model.runner import DraftingState
from protos import decode_pb2
from protos.channel import service_errors
from protos.errors import DeadlineExceeded, FailedPrecondition, Internal, InvalidArgument, ServiceError
from tests.kvtransfer.cache import hashes_of
from tests.timed_calls import answer_to, decode_request, failure_of, prefill_request, prompt_of, tokens_of
from tests.timed_worker import BLOCK, LAYOUT, TimedWorker, eventually, running

NUM_BLOCKS = 16
PROMPT = prompt_of(5 * BLOCK + 2)  # six blocks


@asynccontextmanager
async def one_worker(**options: Any) -> AsyncIterator[TimedWorker]:
    worker = TimedWorker(LoopbackNetwork(), "decode-0", **{"num_blocks": NUM_BLOCKS, "verified_share": 0.0, **options})
    async with running(worker):
        yield worker


@asynccontextmanager
async def two_workers() -> AsyncIterator[tuple[TimedWorker, TimedWorker]]:
    network = LoopbackNetwork()
    prefill = TimedWorker(network, "prefill-0", num_blocks=NUM_BLOCKS)
    decode = TimedWorker(network, "decode-0", num_blocks=NUM_BLOCKS)
    async with running(prefill, decode):
        yield prefill, decode


def here(worker: TimedWorker, name: str, prompt: list[int], max_tokens: int, timeout_s: float | None = None) -> Any:
    """A call that is prefilled and decoded on the same worker."""
    request = decode_request(name, prompt, max_tokens=max_tokens, prefill_here=True)
    return worker.decode_stub.Decode(request, timeout=timeout_s)


class Peer:
    """A prefill worker by hand: an Attach stream that is kept open, reservations and records."""

    def __init__(self, worker: TimedWorker, epoch: str = "s1") -> None:
        self.worker, self.epoch = worker, epoch
        self.ticket_ids: list[str] = []
        self._attachment = asyncio.create_task(self._attach())
        self.attached = asyncio.Event()

    async def _attach(self) -> None:
        async for _ in self.worker.decode_stub.Attach(self._heartbeats()):
            self.attached.set()

    async def _heartbeats(self) -> AsyncIterator[decode_pb2.Heartbeat]:
        while True:
            yield decode_pb2.Heartbeat(sender_epoch=self.epoch, sender_worker_id="by-hand", ticket_ids=self.ticket_ids)
            await asyncio.sleep(0.05)

    async def reserve(self, attempt_id: str = "a", num_tokens: int = len(PROMPT)) -> decode_pb2.Ticket:
        await self.attached.wait()
        request = decode_pb2.ReserveRequest(
            attempt_id=attempt_id,
            sender_epoch=self.epoch,
            sender_worker_id="by-hand",
            layout_fingerprint=LAYOUT.fingerprint,
            num_tokens=num_tokens,
            block_hashes=hashes_of(num_tokens, first=1000),  # of some prompt that nobody else sends
        )
        with service_errors():
            ticket = await self.worker.decode_stub.Reserve(request)
        self.ticket_ids.append(ticket.ticket_id)
        return ticket

    def record(self, ticket: decode_pb2.Ticket, num_tokens: int = len(PROMPT)) -> decode_pb2.HandoverRecord:
        return decode_pb2.HandoverRecord(
            ticket_id=ticket.ticket_id,
            attempt_id="a",
            epoch=ticket.epoch,
            sender_epoch=self.epoch,
            layout_fingerprint=LAYOUT.fingerprint,
            generations=ticket.generations,
            num_tokens=num_tokens,
            first_token_id=7,
            sent_tokens=num_tokens,
            sent_bytes=len(ticket.block_ids) * LAYOUT.block_bytes,
            mac=ticket.mac,
        )

    async def commit(self, record: decode_pb2.HandoverRecord) -> None:
        with service_errors():
            await self.worker.decode_stub.Commit(record)

    async def release(self, ticket: decode_pb2.Ticket) -> None:
        await self.worker.decode_stub.Release(
            decode_pb2.ReleaseRequest(ticket_id=ticket.ticket_id, sender_epoch=self.epoch, mac=ticket.mac)
        )

    async def leave(self) -> None:
        self._attachment.cancel()
        await asyncio.wait([self._attachment])


@asynccontextmanager
async def peer_of(worker: TimedWorker, epoch: str = "s1") -> AsyncIterator[Peer]:
    peer = Peer(worker, epoch)
    try:
        yield peer
    finally:
        await peer.leave()


async def test_prefilled_and_decoded_here() -> None:
    async with one_worker() as worker:
        assert await tokens_of(here(worker, "a", PROMPT, 9)) == answer_to(PROMPT, 9)


async def test_prompt_scored_here_comes_before_the_answer_and_that_of_another_worker_is_not_told() -> None:
    async with two_workers() as (prefill, decode):
        request = decode_request("a", PROMPT, max_tokens=3, prefill_here=True)
        request.sampling.prompt_logprobs = 0
        with service_errors():
            first, *messages = [message async for message in decode.decode_stub.Decode(request)]
        assert [entry.chosen.token_id for entry in first.prompt.logprobs] == [0, *PROMPT[1:]]
        assert not any(message.HasField("prompt") for message in messages)
        assert [token for message in messages for token in message.token_ids] == answer_to(PROMPT, 3)
        handed_over = decode_request("b", PROMPT, max_tokens=3)
        handed_over.sampling.prompt_logprobs = 0
        decoding = decode.decode_stub.Decode(handed_over)
        prefilling = prefill.prefill_stub.Prefill(prefill_request("b", PROMPT, decode.target, max_tokens=3))
        with service_errors():
            messages = [message async for message in decoding]
        prefilling.cancel()
        assert not any(message.HasField("prompt") for message in messages)


async def test_worker_refuses_a_bias_for_a_token_it_does_not_have() -> None:
    async with one_worker() as worker:
        request = decode_request("a", PROMPT, prefill_here=True)
        request.sampling.logit_bias[256] = 1.0
        with pytest.raises(InvalidArgument, match="logit_bias has 256; this worker's model has token ids 0 to 255"):
            await tokens_of(worker.decode_stub.Decode(request))


async def test_client_that_leaves_before_anything_arrived() -> None:
    """Whatever a prefill worker does for it later is refused."""
    async with two_workers() as (prefill, decode):
        decoding = decode.decode_stub.Decode(decode_request("a", PROMPT))
        await eventually(lambda: "a" in decode.decode._arrivals)
        decoding.cancel()
        await eventually(lambda: "a" not in decode.decode._arrivals)
        error = await failure_of(prefill.prefill_stub.Prefill(prefill_request("a", PROMPT, decode.target)))
        assert (error.reason, decode.pool.num_used) == ("ATTEMPT_ENDED", 0)
        again = await failure_of(decode.decode_stub.Decode(decode_request("a", PROMPT)))
        assert again.reason == "ATTEMPT_ENDED"  # it would wait for ever


async def test_client_that_leaves_while_its_prompt_is_computed() -> None:
    async with two_workers() as (prefill, decode):
        prefill.runner.hold(after_steps=1)
        decoding = decode.decode_stub.Decode(decode_request("a", PROMPT))
        await eventually(lambda: "a" in decode.decode._arrivals)
        prefilling = prefill.prefill_stub.Prefill(prefill_request("a", PROMPT, decode.target))
        await eventually(lambda: prefill.runner.is_waiting)
        decoding.cancel()
        await eventually(lambda: decode.decode.receiver.num_reserved_blocks == 0)
        prefill.runner.go_on()
        assert (await failure_of(prefilling)).reason in ("TICKET_ENDED", "ATTEMPT_ENDED")


async def test_client_that_leaves_while_the_last_writes_move() -> None:
    """Its blocks are not given to anybody before they have landed."""
    async with two_workers() as (prefill, decode):
        prefill.hold_writes()
        decoding = decode.decode_stub.Decode(decode_request("a", PROMPT))
        await eventually(lambda: "a" in decode.decode._arrivals)
        prefilling = prefill.prefill_stub.Prefill(prefill_request("a", PROMPT, decode.target))
        await prefilling.read()
        decoding.cancel()
        await eventually(lambda: decode.decode.receiver.num_quarantined_blocks == 6)
        error = await failure_of(here(decode, "other", prompt_of(4 * NUM_BLOCKS - 12, first=3), 8, timeout_s=0.1))
        assert isinstance(error, DeadlineExceeded)  # it needs thirteen blocks; ten are to be had
        assert (prefill.pool.num_used, decode.pool.num_used) == (6, 6)
        prefill.land_writes()
        assert (await failure_of(prefilling)).reason in ("TICKET_ENDED", "ATTEMPT_ENDED")


async def test_client_that_leaves_while_its_answer_is_written() -> None:
    async with two_workers() as (prefill, decode):
        decode.runner.hold(after_steps=1)
        other = here(decode, "b", prompt_of(6, first=1), 20)
        await eventually(lambda: decode.runner.is_waiting)
        leaving = decode.decode_stub.Decode(decode_request("a", PROMPT, max_tokens=30))
        prefilling = prefill.prefill_stub.Prefill(prefill_request("a", PROMPT, decode.target))
        await eventually(lambda: decode.decode.scheduler.num_waiting == 1)
        decode.runner.let_run(2)  # the second one for both
        await leaving.read()
        await eventually(lambda: decode.runner.is_waiting)
        assert decode.decode.scheduler.num_running == 2
        leaving.cancel()
        await eventually(lambda: decode.decode.scheduler.num_running == 1)
        assert decode.pool.num_used == 6 + 3  # the step that runs may still write them
        decode.runner.go_on()
        assert [response async for response in prefilling][-1].HasField("handed_over")
        assert await tokens_of(other) == answer_to(prompt_of(6, first=1), 20)


async def test_client_that_leaves_while_it_waits_for_its_turn() -> None:
    async with one_worker(max_running=1) as worker:
        worker.runner.hold(after_steps=1)
        first = here(worker, "a", prompt_of(6), 8)
        await eventually(lambda: worker.runner.is_waiting)
        second = here(worker, "b", prompt_of(6, first=1), 8)
        await eventually(lambda: worker.decode.scheduler.num_waiting == 1)
        second.cancel()
        await eventually(lambda: worker.decode.scheduler.num_waiting == 0)
        worker.runner.go_on()
        assert await tokens_of(first) == answer_to(prompt_of(6), 8)


async def test_deadline_that_passes_before_anything_arrived() -> None:
    async with one_worker() as worker, peer_of(worker) as peer:
        error = await failure_of(worker.decode_stub.Decode(decode_request("a", PROMPT), timeout=0.1))
        assert isinstance(error, DeadlineExceeded)
        await eventually(lambda: "a" not in worker.decode._arrivals)
        with pytest.raises(ServiceError, match="attempt 'a' was aborted"):
            await peer.reserve()


async def test_deadline_that_passes_while_the_answer_is_written() -> None:
    async with one_worker() as worker:
        worker.runner.hold(after_steps=2)
        error = await failure_of(here(worker, "a", prompt_of(6), 30, timeout_s=0.2))
        assert isinstance(error, DeadlineExceeded)
        await eventually(lambda: worker.decode.scheduler.num_running == 0)
        worker.runner.go_on()


async def test_failed_step_ends_its_answers_and_says_nothing_of_the_inside() -> None:
    async with one_worker() as worker:
        worker.runner.failure = RuntimeError("secret")
        error = await failure_of(here(worker, "a", PROMPT, 9))
        assert isinstance(error, Internal)
        assert "secret" not in str(error)
        assert await tokens_of(here(worker, "b", PROMPT, 9)) == answer_to(PROMPT, 9)


MISMATCHES: list[tuple[str, Callable[[decode_pb2.HandoverRecord], object]]] = [
    ("epoch", lambda record: setattr(record, "epoch", "before")),
    ("sender_epoch", lambda record: setattr(record, "sender_epoch", "s0")),
    ("layout_fingerprint", lambda record: setattr(record, "layout_fingerprint", "another")),
    ("generations", lambda record: record.generations.__setitem__(0, record.generations[0] + 1)),
    ("generations", lambda record: record.generations.pop()),
    ("attempt_id", lambda record: setattr(record, "attempt_id", "b")),
    ("num_tokens", lambda record: setattr(record, "num_tokens", record.num_tokens - 1)),
]


@pytest.mark.parametrize(("field", "spoil"), MISMATCHES)
async def test_record_that_is_not_its_tickets_is_refused_and_counted(
    field: str, spoil: Callable[[decode_pb2.HandoverRecord], object]
) -> None:
    async with one_worker() as worker, peer_of(worker) as peer:
        ignored = kvtransfer_metrics.IGNORED.labels("record")
        num_ignored = ignored._value.get()
        decoding = worker.decode_stub.Decode(decode_request("a", PROMPT, max_tokens=2))
        ticket = await peer.reserve()
        record = peer.record(ticket)
        spoil(record)
        with pytest.raises(RecordMismatch) as refused:
            await peer.commit(record)
        assert refused.value.field == field
        assert ignored._value.get() == num_ignored + 1
        assert worker.decode.receiver.num_reserved_blocks == 6
        await peer.commit(peer.record(ticket))  # the ticket is as it was
        assert len(await tokens_of(decoding)) == 1


async def test_blocks_that_were_given_out_again_void_their_ticket() -> None:
    """Whatever defect it was: nothing is decoded from them."""
    async with one_worker() as worker, peer_of(worker) as peer:
        ticket = await peer.reserve()
        worker.pool.release(ticket.block_ids)
        assert sorted(worker.pool.allocate(6)) == sorted(ticket.block_ids)
        with pytest.raises(RecordMismatch, match="generations"):
            await peer.commit(peer.record(ticket))
        await peer.release(ticket)


async def test_hand_over_of_another_length_than_the_stream_has_is_refused() -> None:
    async with one_worker() as worker, peer_of(worker) as peer:
        decoding = worker.decode_stub.Decode(decode_request("a", PROMPT[:-1]))
        await peer.commit(peer.record(await peer.reserve()))
        error = await failure_of(decoding)
        assert isinstance(error, FailedPrecondition)
        assert error.field == "token_ids"


async def handed_over(prefill: TimedWorker, decode: TimedWorker, attempt_id: str, prompt: list[int]) -> list[int]:
    """The tokens that the decode worker adds to the prefill worker's first one."""
    decoding = decode.decode_stub.Decode(decode_request(attempt_id, prompt, max_tokens=9))
    prefilling = prefill.prefill_stub.Prefill(prefill_request(attempt_id, prompt, decode.target, max_tokens=9))
    assert [response async for response in prefilling][-1].HasField("handed_over")
    return await tokens_of(decoding)


def num_found(worker: TimedWorker, prompt: list[int]) -> int:
    """Full blocks of a prompt that others would start from."""
    found = worker.pool.match_prefix(hash_blocks(prompt, BLOCK))
    worker.pool.release(found)
    return len(found)


@pytest.mark.parametrize("error", [ValueError("it is not finite"), RuntimeError("no such device")])
async def test_drafting_state_of_no_use_turns_drafting_off_and_the_answer_is_right(
    error: Exception, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def restore(drafting: DraftingState, num_computed_tokens: int, state: bytes) -> None:
        assert (num_computed_tokens, state) == (len(PROMPT), b"features")
        drafting.value = "half of it"
        raise error

    async with two_workers() as (prefill, decode):
        decodings: list[DecodeSequence] = []
        add = decode.decode.scheduler.add

        def added(decoding: DecodeSequence) -> None:
            decodings.append(decoding)
            add(decoding)

        monkeypatch.setattr(decode.decode.scheduler, "add", added)
        monkeypatch.setattr(prefill.runner, "export_drafting", lambda drafting: b"features")
        monkeypatch.setattr(decode.runner, "restore_drafting", restore)
        num_failures = REGISTRY.get_sample_value("pdserve_draft_failures_total") or 0.0
        assert await handed_over(prefill, decode, "a", PROMPT) == answer_to(PROMPT, 9)[1:]
        assert REGISTRY.get_sample_value("pdserve_draft_failures_total") == num_failures + 1
        (decoding,) = decodings
        assert (decoding.sequence.drafting.failed, decoding.sequence.drafting.value) == (True, None)
        assert num_found(decode, PROMPT) == 5  # the sender's drafter had filled them
    (message,) = [message for message in caplog.messages if "without drafts" in message]
    assert message == f"attempt a goes on without drafts: {error}"


async def test_blocks_that_the_senders_drafter_has_not_filled_are_not_for_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A sender whose drafter has failed says so by sending no state. What was held here before stays findable."""

    def restore(drafting: DraftingState, num_computed_tokens: int, state: bytes) -> None:
        drafting.failed, drafting.blocks_are_whole = not state, bool(state)

    async with two_workers() as (prefill, decode):
        monkeypatch.setattr(decode.runner, "restore_drafting", restore)
        for name, state, prompt, expected in (
            ("whole", b"features", PROMPT, 5),
            ("broken", b"", [*PROMPT[: 2 * BLOCK], *prompt_of(3 * BLOCK + 1, first=2)], 2),
        ):
            monkeypatch.setattr(prefill.runner, "export_drafting", lambda drafting, state=state: state)
            assert await handed_over(prefill, decode, name, prompt) == answer_to(prompt, 9)[1:]
            assert num_found(decode, prompt) == expected
        assert num_found(decode, PROMPT) == 5


async def test_answer_that_could_never_fit_is_refused() -> None:
    async with one_worker() as worker:
        error = await failure_of(here(worker, "a", PROMPT, NUM_BLOCKS * BLOCK))
        assert isinstance(error, InvalidArgument)
        assert error.field == "sampling.max_tokens"


async def test_blocks_that_running_answers_need_next_are_not_given_to_a_hand_over() -> None:
    """Or they would be preempted for a newcomer."""
    async with one_worker() as worker, peer_of(worker) as peer:
        scheduler = worker.decode.scheduler
        worker.runner.hold()
        prompts = [prompt_of(6, first=0), prompt_of(7, first=1)]
        calls = [here(worker, "b", prompts[0], 12)]
        await eventually(lambda: worker.runner.is_waiting)
        calls.append(here(worker, "c", prompts[1], 12))
        await eventually(lambda: scheduler.num_waiting == 1)
        worker.runner.let_run(2)  # b has two tokens then, and c one: both fill two blocks
        await eventually(lambda: worker.runner.is_waiting and worker.runner.num_steps == 2)
        assert scheduler.num_running == 2
        num_free = worker.pool.num_free
        with pytest.raises(DecodePoolFull, match=f"{num_free - 1} KV blocks wanted, {num_free - 2} to give"):
            await peer.reserve("a", (num_free - 1) * BLOCK)
        ticket = await peer.reserve("a", (num_free - 2) * BLOCK)
        await peer.release(ticket)
        worker.runner.go_on()
        assert [await tokens_of(call) for call in calls] == [answer_to(prompt, 12) for prompt in prompts]


async def test_small_prompts_of_one_worker_do_not_take_what_a_large_one_of_another_waits_for() -> None:
    async with one_worker() as worker, peer_of(worker, "large") as large, peer_of(worker, "small") as small:
        held = worker.pool.allocate(NUM_BLOCKS - 4)
        with pytest.raises(DecodePoolFull):
            await large.reserve("a", 6 * BLOCK)
        with pytest.raises(DecodePoolFull, match="2 KV blocks wanted, 0 to give"):
            await small.reserve("b", 2 * BLOCK)
        worker.pool.release(held[:3])
        with pytest.raises(DecodePoolFull, match="2 KV blocks wanted, 1 to give"):
            await small.reserve("b", 2 * BLOCK)
        tickets = [await large.reserve("a", 6 * BLOCK)]
        worker.pool.release(held[3:])
        tickets.append(await small.reserve("b", 2 * BLOCK))
        await large.release(tickets[0])
        await small.release(tickets[1])
