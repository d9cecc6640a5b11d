"""Decodes a set of prompts in one way of drafting, its batch always full, and notes what every step did and took.

A prompt is prefilled once for all ways, and each starts from its KV as if it had been handed over; so every step that
is timed is one of pure decode.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from decode.acceptance import DraftOutcome
from decode.decoding import DecodeSequence
from decode.draft_planner import DraftPlanner
from decode.outbox import Outbox
from decode.outlook import NOTHING, Outlook, OutlookOf
from decode.scheduler import DecodeScheduler
from model.block_pool import BlockPool
from model.runner import Chunk, DraftingState, ModelRunner, SampledToken, StepOutput, VerifiedDraft
from model.sampling_params import SamplingParams
from model.sequence import Sequence as TokenSequence
from model.torch_runner import TorchRunner

MAX_STEP_TOKENS = 512
PREFILL_TOKENS = 512  # of one forward, if its prompts are shorter


@dataclass(frozen=True, slots=True)
class DecodeStep:
    """`num_tokens` were emitted. `drafts` are of the sequences asked to draft; accepted ones behind the end of an
    answer are not counted as such. `num_distinct_experts`: mean over layers, None without experts."""

    seconds: float
    draft_s: float
    num_sequences: int
    num_tokens: int
    num_context_tokens: int
    drafts: tuple[DraftOutcome, ...] = ()
    num_distinct_experts: float | None = None

    @property
    def num_rows(self) -> int:
        return self.num_sequences + sum(draft.num_drafted for draft in self.drafts)

    @property
    def longest_draft(self) -> int:
        """Tokens; look-ups are free, and left out."""
        return max((draft.num_asked for draft in self.drafts if not draft.is_free), default=0)


@dataclass(frozen=True, slots=True)
class _Prefilled:
    sequence: TokenSequence
    drafting: bytes


class PrefilledPrompts:
    """Prompts whose KV is computed when they are first asked for, and stays; by index, which goes round."""

    def __init__(
        self,
        target: TorchRunner,
        runner: ModelRunner,
        pool: BlockPool,
        prompts: Sequence[Sequence[int]],
        sampling: SamplingParams,
    ) -> None:
        """`runner` prefills; it is the target, or drafts with it."""
        self._target = target
        self._runner = runner
        self.pool = pool
        self._prompts = prompts
        self._sampling = sampling
        self._prefilled: dict[int, _Prefilled] = {}

    def open(self, index: int, name: str) -> DecodeSequence | None:
        """A sequence of its own that decodes next; None if the answer ends with its first token."""
        index %= len(self._prompts)
        self.prefill([index])
        source, drafting = self._prefilled[index].sequence, self._prefilled[index].drafting
        if source.finish_reason is not None:
            return None
        num_computed, block_size = source.num_computed_tokens, source.block_size
        num_full = num_computed // block_size
        blocks = source.block_ids[:num_full]
        self.pool.acquire(blocks)
        if num_computed % block_size:
            blocks += self.pool.allocate(1)
            memory = self._target.cache.memory  # [L, N, H, 2, B, D]
            memory[:, blocks[-1]] = memory[:, source.block_ids[num_full]]
        sequence = TokenSequence(name, list(source.token_ids), source.num_prompt_tokens, self._sampling, block_size)
        sequence.adopt(blocks, num_computed)
        self._runner.restore_drafting(sequence.drafting, num_computed, drafting)
        return DecodeSequence(sequence, Outbox())

    def prefill(self, indexes: Iterable[int]) -> None:
        group: list[TokenSequence] = []
        for index in dict.fromkeys(index % len(self._prompts) for index in indexes):
            if index in self._prefilled:
                continue
            prompt = self._prompts[index]
            sequence = TokenSequence(
                str(index), list(prompt), len(prompt), self._sampling, self._target.layout.block_size
            )
            if group and sum(each.num_tokens for each in group) + len(prompt) > PREFILL_TOKENS:
                self._compute(group)
                group = []
            group.append(sequence)
        if group:
            self._compute(group)

    def _compute(self, sequences: Sequence[TokenSequence]) -> None:
        for sequence in sequences:
            sequence.grow(self.pool, sequence.num_tokens)
        outcomes = self._runner.execute([sequence.next_chunk(sequence.num_tokens) for sequence in sequences]).sampled
        for sequence, outcome in zip(sequences, outcomes, strict=True):
            if not isinstance(outcome, SampledToken):
                raise RuntimeError(f"prompt {sequence.sequence_id} has no answer: {outcome!r}")
            sequence.num_computed_tokens = sequence.num_tokens
            sequence.append(outcome.token_id)
            drafting = self._runner.export_drafting(sequence.drafting)
            self._prefilled[int(sequence.sequence_id)] = _Prefilled(sequence, drafting)


class SaidOutlooks:
    """An `OutlookOf` that remembers what it said last of each sequence."""

    def __init__(self, outlook: OutlookOf) -> None:
        self._outlook = outlook
        self._said: dict[DraftingState, Outlook] = {}

    def __call__(self, drafting: DraftingState, token_ids: Sequence[int]) -> Outlook:
        self._said[drafting] = self._outlook(drafting, token_ids)
        return self._said[drafting]

    def last(self, drafting: DraftingState) -> Outlook:
        return self._said.get(drafting, NOTHING)


class DecodeRun:
    """`steps` are those so far; `answers` the tokens of the sequences that ended, by how many were opened before, and
    after `close` as far as they came of all others."""

    def __init__(
        self,
        runner: ModelRunner,
        planner: DraftPlanner,
        prompts: PrefilledPrompts,
        batch: int,
        outlooks: SaidOutlooks | None = None,
    ) -> None:
        """`outlooks` are those that the planner asks for; without them all drafts are taken to be alike."""
        self._runner = runner
        self._outlooks = outlooks
        self._prompts = prompts
        self._batch = batch
        self._scheduler = DecodeScheduler(prompts.pool, max_running=batch, planner=planner)
        self._running: dict[DecodeSequence, int] = {}
        self._num_opened = 0
        self.num_tokens = 0
        self.steps: list[DecodeStep] = []
        self.answers: dict[int, tuple[int, ...]] = {}

    def advance(self, num_tokens: int) -> list[DecodeStep]:
        """Until so many tokens have been emitted since the run began: the steps that took."""
        first = len(self.steps)
        while self.num_tokens < num_tokens:
            self._fill()
            self.steps.append(self._step())
            self.num_tokens += self.steps[-1].num_tokens
        return self.steps[first:]

    def close(self) -> None:
        for decoding, index in self._running.items():
            self.answers[index] = _output(decoding)
            self._scheduler.remove(decoding)
        self._running = {}

    def _fill(self) -> None:
        missing = self._batch - len(self._running)
        if missing > 1:
            self._prompts.prefill(range(self._num_opened, self._num_opened + missing))
        num_empty = 0
        while len(self._running) < self._batch:
            decoding = self._prompts.open(self._num_opened, f"{id(self)}-{self._num_opened}")
            if decoding is not None:
                self._scheduler.add(decoding)
                self._running[decoding] = self._num_opened
            self._num_opened += 1
            num_empty = num_empty + 1 if decoding is None else 0
            if num_empty > 1000:
                raise RuntimeError("every answer of a set ends with its first token: there is nothing to decode")

    def _step(self) -> DecodeStep:
        begin = time.perf_counter()
        chunks = [scheduled.chunk for scheduled in self._scheduler.schedule(MAX_STEP_TOKENS)]
        scheduled_s = time.perf_counter() - begin
        lengths = [len(chunk.history) for chunk in chunks]
        outlooks = [NOTHING if self._outlooks is None else self._outlooks.last(chunk.drafting) for chunk in chunks]
        begin = time.perf_counter()
        output = self._runner.execute(chunks)
        self._scheduler.complete(output.sampled, output)
        seconds = scheduled_s + time.perf_counter() - begin
        self._check(chunks)
        emitted = [len(chunk.history) - length for chunk, length in zip(chunks, lengths, strict=True)]
        step = DecodeStep(
            seconds=seconds,
            draft_s=output.draft_s,
            num_sequences=len(chunks),
            num_tokens=sum(emitted),
            num_context_tokens=sum(lengths),
            drafts=_drafts(chunks, output, emitted, outlooks),
            num_distinct_experts=output.num_distinct_experts,
        )
        self._collect()
        return step

    def _check(self, chunks: Sequence[Chunk]) -> None:
        """What would make figures of something else than a full batch that decodes."""
        if len(chunks) != self._batch or any(len(chunk.token_ids) != 1 for chunk in chunks):
            raise RuntimeError("the batch is not full: there are too few KV blocks")
        if any(chunk.drafting.failed for chunk in chunks):
            raise RuntimeError("the drafter failed: its error is above")

    def _collect(self) -> None:
        for decoding in [decoding for decoding in self._running if decoding.ended_at is not None]:
            sequence = decoding.sequence
            if sequence.finish_reason is None:
                raise RuntimeError(f"an answer broke off after {sequence.num_output_tokens} tokens")
            self.answers[self._running.pop(decoding)] = _output(decoding)


def _output(decoding: DecodeSequence) -> tuple[int, ...]:
    return tuple(decoding.sequence.token_ids[decoding.sequence.num_prompt_tokens :])


def _drafts(
    chunks: Sequence[Chunk], output: StepOutput, emitted: Sequence[int], outlooks: Sequence[Outlook]
) -> tuple[DraftOutcome, ...]:
    drafts = []
    for index, (chunk, outcome, count, outlook) in enumerate(
        zip(chunks, output.sampled, emitted, outlooks, strict=True)
    ):
        if chunk.num_draft_tokens:
            num_drafted = outcome.num_drafted if isinstance(outcome, VerifiedDraft) else 0
            nodes = outcome.nodes if isinstance(outcome, VerifiedDraft) else None
            kept = None if nodes is None else nodes[: count - 1]
            drafts.append(
                DraftOutcome(
                    str(index), chunk.num_draft_tokens, num_drafted, count - 1, outlook.grade, kept, outlook.is_free
                )
            )
    return tuple(drafts)
