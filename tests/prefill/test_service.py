"""Prefill calls against a real decode worker: what the stream says, and that both sides let everything go."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest

from decode.draft_planner import FixedDrafts
from decode.outlook import ANYTHING
from kvtransfer import metrics as kvtransfer_metrics
from kvtransfer.loopback_agent import LoopbackNetwork
from model.runner import DraftingState
from prefill import metrics
from protos import inference_pb2, prefill_pb2
from protos.channel import service_errors
from protos.errors import AlreadyExists, DeadlineExceeded, Internal
from tests.timed_calls import answer_to, decode_request, failure_of, prefill_request, prompt_of, tokens_of
from tests.timed_worker import BLOCK, LAYOUT, TimedWorker, eventually, running

NUM_BLOCKS = 16
PROMPT = prompt_of(5 * BLOCK + 2)  # three chunks, six blocks


class Pair:
    def __init__(self, prefill: TimedWorker, decode: TimedWorker) -> None:
        self.prefill, self.decode = prefill, decode

    def ask(
        self, attempt_id: str = "a", prompt: list[int] = PROMPT, timeout_s: float | None = None, **kind: Any
    ) -> Any:
        request = prefill_request(attempt_id, prompt, self.decode.target, **kind)
        return self.prefill.prefill_stub.Prefill(request, timeout=timeout_s)

    def open_decode(self, attempt_id: str = "a", prompt: list[int] = PROMPT, max_tokens: int = 4) -> Any:
        return self.decode.decode_stub.Decode(decode_request(attempt_id, prompt, max_tokens=max_tokens))

    async def ticket_granted(self) -> None:
        await eventually(lambda: self.decode.decode.receiver.num_reserved_blocks == 6)

    @property
    def num_used(self) -> tuple[int, int]:
        return self.prefill.pool.num_used, self.decode.pool.num_used


@asynccontextmanager
async def pair(**prefill_options: Any) -> AsyncIterator[Pair]:
    network = LoopbackNetwork()
    prefill = TimedWorker(network, "prefill-0", num_blocks=NUM_BLOCKS, **prefill_options)
    decode = TimedWorker(network, "decode-0", num_blocks=NUM_BLOCKS)
    async with running(prefill, decode):
        yield Pair(prefill, decode)


async def read(call: Any) -> tuple[inference_pb2.GenerateResponse, prefill_pb2.PrefillStats]:
    """The two messages of a call that goes well."""
    with service_errors():
        responses = [response async for response in call]
    assert [response.WhichOneof("event") for response in responses] == ["first_token", "handed_over"]
    return responses[0].first_token, responses[1].handed_over


def num_refused() -> float:
    value = kvtransfer_metrics.TICKETS.labels("refused")._value.get()
    assert isinstance(value, float)
    return value


async def test_what_was_prefilled_here_is_decoded_there() -> None:
    async with pair() as both:
        decoding = both.open_decode(max_tokens=9)
        first, stats = await read(both.ask(max_tokens=9))
        tokens = await tokens_of(decoding)
        assert [*first.token_ids, *tokens] == answer_to(PROMPT, 9)
        assert (stats.prompt_tokens.computed, stats.prompt_tokens.cached) == (len(PROMPT), 0)
        assert (stats.sent_tokens, stats.sent_bytes) == (len(PROMPT), 6 * LAYOUT.block_bytes)


async def test_while_decode_is_full_a_prompt_waits_without_blocks_and_then_goes_through() -> None:
    async with pair() as both:
        others = both.decode.pool.allocate(NUM_BLOCKS - 5)  # one too many for the prompt's six
        refused = num_refused()
        decoding, prefilling = both.open_decode(), asyncio.create_task(read(both.ask()))
        await eventually(lambda: num_refused() >= refused + 3 and both.prefill.pool.num_used == 0)
        assert (both.prefill.prefill.scheduler.num_waiting, both.decode.pool.num_used) == (1, NUM_BLOCKS - 5)
        assert not prefilling.done()
        elsewhere, _ = await read(both.prefill.prefill_stub.Prefill(prefill_request("b", prompt_of(9, first=1), None)))
        assert list(elsewhere.token_ids) == answer_to(prompt_of(9, first=1), 1)  # only this worker's line waits
        both.decode.pool.release(others)
        first, stats = await prefilling
        assert [*first.token_ids, *await tokens_of(decoding)] == answer_to(PROMPT, 4)
        assert stats.queue_s > 0


async def test_nobody_overtakes_the_prompt_that_decode_has_no_room_for_while_it_asks_again() -> None:
    async with pair() as both:
        others = both.decode.pool.allocate(NUM_BLOCKS - 5)
        refused = num_refused()
        large = asyncio.create_task(read(both.ask("large")))
        await eventually(lambda: num_refused() > refused)
        await asyncio.sleep(0.05)  # it has waited: shorter ones rank behind it, as if it had 25 tokens less
        small = asyncio.create_task(read(both.ask("small", prompt_of(BLOCK, first=1), max_tokens=1)))
        await eventually(lambda: num_refused() >= refused + 4)
        assert not small.done()  # there is room for it
        both.decode.pool.release(others)
        await asyncio.gather(large, small)
        both.decode.decode.close()  # nobody fetches what was handed over


async def test_one_that_decode_refuses_for_good_fails_at_once() -> None:
    async with pair() as both:
        both.decode.decode.receiver.abort("a", "the client left")
        error = await failure_of(both.ask())
        assert (error.reason, error.retryable) == ("ATTEMPT_ENDED", True)
        assert "the client left" in str(error)
        await eventually(lambda: both.num_used == (0, 0))


async def test_ticket_that_ends_midway_ends_the_prefill() -> None:
    async with pair() as both:
        both.prefill.runner.hold(after_steps=1)
        prefilling = both.ask()
        await eventually(lambda: both.prefill.runner.is_waiting)
        both.decode.decode.receiver.abort("a", "the router cancelled")
        call = next(iter(both.prefill.prefill._calls.values()))
        await eventually(lambda: call.outgoing is not None and call.outgoing.failed is not None)
        both.prefill.runner.go_on()
        assert (await failure_of(prefilling)).reason == "TICKET_ENDED"
        assert both.prefill.runner.num_steps == 2  # the third chunk was not computed


async def test_another_process_start_of_the_decode_worker_is_refused() -> None:
    async with pair() as both:
        target = both.decode.target
        target.epoch = "before"
        error = await failure_of(both.prefill.prefill_stub.Prefill(prefill_request("a", PROMPT, target)))
        assert (error.reason, error.retryable) == ("STALE_PEER", True)
        await read(both.ask("b"))  # connected now
        error = await failure_of(both.prefill.prefill_stub.Prefill(prefill_request("c", PROMPT, target)))
        assert error.reason == "STALE_PEER"
        both.decode.decode.close()


async def test_another_layout_is_refused() -> None:
    async with pair(layout=replace(LAYOUT, num_layers=2)) as both:
        error = await failure_of(both.ask())
        assert (error.reason, error.retryable) == ("LAYOUT_MISMATCH", False)
        assert "num_layers" in str(error)


async def test_failure_that_nobody_foresaw_ends_the_call(monkeypatch: pytest.MonkeyPatch) -> None:
    async def reserve(*arguments: object, **options: object) -> None:
        raise RuntimeError("secret")

    async with pair() as both:
        monkeypatch.setattr(both.prefill.sender, "reserve", reserve)
        error = await failure_of(both.ask())
        assert isinstance(error, Internal)
        assert "secret" not in str(error)


async def test_failed_step_ends_its_prompt_and_gives_the_ticket_back() -> None:
    async with pair() as both:
        both.prefill.runner.failure = RuntimeError("secret")
        decoding = both.open_decode()
        error = await failure_of(both.ask())
        assert isinstance(error, Internal)
        assert "secret" not in str(error)
        assert (await failure_of(decoding)).reason == "TICKET_ENDED"


async def test_scored_prompt_comes_in_parts_before_its_token_and_is_computed_whole(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("kvtransfer.sequence_messages._SCORES_AT_ONCE", 16)  # eight tokens, with an alternative each
    async with pair() as both:
        for attempt_id in ("a", "b"):  # the second time the prefix cache has it
            request = prefill_request(attempt_id, PROMPT, None, max_tokens=1)
            request.sampling.prompt_logprobs = 1
            with service_errors():
                responses = [response async for response in both.prefill.prefill_stub.Prefill(request)]
            *parts, first, last = responses
            assert [response.WhichOneof("event") for response in parts] == ["prompt"] * 3
            assert [len(part.prompt.prompt.logprobs) for part in parts] == [8, 8, 6]
            scores = [entry for part in parts for entry in part.prompt.prompt.logprobs]
            assert not scores[0].HasField("chosen")
            assert [entry.chosen.token_id for entry in scores[1:]] == PROMPT[1:]
            assert [[top.token_id for top in entry.top] for entry in scores[1:]] == [[token] for token in PROMPT[1:]]
            assert list(first.first_token.token_ids) == answer_to(PROMPT, 1)
            assert last.handed_over.prompt_tokens == inference_pb2.PromptTokens(computed=len(PROMPT))
        _, stats = await read(both.prefill.prefill_stub.Prefill(prefill_request("c", PROMPT, None, max_tokens=1)))
        assert stats.prompt_tokens.cached == len(PROMPT) // BLOCK * BLOCK


@pytest.mark.parametrize("by_length", [True, False])
async def test_one_token_that_is_the_last_gives_the_ticket_back(by_length: bool) -> None:
    (last,) = answer_to(PROMPT, 1)
    async with pair() as both:
        decoding = both.open_decode()
        call = both.ask(max_tokens=1) if by_length else both.ask(max_tokens=9, stop_token_ids=[last])
        first, stats = await read(call)
        assert list(first.token_ids) == [last]
        expected = inference_pb2.FINISH_REASON_LENGTH if by_length else inference_pb2.FINISH_REASON_STOP
        assert first.finish_reason == expected
        assert (stats.sent_tokens, stats.sent_bytes, stats.prompt_tokens.computed) == (0, 0, len(PROMPT))
        assert (await failure_of(decoding)).reason == "TICKET_ENDED"  # nothing arrived


async def test_second_call_of_an_attempt_is_refused_and_the_first_goes_on() -> None:
    async with pair() as both:
        both.prefill.runner.hold()
        first = asyncio.create_task(read(both.ask(max_tokens=1)))
        await eventually(lambda: both.prefill.runner.is_waiting)
        with pytest.raises(AlreadyExists):
            await read(both.ask(max_tokens=1))
        both.prefill.runner.go_on()
        await first


async def test_client_that_leaves_while_decode_is_full() -> None:
    async with pair() as both:
        others = both.decode.pool.allocate(NUM_BLOCKS)
        refused = num_refused()
        call = both.ask()
        await eventually(lambda: num_refused() >= refused + 2)
        call.cancel()
        await eventually(lambda: both.prefill.is_at_rest)
        both.decode.pool.release(others)
        asked = metrics.RESERVE_RETRIES._value.get()
        await read(both.ask("b", max_tokens=1))
        assert metrics.RESERVE_RETRIES._value.get() == asked  # nobody asks for it any more


async def test_client_that_leaves_while_its_ticket_is_on_the_way(monkeypatch: pytest.MonkeyPatch) -> None:
    arrives = asyncio.Event()

    async def late(*arguments: Any) -> object:
        outgoing = await reserve(*arguments)
        await arrives.wait()
        return outgoing

    async with pair() as both:
        reserve = both.prefill.sender._reserve
        monkeypatch.setattr(both.prefill.sender, "_reserve", late)
        decoding, call = both.open_decode(), both.ask()
        await both.ticket_granted()
        call.cancel()
        await eventually(lambda: not both.prefill.prefill.scheduler.num_waiting)
        arrives.set()
        assert (await failure_of(decoding)).reason == "TICKET_ENDED"


async def test_client_that_leaves_while_this_worker_is_full() -> None:
    async with pair() as both:
        others = both.prefill.pool.allocate(NUM_BLOCKS - 5)
        call = both.ask()
        await eventually(lambda: both.prefill.prefill.scheduler.num_waiting == 1)
        call.cancel()
        await eventually(lambda: both.prefill.prefill.scheduler.num_waiting == 0)
        both.prefill.pool.release(others)
        assert both.decode.pool.num_used == 0


async def test_client_that_leaves_in_the_middle_of_prefill() -> None:
    async with pair() as both:
        both.prefill.runner.hold(after_steps=1)
        decoding, call = both.open_decode(), both.ask()
        await both.ticket_granted()
        await eventually(lambda: both.prefill.runner.is_waiting)
        call.cancel()
        assert (await failure_of(decoding)).reason == "TICKET_ENDED"
        assert both.prefill.pool.num_used == 6  # the step that runs still writes them
        both.prefill.runner.go_on()
        await eventually(lambda: both.num_used == (0, 0))


@pytest.mark.parametrize("num_turns", range(4))
async def test_call_that_is_cancelled_while_it_lets_go(num_turns: int) -> None:
    """A failure and the client's leaving may come together: the second must not keep the first from its end."""
    async with pair() as workers:
        workers.prefill.runner.hold(after_steps=1)
        request = prefill_request("a", prompt_of(6 * BLOCK), workers.decode.target)

        async def answers() -> None:
            async for _ in workers.prefill.prefill.Prefill(request, None):  # type: ignore[arg-type]
                pass

        call = asyncio.create_task(answers())
        await eventually(lambda: workers.prefill.runner.is_waiting and workers.decode.pool.num_used > 0)
        call.cancel()
        for _ in range(num_turns):
            await asyncio.sleep(0)
        call.cancel()
        workers.prefill.runner.go_on()
        await asyncio.wait([call])


async def test_client_that_leaves_while_the_last_writes_move() -> None:
    async with pair() as both:
        both.prefill.hold_writes()
        decoding, call = both.open_decode(), both.ask()
        response = await call.read()
        assert list(response.first_token.token_ids) == answer_to(PROMPT, 1)
        call.cancel()
        await eventually(lambda: not both.prefill.prefill.scheduler.num_running)
        await asyncio.sleep(0.05)
        assert both.num_used == (6, 6)  # what is being written from and to is nobody's yet
        both.prefill.land_writes()
        assert (await failure_of(decoding)).reason == "TICKET_ENDED"
        await eventually(lambda: both.num_used == (0, 0))


async def test_deadline_that_passes_while_a_prompt_waits() -> None:
    async with pair() as both:
        others = both.decode.pool.allocate(NUM_BLOCKS)
        error = await failure_of(both.ask(timeout_s=0.1))
        assert isinstance(error, DeadlineExceeded)
        await eventually(lambda: both.prefill.is_at_rest)
        both.decode.pool.release(others)


async def test_closing_ends_the_calls_that_are_open() -> None:
    async with pair() as both:
        both.prefill.runner.hold(after_steps=1)
        call = both.ask()
        await both.ticket_granted()
        await eventually(lambda: both.prefill.runner.is_waiting)
        both.prefill.runner.go_on()
        await both.prefill.prefill.close()
        await eventually(lambda: both.num_used == (0, 0))
        call.cancel()


async def test_prompts_are_computed_beside_answers_whose_drafts_would_fill_the_step() -> None:
    """Eight tokens a step: two for the answers, at most three for their drafts, three for the prompt of nine."""
    network = LoopbackNetwork()
    worker = TimedWorker(
        network, "both-0", num_blocks=48, planner=FixedDrafts(7, 1000, lambda drafting, token_ids: ANYTHING)
    )
    async with running(worker):
        worker.runner.hold(after_steps=6)
        answers = [
            worker.decode_stub.Decode(decode_request(name, prompt_of(6, first=place), max_tokens=30, prefill_here=True))
            for place, name in enumerate("bc")
        ]
        await eventually(lambda: worker.runner.is_waiting)
        prefilling = asyncio.create_task(
            read(worker.prefill_stub.Prefill(prefill_request("a", prompt_of(9, first=2), None)))
        )
        await eventually(lambda: worker.prefill.scheduler.can_run)
        worker.runner.let_run(4)
        first, _ = await asyncio.wait_for(prefilling, 5)
        assert list(first.token_ids) == answer_to(prompt_of(9, first=2), 1)
        assert worker.decode.scheduler.num_running == 2
        worker.runner.go_on()
        for place, answer in enumerate(answers):
            assert await tokens_of(answer) == answer_to(prompt_of(6, first=place), 30)


async def test_calls_are_answered_while_a_drafting_state_is_taken_off_its_device(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """That waits for what the device is doing, a step of others for instance."""
    async with pair() as both:
        is_off, asked = threading.Event(), asyncio.Event()
        loop = asyncio.get_running_loop()

        def export(drafting: DraftingState) -> bytes:
            loop.call_soon_threadsafe(asked.set)
            assert is_off.wait(timeout=5), "nothing else was done meanwhile"
            return b""

        monkeypatch.setattr(both.prefill.runner, "export_drafting", export)
        decoding, prefilling = both.open_decode(), asyncio.create_task(read(both.ask()))
        await asyncio.wait_for(asked.wait(), 5)
        elsewhere, _ = await read(both.prefill.prefill_stub.Prefill(prefill_request("b", prompt_of(9, first=1), None)))
        assert list(elsewhere.token_ids) == answer_to(prompt_of(9, first=1), 1)
        is_off.set()
        first, _ = await prefilling
        assert [*first.token_ids, *await tokens_of(decoding)] == answer_to(PROMPT, 4)
