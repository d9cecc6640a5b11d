"""EAGLE-3: one decoder layer that reads the target's hidden states and drafts token after token (arXiv 2503.01840).

The slot of a token x_p sees the embedding of x_p and the target's features of the token before it, and predicts
x_{p+1}. Its keys and values so depend on tokens up to x_p only, as the target's do: they are one more layer of the same
paged cache, prefix cache and hand-over included. Features that nobody has (those before a cached prefix ends) are 0.

Letters: T tokens of all chunks, K hidden size, F features of a token, S sequences, D draft vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from decode.chain import grow_chains
from decode.draft import Draft
from decode.draft_head import DraftHead
from decode.draft_sampling import DraftSampling
from decode.drafter import Observed
from decode.outlook import ANYTHING, Outlook
from decode.verification import Method
from model.moe import Expert
from model.runner import Chunk, DraftingState
from model.step_input import StepInput
from model.torch_runner import TorchRunner
from model.transformer import ForwardOutput


@dataclass(slots=True)
class EagleState:
    """Slots below `num_slots` have their KV. `pending` [n, F] are features of the tokens from `num_slots - 1` on."""

    num_slots: int
    pending: Tensor


class EagleDrafter:
    """Implements `Drafter`."""

    num_layers = 1

    def __init__(self, target: TorchRunner, head: DraftHead, method: Method) -> None:
        config, backend = target.config, target.backend
        place = backend.place
        self.name = head.name
        self.taps = head.card.taps
        self._block_size = target.layout.block_size
        self._frequencies = target.model.inverse_frequencies
        self._embedding = target.model.embedding
        self._activations = backend.activations
        self._num_features = len(head.card.taps) * config.hidden_size
        self._layer = config.num_layers  # the one behind the target's
        weight = {name: place(tensor) for name, tensor in head.weights.items()}

        self._fuse = backend.linear([weight["fc.weight"]], [None])
        self._embedding_norm = backend.norm(weight["midlayer.input_layernorm.weight"], config.norm_eps)
        self._hidden_norm = backend.norm(weight["midlayer.hidden_norm.weight"], config.norm_eps)
        names = [f"midlayer.self_attn.{name}_proj.weight" for name in ("q", "k", "v")]
        self._qkv = backend.linear([weight[name] for name in names], [None] * 3)
        self._output = backend.linear([weight["midlayer.self_attn.o_proj.weight"]], [None])
        self._mlp_norm = backend.norm(weight["midlayer.post_attention_layernorm.weight"], config.norm_eps)
        names = [f"midlayer.mlp.{name}_proj.weight" for name in ("gate", "up", "down")]
        self._mlp = backend.feed_forward(Expert(*(weight[name] for name in names)))
        self._norm = backend.norm(weight["norm.weight"], config.norm_eps)
        vocabulary = None if head.vocabulary is None else head.vocabulary.to(self._embedding.device)
        rows = weight.get("lm_head.weight")
        if rows is None:
            rows = target.model.head_weight if vocabulary is None else target.model.head_weight[vocabulary]
        self._head = backend.linear([rows], [None])
        self._attention = backend.attention(config, target.cache, [None] * (self._layer + 1))
        self._sampling = DraftSampling(config.vocab_size, vocabulary, method)

    def outlook(self, drafting: DraftingState, token_ids: Sequence[int]) -> Outlook:
        return ANYTHING

    def propose(self, chunks: Sequence[Chunk]) -> list[Draft]:
        """A chain for each: the first token from the last slot that the target's features reach, then one by one."""
        slots, features = zip(*(self._slots_behind(c, c.history, len(c.history)) for c in chunks), strict=True)
        return grow_chains(chunks, slots, self._fused(features), self._run_with_logits, self._sampling)

    def observe(self, observed: Sequence[Observed], output: ForwardOutput) -> None:
        """Keeps the features of the tokens that stand, and stores their slots once they complete a block.

        So a block that others may find is whole, and a sequence that does not draft costs one call in a block's time.
        """
        assert output.features is not None
        due = []
        for seen in observed:
            state = self._state(seen.chunk.drafting, seen.chunk.start)
            features = output.features[seen.first_row : seen.first_row + seen.num_kept]
            state.pending = torch.cat((state.pending, features))
            num_computed = seen.chunk.start + seen.num_kept
            if num_computed // self._block_size > state.num_slots // self._block_size:
                due.append(self._slots_behind(seen.chunk, seen.token_ids, num_computed))
        if due:
            slots, pending = zip(*due, strict=True)
            self._store(slots, self._fused(pending))

    def export(self, drafting: DraftingState) -> Tensor | None:
        """The features whose slots are still to be run, [n, F], n at most a block."""
        state = drafting.value
        return state.pending.float() if isinstance(state, EagleState) else None

    def restore(self, drafting: DraftingState, num_computed_tokens: int, state: Tensor) -> None:
        most = num_computed_tokens % self._block_size + 1  # slots of full blocks are others' too, and whole
        if state.ndim != 2 or state.shape[1] != self._num_features or not 1 <= len(state) <= most:
            raise ValueError(
                f"the drafter's state has shape {list(state.shape)}; it must be [1 to {most}, {self._num_features}]"
            )
        drafting.value = EagleState(num_computed_tokens + 1 - len(state), state)

    def _state(self, drafting: DraftingState, num_computed_tokens: int) -> EagleState:
        if drafting.value is None:
            unknown = torch.zeros((1, self._num_features), dtype=self._activations, device=self._embedding.device)
            drafting.value = EagleState(num_computed_tokens, unknown)
        state = drafting.value
        assert isinstance(state, EagleState)
        state.pending = state.pending.to(self._embedding.device, self._activations)  # as restored it is neither
        return state

    def _slots_behind(self, chunk: Chunk, token_ids: Sequence[int], num_slots: int) -> tuple[Chunk, Tensor]:
        """What the layer has to run over so that slots below `num_slots` have their KV: they count as done.

        With the features [n, F] of the token before each.
        """
        state = self._state(chunk.drafting, chunk.start)
        first, state.num_slots = state.num_slots, num_slots
        features, rest = state.pending[: num_slots - first], state.pending[num_slots - first :]
        state.pending = rest.clone()  # a view would keep all of them: those of a long prompt are many
        return Chunk(token_ids[first:num_slots], first, chunk.block_ids), features

    def _fused(self, features: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Hidden inputs [n, K] from features [n, F], those of all sequences in one call."""
        hidden: tuple[Tensor, ...] = self._fuse(torch.cat(list(features))).split([len(each) for each in features])
        return hidden

    def _run_with_logits(self, slots: Sequence[Chunk], hidden: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        output = self._run(slots, hidden)
        return self._head(self._norm(output)), output

    def _run(self, slots: Sequence[Chunk], hidden_inputs: Sequence[Tensor]) -> Tensor:
        """The layer over slots and their hidden inputs [n, K] -> outputs [S, K] of the last slot of each."""
        step, hidden, queries = self._store(slots, hidden_inputs)
        attended = self._attention.attend(self._layer, queries, step)
        last = step.query_starts[1:] - 1
        hidden, attended = hidden[last], attended[last]
        self._output(attended, add_to=hidden)
        self._mlp(self._mlp_norm(hidden), add_to=hidden)
        return hidden

    def _store(self, slots: Sequence[Chunk], hidden_inputs: Sequence[Tensor]) -> tuple[StepInput, Tensor, Tensor]:
        """Keys and values of slots into the cache. The hidden inputs [T, K] and queries of all."""
        step = StepInput.of(slots, self._block_size, self._frequencies)
        hidden = torch.cat(list(hidden_inputs))  # [T, K]
        embedded = F.embedding(step.token_ids, self._embedding).to(self._activations)
        joined = torch.cat((self._embedding_norm(embedded), self._hidden_norm(hidden)), dim=-1)
        return step, hidden, self._attention.store(self._layer, self._qkv(joined), step)
