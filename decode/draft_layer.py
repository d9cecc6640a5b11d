"""Drafting with one decoder layer on the target's hidden states: all of it but the layer, which is EAGLE's or a model's
own (multi-token prediction, MTP), behind `DraftLayer`.

The slot of a token x_p sees x_p and the target's features of the token before it, and predicts x_{p+1}. Its KV so
depends on tokens up to x_p only, as the target's does, and is one more layer of the same cache, prefix cache and
hand-over included. Features that nobody has (those before a cached prefix ends) are 0. R rows, F features of a token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from decode.chain import grow_chains
from decode.draft import Draft, DraftShape
from decode.draft_sampling import DraftSampling
from decode.drafter import Observed
from decode.outlook import ANYTHING, Outlook
from decode.tree import grow_trees
from decode.verification import Method
from model.runner import Chunk, DraftingState
from model.step_input import StepInput
from model.torch_runner import TorchRunner
from model.transformer import ForwardOutput


class DraftLayer(Protocol):
    """Works on the cache layer behind the target's. T slots, K hidden size, D draft vocabulary.

    An MTP layer taps the target's output (`taps` = its number of layers), fuses nothing, joins embedding and hidden
    input by its own projection and has the target's head; see tests/decode/test_draft_layer.py.
    """

    @property
    def name(self) -> str:
        """For people and for the layout: as `Drafter.name`."""
        ...

    @property
    def taps(self) -> Sequence[int]:
        """What the features are made of: as `Drafter.taps`."""
        ...

    @property
    def vocabulary(self) -> Tensor | None:
        """The token ids [D] that it has logits of, ascending; None for all."""
        ...

    def fuse(self, features: Tensor) -> Tensor:
        """The hidden input [T, K] of slots, from features [T, F]. That of a drafted token is what the layer itself
        put out for the token before."""
        ...

    def store(self, step: StepInput, hidden: Tensor) -> None:
        """Keys and values of slots with these hidden inputs [T, K] into the cache: all that a sequence costs which does
        not draft."""
        ...

    def run(self, step: StepInput, hidden: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
        """The same, and the whole layer for the slots at `rows` [R]: their logits [R, D] and outputs [R, K]."""
        ...


_FEW_ROWS = 128  # of a step: its features may stay in memory until the block of a sequence is full


@dataclass(slots=True)
class LayerState:
    """Slots below `num_slots` have their KV. `pending`, together [n, F]: features of the tokens from there - 1 on."""

    num_slots: int
    pending: tuple[Tensor, ...]


class LayerDrafter:
    """Implements `Drafter`."""

    num_layers = 1

    def __init__(self, target: TorchRunner, layer: DraftLayer, method: Method, shape: DraftShape) -> None:
        self.name = layer.name
        self.taps = layer.taps
        self._layer = layer
        self._shape = shape
        self._block_size = target.layout.block_size
        self._frequencies = target.model.inverse_frequencies
        self._activations = target.backend.activations
        self._device = target.model.embedding.device
        self._num_features = len(layer.taps) * target.config.hidden_size
        self._sampling = DraftSampling(target.config.vocab_size, layer.vocabulary, method, target.backend.likeliest())

    def outlook(self, drafting: DraftingState, token_ids: Sequence[int]) -> Outlook:
        return ANYTHING

    def propose(self, chunks: Sequence[Chunk]) -> list[Draft]:
        """The first tokens from the last slot that the target's features reach, those behind from the layer's outputs.

        What it leaves in the slots of drafted tokens counts for nothing: those that stand are stored anew.
        """
        slots, features = zip(*(self._slots_behind(c, c.history, len(c.history)) for c in chunks), strict=True)
        grow = grow_trees if self._shape is DraftShape.TREE else grow_chains
        return grow(chunks, slots, self._fused(features), self._run, self._sampling)

    def observe(self, observed: Sequence[Observed], output: ForwardOutput) -> None:
        """Keeps the features of the tokens that stand, and stores their slots once they complete a block.

        So a block that others may find is whole, and a sequence that does not draft costs one call in a block's time.
        """
        assert output.features is not None
        due = []
        for seen in observed:
            state = self._state(seen.chunk.drafting, seen.chunk.start)
            rows = seen.rows
            features = output.features[slice(rows.start, rows.stop) if isinstance(rows, range) else rows]
            # A view keeps the whole step's. Of a small step that is little; a copy for each sequence would take longer.
            state.pending += (features if len(output.features) <= _FEW_ROWS else features.clone(),)
            num_computed = seen.chunk.start + seen.num_kept
            if num_computed // self._block_size > state.num_slots // self._block_size:
                due.append(self._slots_behind(seen.chunk, seen.token_ids, num_computed))
        if due:
            slots, pending = zip(*due, strict=True)
            self._layer.store(self._step(slots), torch.cat(self._fused(pending)))

    def export(self, drafting: DraftingState) -> Tensor | None:
        """The features whose slots are still to be run, [n, F], n at most a block."""
        state = drafting.value
        return torch.cat(state.pending).float() if isinstance(state, LayerState) else None

    def restore(self, drafting: DraftingState, num_computed_tokens: int, state: Tensor) -> None:
        most = num_computed_tokens % self._block_size + 1  # slots of full blocks are others' too, and whole
        if state.ndim != 2 or state.shape[1] != self._num_features or not 1 <= len(state) <= most:
            raise ValueError(
                f"the drafter's state has shape {list(state.shape)}; it must be [1 to {most}, {self._num_features}]"
            )
        drafting.value = LayerState(num_computed_tokens + 1 - len(state), (state,))

    def _state(self, drafting: DraftingState, num_computed_tokens: int) -> LayerState:
        if drafting.value is None:
            unknown = torch.zeros((1, self._num_features), dtype=self._activations, device=self._device)
            drafting.value = LayerState(num_computed_tokens, (unknown,))
        state = drafting.value
        assert isinstance(state, LayerState)
        if len(state.pending) == 1:  # as restored it is on no device of ours, nor of its type
            state.pending = (state.pending[0].to(self._device, self._activations),)
        return state

    def _slots_behind(self, chunk: Chunk, token_ids: Sequence[int], num_slots: int) -> tuple[Chunk, Tensor]:
        """What the layer has to run over so that slots below `num_slots` have their KV: they count as done.

        With the features [n, F] of the token before each.
        """
        state = self._state(chunk.drafting, chunk.start)
        first, state.num_slots = state.num_slots, num_slots
        pending = torch.cat(state.pending) if len(state.pending) > 1 else state.pending[0]
        features, rest = pending[: num_slots - first], pending[num_slots - first :]
        state.pending = (rest.clone(),)  # a view would keep all of them: those of a long prompt are many
        return Chunk(token_ids[first:num_slots], first, chunk.block_ids), features

    def _fused(self, features: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Hidden inputs [n, K] from features [n, F], those of all sequences in one call."""
        fused = self._layer.fuse(torch.cat(list(features)))
        hidden: tuple[Tensor, ...] = fused.split([len(each) for each in features])
        return hidden

    def _run(
        self, slots: Sequence[Chunk], hidden: Sequence[Tensor], num_rows: Sequence[int] | None = None
    ) -> tuple[Tensor, Tensor]:
        """Logits [R, D] and outputs [R, K] of the last `num_rows[i]` slots of each, by default of one."""
        step = self._step(slots)
        rows = step.last_rows([1] * len(slots) if num_rows is None else num_rows)
        return self._layer.run(step, torch.cat(list(hidden)), rows)

    def _step(self, slots: Sequence[Chunk]) -> StepInput:
        return StepInput.of(slots, self._block_size, self._frequencies)
