"""Drafting token after token, as EAGLE and small models do it, for all sequences of a batch side by side.

Letters: S sequences that still draft, D draft vocabulary, K hidden size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from decode.draft import Draft
from decode.draft_sampling import DraftSampling
from model.runner import Chunk
from model.sampling import Row

Run = Callable[[Sequence[Chunk], Sequence[Tensor]], tuple[Tensor, Tensor]]
"""Slots to run over, and the hidden input of each [n, K] -> logits [S, D] and output [S, K] of the last slots."""


@dataclass(slots=True)
class Chain:
    """A draft of at most `num_tokens` tokens that grows."""

    chunk: Chunk
    num_tokens: int
    token_ids: list[int] = field(default_factory=list)
    laws: list[Tensor] = field(default_factory=list)

    @property
    def row(self) -> Row:
        return Row.behind(self.chunk, tuple(self.token_ids))

    @property
    def is_complete(self) -> bool:
        return self.chunk.drafting.failed or len(self.token_ids) == self.num_tokens

    @property
    def last_slot(self) -> Chunk:
        """That of the last drafted token; its block is held already."""
        start = len(self.chunk.history) + len(self.token_ids) - 1
        return Chunk(self.token_ids[-1:], start, self.chunk.block_ids)

    def add(self, token_id: int | None, law: Tensor | None) -> None:
        if token_id is None:
            self.chunk.drafting.failed = True
            return
        self.token_ids.append(token_id)
        if law is not None:
            self.laws.append(law)

    def draft(self, vocabulary: Tensor | None) -> Draft:
        if self.chunk.drafting.failed:
            return Draft()
        if not self.laws:
            return Draft(tuple(self.token_ids))
        return Draft(tuple(self.token_ids), torch.stack(self.laws), vocabulary)


def grow(chains: Sequence[Chain], logits: Tensor, sampling: DraftSampling) -> None:
    """Each by one token, from its row of `logits` [S, D]."""
    tokens, laws = sampling.choose(logits, [chain.row for chain in chains])
    for index, (chain, token) in enumerate(zip(chains, tokens, strict=True)):
        chain.add(token, laws.get(index))


def grow_chains(
    chunks: Sequence[Chunk], slots: Sequence[Chunk], hidden: Sequence[Tensor], run: Run, sampling: DraftSampling
) -> list[Draft]:
    """A draft of `num_draft_tokens` tokens for each chunk, none where logits are not finite: it has failed then.

    `slots` and `hidden` are what `run` starts from.
    """
    chains = [Chain(chunk, chunk.num_draft_tokens) for chunk in chunks]
    growing = chains
    while growing:
        logits, output = run(slots, hidden)
        grow(growing, logits, sampling)
        going_on = [index for index, chain in enumerate(growing) if not chain.is_complete]
        growing = [growing[index] for index in going_on]
        slots, hidden = [chain.last_slot for chain in growing], [output[index, None] for index in going_on]
    return [chain.draft(sampling.vocabulary) for chain in chains]
