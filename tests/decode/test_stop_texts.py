"""Stop texts where the text is made: on prefill, on the decode worker it hands over to, on one that is both."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from dataclasses import dataclass

import pytest

from decode.decoding import DecodeSequence
from decode.outbox import Outbox
from decode.scheduler import DecodeScheduler
from kvtransfer.loopback_agent import LoopbackNetwork
from model.answer_text import AnswerText
from model.block_pool import BlockPool, hash_blocks
from model.runner import SampledToken, StepOutput, VerifiedDraft
from model.sampling_params import SamplingParams
from model.sequence import FinishReason
from model.sequence import Sequence as ModelSequence
from model.tokenizer import Detokenizer
from protos import inference_pb2
from protos.channel import service_errors
from tests.model.test_answer_text import brute_force, held_back
from tests.timed_calls import answer_to, decode_request, prefill_request, prompt_of
from tests.timed_worker import BLOCK, TimedWorker, byte_tokenizer, running

PROMPT = prompt_of(5 * BLOCK + 2)
MAX_TOKENS = 30
STOPPED, BY_LENGTH = inference_pb2.FINISH_REASON_STOP, inference_pb2.FINISH_REASON_LENGTH


@dataclass(frozen=True)
class Case:
    """An answer that goes on after `num_before` tokens, as a resumed one does; and what is to come of it."""

    stop: list[str]
    num_before: int
    token_ids: list[int]
    text: str
    reason: int


def cases() -> list[Case]:
    """Stop texts from all places of the answer, the first token's among them, and such as only begin there."""
    whole = answer_to(PROMPT, MAX_TOKENS)
    detokenizer = Detokenizer(byte_tokenizer(), PROMPT)
    pieces = [*map(detokenizer.push, whole), detokenizer.flush()]
    text = "".join(pieces)
    rng = random.Random(1)
    made = []
    for number in range(16):
        begin = 0 if number == 0 else rng.randrange(len(text) - 8)
        stop = [text[begin : begin + rng.choice((1, 2, 4, 7))], "nowhere in it"]
        if number % 4 == 3:
            stop = [stop[0] + "x"]
        expected, num_tokens = brute_force(pieces, stop)
        num_before = rng.randrange(min(num_tokens or MAX_TOKENS, MAX_TOKENS)) if number % 2 else 0
        seen = "".join(pieces[:num_before])
        made.append(
            Case(
                stop,
                num_before,
                whole[num_before:num_tokens],
                expected[len(seen) - len(held_back(seen, stop)) :],
                BY_LENGTH if num_tokens is None else STOPPED,
            )
        )
    return made


def check(case: Case, messages: Sequence[inference_pb2.GenerateResponse]) -> None:
    assert [token_id for message in messages for token_id in message.token_ids] == case.token_ids
    assert "".join(message.text for message in messages) == case.text
    assert [message.finish_reason for message in messages if message.finish_reason] == [case.reason]
    assert messages[-1].finish_reason


def tokens_before(case: Case) -> list[int]:
    return [*PROMPT, *answer_to(PROMPT, case.num_before)] if case.num_before else PROMPT


async def test_answer_ends_before_the_first_stop_text_wherever_it_is_prefilled() -> None:
    network = LoopbackNetwork()
    prefill = TimedWorker(network, "prefill-0", num_blocks=64)
    decode = TimedWorker(network, "decode-0", num_blocks=64, verified_share=0.0)

    async def handed_over(name: str, case: Case) -> None:
        first = prefill_request(name, tokens_before(case), decode.target, max_tokens=MAX_TOKENS, stop=case.stop)
        rest = decode_request(name, tokens_before(case), max_tokens=MAX_TOKENS, stop=case.stop)
        first.num_prompt_tokens = rest.num_prompt_tokens = len(PROMPT)
        decoding = decode.decode_stub.Decode(rest)
        with service_errors():
            events = [event async for event in prefill.prefill_stub.Prefill(first)]
            messages = [events[0].first_token]
            if not messages[0].finish_reason:
                messages += [message async for message in decoding]
        decoding.cancel()
        check(case, messages)

    async def colocated(name: str, case: Case) -> None:
        request = decode_request(name, tokens_before(case), max_tokens=MAX_TOKENS, stop=case.stop, prefill_here=True)
        request.num_prompt_tokens = len(PROMPT)
        with service_errors():
            messages = [message async for message in decode.decode_stub.Decode(request)]
        check(case, messages)
        stats = messages[-1].decode_stats
        assert (stats.computed_tokens + stats.cached_tokens, stats.recomputed_tokens) == (len(tokens_before(case)), 0)

    made = cases()
    assert sum(len(case.token_ids) == 1 for case in made) > 0
    assert sum(bool(case.num_before) and case.reason == STOPPED for case in made) > 3
    async with running(prefill, decode):
        for index in range(0, len(made), 8):
            part = list(enumerate(made))[index : index + 8]
            await asyncio.gather(*(handed_over(f"h{number}", case) for number, case in part))
            await asyncio.gather(*(colocated(f"c{number}", case) for number, case in part))


@pytest.mark.parametrize("num_tokens", [1, 2, 5, 6])
def test_what_a_draft_says_behind_the_stop_text_leaves_nothing(num_tokens: int) -> None:
    """Of six tokens in one step the answer ends at the one that completes the stop text."""
    tokenizer = byte_tokenizer()
    tokens = tokenizer.encode("abcdef")
    prompt = tokenizer.encode("xyz")
    sampling = SamplingParams(max_tokens=20, stop=("abcdef"[num_tokens - 1],))
    pool = BlockPool(8)
    sequence = ModelSequence("s", list(prompt), len(prompt), sampling, BLOCK)
    sequence.adopt(pool.allocate(1), len(prompt))
    sequence.append(tokenizer.encode("-")[0])
    sequence.text = AnswerText(tokenizer, sequence.token_ids, len(prompt), sampling)
    decoding = DecodeSequence(sequence, Outbox())
    scheduler = DecodeScheduler(pool, max_running=1)
    scheduler.add(decoding)
    (scheduled,) = scheduler.schedule(8)
    assert len(scheduled.chunk.token_ids) == 1
    sequence.grow(pool, sequence.num_tokens + 5)
    scheduler.complete([VerifiedDraft(tuple(map(SampledToken, tokens)), 5)], StepOutput(()))
    assert sequence.token_ids == [*prompt, tokenizer.encode("-")[0], *tokens[:num_tokens]]
    assert sequence.finish_reason is FinishReason.STOP
    assert sequence.text.take() == "abcdef"[: num_tokens - 1]
    assert decoding.num_accepted_tokens == min(num_tokens, 5)
    assert pool.num_used == 0
    found = pool.match_prefix(hash_blocks([*prompt, tokenizer.encode("-")[0], *tokens], BLOCK))
    assert len(found) == (len(prompt) + num_tokens) // BLOCK  # KV of all but the last token, and of no later one
