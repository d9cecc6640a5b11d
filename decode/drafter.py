"""The seam of drafters: who guesses the next tokens of a batch, to be verified by the target in one forward.

A drafter keeps what it knows of a sequence in the sequence's own `DraftingState`, so that nothing is left of one that
has gone: a tensor, or a dataclass whose fields it assigns to, so that it can be put back where a call raises. It is
called by `decode.speculative_runner`, or by a drafter around it: on the compute thread, or between steps where that is
said.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from decode.draft import Draft
from decode.outlook import Outlook
from model.runner import Chunk, DraftingState
from model.transformer import ForwardOutput


@dataclass(frozen=True, slots=True)
class Observed:
    """One chunk after its step. Its own tokens, and of the draft behind them those that stand, are the sequence's.

    `rows` are the places of all these in the step's features, `hidden_row` that of the last in `ForwardOutput.hidden`,
    None if no token was wanted. `emitted_ids` are the tokens that this step has found.
    """

    chunk: Chunk
    rows: range | list[int]  # a list if the draft was a tree: they need not be adjacent
    hidden_row: int | None
    emitted_ids: Sequence[int]

    @property
    def num_kept(self) -> int:
        return len(self.rows)

    @property
    def token_ids(self) -> Sequence[int]:
        """All of the sequence: a copy, so ask where it is needed only."""
        return [*self.chunk.history, *self.emitted_ids]


class Drafter(Protocol):
    @property
    def name(self) -> str:
        """For people and for the layout: two workers exchange KV only if this is the same."""
        ...

    @property
    def num_layers(self) -> int:
        """Layers of KV that the drafter has in the cache, behind the target's."""
        ...

    @property
    def taps(self) -> Sequence[int]:
        """Layers of the target whose input it wants of every token."""
        ...

    def outlook(self, drafting: DraftingState, token_ids: Sequence[int]) -> Outlook:
        """What `propose` could give for a sequence with these tokens, all it has. Between steps, on the event loop.

        So it takes microseconds, and the device is not waited for.
        """
        ...

    def propose(self, chunks: Sequence[Chunk]) -> list[Draft]:
        """At most `num_draft_tokens` tokens for each of these chunks, whose last token is the sequence's last.

        Where it has no finite logits for one it says so in the chunk's `drafting.failed`, and drafts nothing.
        """
        ...

    def observe(self, observed: Sequence[Observed], output: ForwardOutput) -> None:
        """What became of a step, prompts that are being prefilled included."""
        ...

    def export(self, drafting: DraftingState) -> Tensor | None:
        """What whoever takes this sequence over needs beside its KV, as float32; None for nothing."""
        ...

    def restore(self, drafting: DraftingState, num_computed_tokens: int, state: Tensor) -> None:
        """The counterpart, for a sequence with KV of so many tokens: ValueError if `export` cannot have given it.

        `state` is on the CPU, as it came, finite and float32. Not on the compute thread: the device is not waited for.
        """
        ...
