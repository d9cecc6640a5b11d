"""Medusa: heads beside the target's own, each of which guesses one place further (Cai et al., arXiv 2401.10774).

Head i reads the hidden state from which the target's own head drew the last token, and guesses the token i + 1 places
behind that one; all at once, without a forward. It holds no KV.

Letters: S sequences, M heads, K hidden size, D draft vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from decode.chain import Chain, grow
from decode.draft import Draft
from decode.draft_head import DraftHead, num_medusa_heads
from decode.draft_sampling import DraftSampling
from decode.drafter import Observed
from decode.outlook import NOTHING, Outlook
from decode.verification import Method
from model.runner import Chunk, DraftingState
from model.torch_runner import TorchRunner
from model.transformer import ForwardOutput


class MedusaDrafter:
    """Implements `Drafter`. Its state of a sequence is that hidden state, [K]; there is none behind a plain prefill."""

    num_layers = 0
    taps = ()

    def __init__(self, target: TorchRunner, head: DraftHead, method: Method) -> None:
        backend, config = target.backend.for_drafts(), target.config
        self.name = head.name
        self.num_heads = num_medusa_heads(head.weights)
        self._hidden_size = config.hidden_size
        self._activations, self._device = backend.activations, target.model.embedding.device
        matrices = [backend.place(head.weights[f"heads.{number}.weight"]) for number in range(self.num_heads)]
        biases = [backend.place(head.weights[f"heads.{number}.bias"]) for number in range(self.num_heads)]
        self._heads = backend.linear(matrices, biases)
        vocabulary = None if head.vocabulary is None else head.vocabulary.to(self._device)
        self._head = head.output(target, backend)
        self._sampling = DraftSampling(config.vocab_size, vocabulary, method)

    def outlook(self, drafting: DraftingState, token_ids: Sequence[int]) -> Outlook:
        return NOTHING if drafting.value is None else Outlook(self.num_heads)

    def propose(self, chunks: Sequence[Chunk]) -> list[Draft]:
        """All guesses in one pass, then place after place, since penalties depend on the tokens before."""
        chains = [Chain(chunk, min(chunk.num_draft_tokens, self.num_heads)) for chunk in chunks]
        growing = ready = [chain for chain in chains if chain.chunk.drafting.value is not None]
        if not ready:
            return [Draft()] * len(chunks)
        hidden = torch.stack([self._hidden(chain.chunk.drafting) for chain in ready])  # [S, K]
        guesses = hidden[:, None] + F.silu(self._heads(hidden)).unflatten(1, (self.num_heads, -1))  # [S, M, K]
        most = max(chain.num_tokens for chain in ready)
        logits = self._head(guesses[:, :most].flatten(0, 1)).unflatten(0, (len(ready), most))  # [S, M, D]
        for place in range(most):
            if not growing:
                break
            grow(growing, logits[:, place], self._sampling)
            going_on = [index for index, chain in enumerate(growing) if not chain.is_complete]
            growing, logits = [growing[index] for index in going_on], logits[going_on]
        return [chain.draft(self._sampling.vocabulary) for chain in chains]

    def observe(self, observed: Sequence[Observed], output: ForwardOutput) -> None:
        for seen in observed:
            if seen.hidden_row is not None:
                seen.chunk.drafting.value = output.hidden[seen.hidden_row].clone()

    def export(self, drafting: DraftingState) -> Tensor | None:
        return drafting.value.float() if isinstance(drafting.value, Tensor) else None

    def restore(self, drafting: DraftingState, num_computed_tokens: int, state: Tensor) -> None:
        if tuple(state.shape) != (self._hidden_size,):
            raise ValueError(f"the drafter's state has shape {list(state.shape)}; it must be [{self._hidden_size}]")
        drafting.value = state

    def _hidden(self, drafting: DraftingState) -> Tensor:
        state: Tensor = drafting.value
        return state.to(self._device, self._activations)  # as restored it is neither
