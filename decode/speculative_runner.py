"""A runner that drafts: what a drafter guesses is run behind each sequence's last token, and verified in the same step.

It implements `model.runner.ModelRunner`, so schedulers and engine need not know: a chunk says how many drafts it may
have, and gets as many tokens as stand.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from decode.blame import mark_failing
from decode.draft import Draft
from decode.drafter import Drafter, Observed
from decode.outlook import NOTHING, Outlook
from decode.verification import Method, Verdict, emitted, verify
from model.kv_layout import KVLayout
from model.runner import (
    Chunk,
    DraftingState,
    LayerDone,
    NonFiniteLogits,
    Outcome,
    SampledToken,
    StepOutput,
    VerifiedDraft,
)
from model.sampling import Row, sample
from model.torch_runner import TorchRunner
from model.transformer import ForwardOutput

logger = logging.getLogger(__name__)

NO_DRAFT = Draft()
_STATE = "state"


class SpeculativeRunner:
    """`kind` is what people call the drafter."""

    def __init__(self, target: TorchRunner, drafter: Drafter, method: Method, kind: str = "") -> None:
        self.drafter = kind
        self._target = target
        self._drafter = drafter
        self._method = method
        self._num_failed_outlooks = 0

    @property
    def layout(self) -> KVLayout:
        return self._target.layout

    @property
    def num_blocks(self) -> int:
        return self._target.num_blocks

    @property
    def kernels(self) -> str:
        return self._target.kernels

    @property
    def cache_address(self) -> int:
        return self._target.cache_address

    @property
    def cache_memory(self) -> Tensor:
        return self._target.cache_memory

    @property
    def cache_device_id(self) -> int:
        return self._target.cache_device_id

    def outlook(self, drafting: DraftingState, token_ids: Sequence[int]) -> Outlook:
        """What there is to be drafted for a sequence: see `Drafter.outlook`, whose failure is the end of drafting."""
        if drafting.failed:
            return NOTHING
        try:
            return self._drafter.outlook(drafting, token_ids)
        except Exception:
            logger.exception("the drafter could not say what it has for a sequence, which goes on without")
            drafting.failed = True
            self._num_failed_outlooks += 1
            return NOTHING

    @torch.inference_mode()
    def execute(self, chunks: Sequence[Chunk], layer_done: LayerDone | None = None) -> StepOutput:
        begin = time.perf_counter()
        try:
            drafts, num_failed = self._propose(chunks)
            num_failed, self._num_failed_outlooks = num_failed + self._num_failed_outlooks, 0
            draft_s = time.perf_counter() - begin
            step = _Step(chunks, drafts)
            output = self._target.forward(step.extended, layer_done, num_rows=step.num_rows, taps=self._drafter.taps)
            self._target.score_prompts(chunks, output)
            outcomes, verdicts = self._verify(step, output)
            self._target.keep_paths(step.paths(verdicts))
            observed = step.observed(outcomes, verdicts)
            num_failed += self._observe(observed, output)
            self._note_gaps(chunks)
            self._tell_draft_layers(layer_done)
        finally:
            self._target.wait_for_device()
        load = output.expert_load
        return StepOutput(
            outcomes,
            compute_s=time.perf_counter() - begin,
            expert_load=load.tolist() if load is not None else (),
            draft_s=draft_s,
            num_failed_drafts=num_failed,
        )

    def export_drafting(self, drafting: DraftingState) -> bytes:
        """Empty where there is nothing or it cannot be had: whoever takes the sequence over goes on without drafts."""
        try:
            state = None if drafting.failed else self._drafter.export(drafting)
            return b"" if state is None else save({_STATE: state.contiguous().cpu()})
        except Exception:
            logger.exception("what the drafter knows of a sequence cannot be handed over; it goes on without drafts")
            return b""

    def restore_drafting(self, drafting: DraftingState, num_computed_tokens: int, state: bytes) -> None:
        if not state:
            drafting.failed = self._drafter.num_layers > 0  # its KV is not all there
            drafting.blocks_are_whole = not drafting.failed
            return
        self._drafter.restore(drafting, num_computed_tokens, _read(state))

    def _note_gaps(self, chunks: Sequence[Chunk]) -> None:
        """Nothing is stored in the drafter's layers for a sequence that has failed, from this step on."""
        for chunk in chunks if self._drafter.num_layers else ():
            if chunk.drafting.failed:
                chunk.drafting.blocks_are_whole = False

    def _tell_draft_layers(self, layer_done: LayerDone | None) -> None:
        if layer_done is None or not self._drafter.num_layers:
            return
        self._target.wait_for_device()  # what the drafter has run may only be queued yet
        for layer in range(self.layout.num_layers - self._drafter.num_layers, self.layout.num_layers):
            layer_done(layer)

    def _propose(self, chunks: Sequence[Chunk]) -> tuple[list[Draft], int]:
        """A draft for each chunk. One that cannot be made ends drafting for its sequence, never the request."""
        drafts = [NO_DRAFT] * len(chunks)
        wanting = [index for index, chunk in enumerate(chunks) if chunk.num_draft_tokens and not chunk.drafting.failed]
        if not wanting:
            return drafts, 0

        def propose(places: Sequence[int]) -> None:
            indexes = [wanting[place] for place in places]
            for index, draft in zip(indexes, self._drafter.propose([chunks[i] for i in indexes]), strict=True):
                drafts[index] = draft

        num_failed = mark_failing("drafting for", propose, [chunks[index].drafting for index in wanting])
        for index in wanting if num_failed else ():
            if chunks[index].drafting.failed:
                drafts[index] = NO_DRAFT
        return drafts, num_failed

    def _verify(self, step: _Step, output: ForwardOutput) -> tuple[tuple[Outcome, ...], list[Verdict | None]]:
        """By chunk; a verdict is None where no token was wanted or there is none to be had."""
        chunks = [step.chunks[index] for index in step.wanting]
        drafts = [step.drafts[index] for index in step.wanting]
        outcomes: list[Outcome] = [None] * len(step.chunks)
        verdicts: list[Verdict | None] = [None] * len(step.chunks)
        if not any(draft.token_ids for draft in drafts):
            return self._sample(step, output)
        found = verify(output.logits, chunks, drafts, self._method)
        tokens = emitted(output.logits, chunks, drafts, found)
        for index, draft, verdict, emission in zip(step.wanting, drafts, found, tokens, strict=True):
            verdicts[index] = verdict
            if verdict is None:
                outcomes[index] = NonFiniteLogits("the logits are not finite")
            elif draft.token_ids:
                nodes = None if draft.parents is None else verdict.nodes
                outcomes[index] = VerifiedDraft(emission, len(draft.token_ids), nodes)
            else:
                outcomes[index] = emission[0]
        return tuple(outcomes), verdicts

    def _sample(self, step: _Step, output: ForwardOutput) -> tuple[tuple[Outcome, ...], list[Verdict | None]]:
        """The same where nobody drafts, which is how large batches mostly run."""
        outcomes: list[Outcome] = [None] * len(step.chunks)
        verdicts: list[Verdict | None] = [None] * len(step.chunks)
        rows = [Row.behind(step.chunks[index]) for index in step.wanting]
        for index, outcome in zip(step.wanting, sample(output.logits, rows) if rows else (), strict=True):
            outcomes[index] = outcome
            if isinstance(outcome, SampledToken):
                verdicts[index] = Verdict((outcome.token_id,), (0,))
        return tuple(outcomes), verdicts

    def _observe(self, observed: Sequence[Observed], output: ForwardOutput) -> int:
        """Tells the drafter. Where it fails, the step's tokens stand all the same; those sequences draft no more."""
        observed = [seen for seen in observed if not seen.chunk.drafting.failed]

        def observe(places: Sequence[int]) -> None:
            self._drafter.observe([observed[place] for place in places], output)

        return mark_failing("following", observe, [seen.chunk.drafting for seen in observed])


class _Step:
    """Where the rows of a step's chunks are, with their drafts behind them."""

    def __init__(self, chunks: Sequence[Chunk], drafts: Sequence[Draft]) -> None:
        self.chunks = chunks
        self.drafts = drafts
        self.wanting = [index for index, chunk in enumerate(chunks) if chunk.sampling is not None]
        self.num_rows = [0] * len(chunks)
        for index in self.wanting:
            self.num_rows[index] = drafts[index].num_rows
        self.extended = [
            replace(chunk, token_ids=[*chunk.token_ids, *draft.token_ids], parents=draft.parents)
            if draft.token_ids
            else chunk
            for chunk, draft in zip(chunks, drafts, strict=True)
        ]

    def paths(self, verdicts: Sequence[Verdict | None]) -> list[tuple[Chunk, Sequence[int]]]:
        """Each chunk that ends in a tree, and the nodes that stand."""
        return [
            (chunk, verdict.nodes)
            for chunk, verdict in zip(self.extended, verdicts, strict=True)
            if verdict is not None and chunk.parents is not None
        ]

    def observed(self, outcomes: Sequence[Outcome], verdicts: Sequence[Verdict | None]) -> list[Observed]:
        first_tokens = accumulate((len(chunk.token_ids) for chunk in self.extended), initial=0)
        first_rows = accumulate(self.num_rows, initial=0)
        observed = []
        for chunk, draft, verdict, outcome, first, row in zip(
            self.chunks, self.drafts, verdicts, outcomes, first_tokens, first_rows, strict=False
        ):
            if isinstance(outcome, NonFiniteLogits):
                continue
            observed.append(
                Observed(
                    chunk=chunk,
                    rows=_kept_rows(range(first, first + len(chunk.token_ids)), draft, verdict),
                    hidden_row=None if verdict is None else row + verdict.rows[-1],
                    emitted_ids=() if verdict is None else verdict.token_ids,
                )
            )
        return observed


def _kept_rows(own: range, draft: Draft, verdict: Verdict | None) -> range | list[int]:
    """The rows of a chunk's own tokens, and of the drafts behind them that stand."""
    if verdict is None or draft.parents is None:
        return range(own.start, own.stop + (0 if verdict is None else verdict.num_accepted))
    return [*own, *(own.stop + node for node in verdict.nodes)]


def _read(state: bytes) -> Tensor:
    """What `export_drafting` wrote. Kernels trust its dtype, and numbers that are none would spoil every draft."""
    try:
        tensor = load(state)[_STATE]
    except (SafetensorError, KeyError) as error:
        raise ValueError(f"the drafter's state cannot be read: {error}") from error
    if tensor.dtype != torch.float32:
        raise ValueError(f"the drafter's state is {tensor.dtype}; it must be torch.float32")
    if not bool(tensor.isfinite().all()):
        raise ValueError("the drafter's state is not finite")
    return tensor
