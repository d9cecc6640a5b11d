"""The seam between deciding and computing: a batch of chunks goes in, a token for each chunk that wants one comes out.

Schedulers decide and own the pool; a runner computes and owns the cache tensor. `TorchRunner` runs the model,
`TimedRunner` takes the time a calibrated model says. A runner is called from one thread at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from model.kv_layout import KVLayout
from model.sampling_params import SamplingParams

if TYPE_CHECKING:
    from torch import Tensor

    from model.grammar import Matcher
    from model.prompt_scores import PromptScores

LayerDone = Callable[[int], None]
"""Called on the compute thread once a layer's keys and values of the whole batch are in the cache."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """Consecutive tokens of one sequence to run: positions [start, start + len(token_ids)).

    `block_ids` hold the KV of positions [0, start + len(token_ids)). With `sampling` set the chunk ends at the
    sequence's last token and the next one is wanted; `history` are then all its tokens and `num_prompt_tokens` of them
    the prompt (penalties, logprobs and randomness depend on both).

    A runner that drafts may put at most `num_draft_tokens` tokens behind them, for which `block_ids` have room, and
    keeps what it knows of the sequence in `drafting`.

    With `parents` the last tokens are nodes of a tree: each continues the path to its parent, and sees that path alone.
    `parents` may begin with nodes that have run before: its last element belongs to the last token.

    With `scores` the prompt's tokens of this chunk, which `history` has too, are scored into it.
    """

    token_ids: Sequence[int]
    start: int
    block_ids: Sequence[int]
    sampling: SamplingParams | None = None
    history: Sequence[int] = ()
    num_prompt_tokens: int = 0
    num_draft_tokens: int = 0
    drafting: DraftingState = field(default_factory=lambda: DraftingState())
    parents: Sequence[int] | None = None  # index of a node, -1 for the token before the first
    scores: PromptScores | None = None
    matcher: Matcher | None = None  # of the sequence, if it has to match a grammar

    def with_state(self, drafting: DraftingState) -> Chunk:
        """Field by field: it is done for every chunk of every step, and `dataclasses.replace` takes twice as long."""
        return Chunk(
            self.token_ids,
            self.start,
            self.block_ids,
            self.sampling,
            self.history,
            self.num_prompt_tokens,
            self.num_draft_tokens,
            drafting,
            self.parents,
            self.scores,
            self.matcher,
        )


@dataclass(slots=True, eq=False)
class DraftingState:
    """What a drafter knows of a sequence: it goes with the sequence and is changed by the runner alone, during a step
    or, asked for an outlook, between steps.

    `failed`: drafting broke down once, and is over for this sequence. `blocks_are_whole`: the blocks that it fills have
    KV of the drafter's layers, too; without, no other sequence may start from them.
    """

    value: Any = None
    failed: bool = False
    blocks_are_whole: bool = True


@dataclass(frozen=True, slots=True)
class Logprobs:
    """Natural logs, of the model's own distribution: before penalties, temperature and filters."""

    chosen: float
    top: tuple[tuple[int, float], ...] = ()  # (token id, logprob), most likely first


@dataclass(frozen=True, slots=True)
class SampledToken:
    token_id: int
    logprobs: Logprobs | None = None


class NonFiniteLogits(ArithmeticError):
    """Why a chunk that wanted a token has none: its logits hold NaN or infinity, or nothing else than -infinity."""


@dataclass(frozen=True, slots=True)
class VerifiedDraft:
    """The drafted tokens that stand, and behind them the one that the model itself has drawn.

    If the draft was a tree, `nodes` are those that stand, by their places in the draft; None for a chain.
    """

    tokens: tuple[SampledToken, ...]
    num_drafted: int
    nodes: tuple[int, ...] | None = None


Outcome = SampledToken | VerifiedDraft | NonFiniteLogits | None
"""Of one chunk: None where it wanted no token, the error where there is none to be had."""


@dataclass(frozen=True, slots=True)
class StepOutput:
    """`sampled[i]` belongs to chunk i. `expert_load`: tokens, [layers, experts], rejected drafts among them.

    `compute_s` is the whole step, `draft_s` of it drafting; `num_failed_drafts` sequences stopped drafting in it.
    """

    sampled: tuple[Outcome, ...]
    compute_s: float = 0.0
    expert_load: Sequence[Sequence[int]] = field(default=())
    draft_s: float = 0.0
    num_failed_drafts: int = 0

    @property
    def num_distinct_experts(self) -> float | None:
        """That a token of this step chose: per layer, on average. None for a model without experts."""
        if not len(self.expert_load):
            return None
        return sum(sum(count > 0 for count in layer) for layer in self.expert_load) / len(self.expert_load)


class DraftingStates(Protocol):
    """Takes what is known of a sequence, to draft for it, from one worker to another."""

    def export_drafting(self, drafting: DraftingState) -> bytes:
        """What another worker needs beside the KV to go on drafting; empty if nothing.

        Not during a step of this sequence. It may wait for the device, so not on the event loop.
        """
        ...

    def restore_drafting(self, drafting: DraftingState, num_computed_tokens: int, state: bytes) -> None:
        """The counterpart, for a sequence with KV of so many tokens. ValueError if it cannot be from such a runner."""
        ...


class NoDrafting:
    """The states of a worker that does not draft."""

    drafter = "none"

    def export_drafting(self, drafting: DraftingState) -> bytes:
        return b""

    def restore_drafting(self, drafting: DraftingState, num_computed_tokens: int, state: bytes) -> None:
        if state:
            raise ValueError("there is some, but this worker does not draft")


class ModelRunner(DraftingStates, Protocol):
    @property
    def layout(self) -> KVLayout: ...

    @property
    def num_blocks(self) -> int: ...

    @property
    def kernels(self) -> str:
        """Which kernels run, for people: 'avx2', 'amx', 'torch', 'timed'."""
        ...

    @property
    def drafter(self) -> str:
        """What drafts, for people: 'ngram', 'eagle+ngram', 'none'."""
        ...

    @property
    def cache_address(self) -> int:
        """Of the first byte of the cache, [L, N, H, 2, B, D]."""
        ...

    @property
    def cache_memory(self) -> Tensor:
        """The cache itself, or its bytes in another type: [L, N, ...]. For reading."""
        ...

    @property
    def cache_device_id(self) -> int:
        """CUDA device of the cache, -1 for host memory."""
        ...

    def execute(self, chunks: Sequence[Chunk], layer_done: LayerDone | None = None) -> StepOutput:
        """Runs one forward over all chunks and samples. Blocks until done. Never keeps a reference to its arguments."""
        ...
