"""A small model drafts for a large one (Leviathan et al., ICML 2023). Its KV are further layers of the same cache.

So its heads must have the target's shape; then prefix cache and hand-over hold for both models at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from decode.chain import grow_chains
from decode.draft import Draft
from decode.draft_sampling import DraftSampling
from decode.drafter import Observed
from decode.outlook import ANYTHING, Outlook
from decode.verification import Method
from model.config import ModelConfig
from model.runner import Chunk, DraftingState
from model.step_input import StepInput
from model.torch_runner import TorchRunner
from model.transformer import ForwardOutput, Transformer, Weights


class DraftModelUnusable(ValueError):
    """A draft model cannot be used with this target: the message says what differs."""


def check_shape(draft: ModelConfig, target: ModelConfig, max_context_tokens: int | None = None) -> None:
    """Raises DraftModelUnusable if the two cannot share a cache, a vocabulary, or sequences of `max_context_tokens`."""
    for name in ("num_kv_heads", "head_dim"):
        mine, theirs = getattr(draft, name), getattr(target, name)
        if mine != theirs:
            raise DraftModelUnusable(
                f"the draft model's {name} is {mine}; to share the target's cache it must be {theirs}"
            )
    if draft.vocab_size != target.vocab_size:  # of the embedding: it may have more rows than the tokenizer has tokens
        raise DraftModelUnusable(
            f"the draft model has logits of {draft.vocab_size} tokens; to be compared with the target's it must be "
            f"{target.vocab_size}"
        )
    needed = max_context_tokens or target.max_position_embeddings
    if draft.max_position_embeddings < needed:
        raise DraftModelUnusable(
            f"the draft model's context is {draft.max_position_embeddings} tokens; sequences here have up to {needed}"
        )


@dataclass(slots=True)
class DraftModelState:
    """KV of the first `num_slots` tokens is there; that of `num_guessed` more if the last draft stands."""

    num_slots: int = 0
    num_guessed: int = 0


class DraftModelDrafter:
    """Implements `Drafter`."""

    taps = ()

    def __init__(self, target: TorchRunner, config: ModelConfig, weights: Weights, name: str, method: Method) -> None:
        self.name = name
        self.num_layers = config.num_layers
        self._block_size = target.layout.block_size
        backend = target.backend.for_drafts()
        placed = {key: backend.place(tensor) for key, tensor in weights.items()}
        first_layer = target.config.num_layers
        self._model = Transformer(config, placed, backend, target.cache, first_layer=first_layer)
        self._sampling = DraftSampling(config.vocab_size, None, method)

    def outlook(self, drafting: DraftingState, token_ids: Sequence[int]) -> Outlook:
        return ANYTHING

    def propose(self, chunks: Sequence[Chunk]) -> list[Draft]:
        slots = [self._slots_behind(chunk, chunk.history, len(chunk.history)) for chunk in chunks]
        nothing = [torch.empty(0)] * len(chunks)
        drafts = grow_chains(chunks, slots, nothing, self._run, self._sampling)
        for chunk, draft in zip(chunks, drafts, strict=True):
            self._state(chunk).num_guessed = max(0, len(draft.token_ids) - 1)  # the last one was not run
        return drafts

    def observe(self, observed: Sequence[Observed], output: ForwardOutput) -> None:
        """Runs over a sequence once it completes a block, so that a block that others may find is whole."""
        due = []
        for seen in observed:
            state = self._state(seen.chunk)
            num_accepted = seen.num_kept - len(seen.chunk.token_ids)
            state.num_slots += min(num_accepted, state.num_guessed)
            state.num_guessed = 0
            num_computed = seen.chunk.start + seen.num_kept
            if num_computed // self._block_size > state.num_slots // self._block_size:
                due.append(self._slots_behind(seen.chunk, seen.token_ids, num_computed))
        if due:
            step = self._step(due)
            self._model.forward(step, step.query_starts[:0])  # nobody wants logits

    def export(self, drafting: DraftingState) -> Tensor | None:
        """How many tokens have KV: the last block's may be behind. Exact in float32 for contexts up to 2^24."""
        state = drafting.value
        return torch.tensor([float(state.num_slots)]) if isinstance(state, DraftModelState) else None

    def restore(self, drafting: DraftingState, num_computed_tokens: int, state: Tensor) -> None:
        num_slots = int(state) if state.numel() == 1 else -1
        first = num_computed_tokens - num_computed_tokens % self._block_size  # full blocks are others' too, and whole
        if not first <= num_slots <= num_computed_tokens:
            raise ValueError(
                f"the draft model cannot have KV of {num_slots} tokens; it must be {first} to {num_computed_tokens}"
            )
        drafting.value = DraftModelState(num_slots)

    def _state(self, chunk: Chunk) -> DraftModelState:
        if chunk.drafting.value is None:
            chunk.drafting.value = DraftModelState(chunk.start)  # before it is a cached prefix, whole blocks
        assert isinstance(chunk.drafting.value, DraftModelState)
        return chunk.drafting.value

    def _slots_behind(self, chunk: Chunk, token_ids: Sequence[int], num_slots: int) -> Chunk:
        state = self._state(chunk)
        first, state.num_slots = state.num_slots, num_slots
        return Chunk(token_ids[first:num_slots], first, chunk.block_ids)

    def _run(self, slots: Sequence[Chunk], hidden: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        step = self._step(slots)
        output = self._model.forward(step, step.query_starts[1:] - 1)
        return output.logits, output.hidden

    def _step(self, slots: Sequence[Chunk]) -> StepInput:
        return StepInput.of(slots, self._block_size, self._model.inverse_frequencies)
