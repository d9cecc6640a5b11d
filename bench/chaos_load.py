"""The clients of bench.chaos: they ask without pause, some leave early, and every token they get is judged.

What is right is what the runner of one process answers to the same prompts, greedy and in float32.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from pathlib import Path

from bench.tiny_moe import EOS, MAX_CONTEXT, VOCAB_SIZE
from model.runner import Chunk, SampledToken
from model.sampling_params import SamplingParams
from model.torch_runner import TorchRunner
from protos.client import PdserveClient
from protos.errors import DeadlineExceeded, ServiceError
from protos.values import Sampling, Summary

DEADLINE_S = 60.0
SLACK_S = 5.0  # beyond its deadline a request hangs
LEAVING_SHARE, LEAVING_RATE = 0.15, 4.0  # of clients; a second
PROMPT_LENGTHS = (1, 7, 16, 31, 64, 100, 180, 300, 450)
ANSWER_LENGTHS = (1, 2, 8, 30, 80, 160)
GREEDY = SamplingParams(max_tokens=max(ANSWER_LENGTHS), temperature=0.0)


@dataclass(frozen=True, slots=True)
class Question:
    """`answer` is the longest that is ever asked for; a shorter one is its beginning."""

    prompt: tuple[int, ...]
    answer: tuple[int, ...]


def questions(folder: Path, rng: random.Random, count: int) -> list[Question]:
    """Prompts of all lengths; every third begins with tokens that others begin with, too."""
    runner = TorchRunner.load(folder, num_blocks=MAX_CONTEXT // 16, dtype="float32", num_threads=1)
    shared = _tokens(rng, 96)
    prompts = [
        [*shared[: rng.choice((16, 40, 96)) * (number % 3 == 0)], *_tokens(rng, rng.choice(PROMPT_LENGTHS))]
        for number in range(count)
    ]
    return [Question(tuple(prompt), tuple(_plain_answer(runner, prompt))) for prompt in prompts]


def _tokens(rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(EOS + 1, VOCAB_SIZE) for _ in range(count)]


def _plain_answer(runner: TorchRunner, prompt: Sequence[int]) -> list[int]:
    """One sequence alone: the prompt in one forward, then a token at a time."""
    tokens, start = list(prompt), 0
    blocks = range(runner.num_blocks)
    while len(tokens) - len(prompt) < GREEDY.max_tokens and tokens[-1] != EOS:
        held = blocks[: runner.layout.num_blocks(len(tokens))]
        chunk = Chunk(tokens[start:], start, list(held), GREEDY, list(tokens), len(prompt))
        (sampled,) = runner.execute([chunk]).sampled
        if not isinstance(sampled, SampledToken):
            raise RuntimeError(f"the plain run has no token at {len(tokens)}: {sampled}")
        start = len(tokens)
        tokens.append(sampled.token_id)
    return tokens[len(prompt) :]


@dataclass(slots=True)
class Tally:
    """What became of the requests. Each is counted once, under `num_wrong` beside."""

    num_requests: int = 0
    num_completed: int = 0
    num_left: int = 0  # clients that went away
    num_wrong: int = 0
    num_lost: int = 0  # ended without an end, or by a defect
    num_hung: int = 0
    num_retries: int = 0
    num_resumes: int = 0
    num_moves: int = 0
    worst_gap_s: float = 0.0  # between two tokens of one answer
    worst_ttft_s: float = 0.0
    failed: Counter[str] = field(default_factory=Counter)  # by reason: refused, with the advice to try again later
    remarks: list[str] = field(default_factory=list)  # on what should not be


class Load:
    """`run` asks until `stop`; each of `at_once` clients has one request at a time."""

    def __init__(self, address: str, asked: Sequence[Question], rng: random.Random, at_once: int) -> None:
        self.tally = Tally()
        self._address = address
        self._asked = asked
        self._rng = rng
        self._at_once = at_once
        self._is_stopping = False

    def stop(self) -> None:
        """No new requests; those that are open come to their end."""
        self._is_stopping = True

    async def run(self) -> None:
        """Every other client reads at the workers."""
        async with (
            PdserveClient(self._address) as through_router,
            PdserveClient(self._address, direct=True) as direct,
            asyncio.TaskGroup() as clients,
        ):
            for number in range(self._at_once):
                clients.create_task(self._ask_on(direct if number % 2 else through_router))

    async def _ask_on(self, client: PdserveClient) -> None:
        while not self._is_stopping:
            question, num_tokens = self._rng.choice(self._asked), self._rng.choice(ANSWER_LENGTHS)
            leaves = self._rng.random() < LEAVING_SHARE
            leaves_after_s = self._rng.expovariate(LEAVING_RATE) if leaves else None
            asked = _Asked(question, num_tokens)
            self.tally.num_requests += 1
            try:
                async with asyncio.timeout(leaves_after_s or DEADLINE_S + SLACK_S):
                    await asked.read(client)
            except TimeoutError:
                if leaves_after_s is None:
                    self._remark(asked, "hangs beyond its deadline")
                    self.tally.num_hung += 1
                else:
                    self.tally.num_left += 1
            except DeadlineExceeded as error:
                self._remark(asked, f"did not end within {DEADLINE_S:g} s: {error}")
                self.tally.num_hung += 1
            except ServiceError as error:
                self._failed(asked, error)
            else:
                self.tally.num_completed += 1
            self._judge(asked)

    def _failed(self, asked: _Asked, error: ServiceError) -> None:
        if error.retryable:
            self.tally.failed[error.reason] += 1
            self._remark(asked, f"failed: {error.reason}: {error}")
        else:
            self.tally.num_lost += 1
            self._remark(asked, f"is lost: {type(error).__name__}: {error}")

    def _judge(self, asked: _Asked) -> None:
        tally = self.tally
        if not asked.is_right:
            tally.num_wrong += 1
            self._remark(asked, f"has wrong tokens: {asked.token_ids}, not {asked.expected}")
        tally.worst_gap_s = max(tally.worst_gap_s, asked.worst_gap_s)
        tally.worst_ttft_s = max(tally.worst_ttft_s, asked.ttft_s)
        if asked.summary is not None:
            tally.num_retries += asked.summary.usage.num_retries
            tally.num_resumes += asked.summary.usage.num_resumes
            tally.num_moves += asked.summary.usage.num_moves

    def _remark(self, asked: _Asked, what: str) -> None:
        self.tally.remarks.append(f"{asked.request_id} ({len(asked.token_ids)} tokens) {what}")


class _Asked:
    """One request and what came of it so far."""

    def __init__(self, question: Question, num_tokens: int) -> None:
        self.request_id = f"chaos-{time.monotonic_ns()}"
        self.expected = list(question.answer[:num_tokens])
        self.token_ids: list[int] = []
        self.summary: Summary | None = None
        self.ttft_s = self.worst_gap_s = 0.0
        self._prompt = question.prompt
        self._num_tokens = num_tokens

    @property
    def is_right(self) -> bool:
        """All of the answer, or a beginning of it if it has not ended."""
        num_tokens = len(self.expected) if self.summary is not None else len(self.token_ids)
        return self.token_ids == self.expected[:num_tokens]

    async def read(self, client: PdserveClient) -> None:
        """Raises what the client raises: it checks itself that no token is missing, and that there is an end."""
        sampling = Sampling(temperature=0, max_tokens=self._num_tokens)
        answer = client.generate(self._prompt, sampling=sampling, request_id=self.request_id, deadline_s=DEADLINE_S)
        last_at = time.monotonic()
        async with aclosing(answer) as parts:
            async for part in parts:
                if isinstance(part, Summary):
                    self.summary = part
                    continue
                now = time.monotonic()
                if self.token_ids:
                    self.worst_gap_s = max(self.worst_gap_s, now - last_at)
                else:
                    self.ttft_s = now - last_at
                self.token_ids += part.token_ids
                last_at = now
