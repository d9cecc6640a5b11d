"""A request inside one worker: its tokens and how far its KV cache has come. Mutable; it never leaves the process."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from model.block_pool import BlockHash, BlockPool, hash_blocks
from model.runner import Chunk, DraftingState
from model.sampling_params import SamplingParams

if TYPE_CHECKING:
    from model.answer_text import AnswerText
    from model.grammar import Matcher
    from model.prompt_scores import PromptScores


class FinishReason(enum.Enum):
    STOP = "stop"
    LENGTH = "length"


@dataclass(slots=True, eq=False)
class Sequence:
    """Tokens are prompt, then output. KV is valid for the first `num_computed_tokens`; the last token's never is.

    `num_cached_tokens` of them came from the prefix cache. Blocks are held with one reference each, the sequence's own.
    `text` is that of the output, from when on it is wanted; without it no stop text is seen. With `scores` the prompt's
    tokens are scored, so that all of them have to be computed.
    """

    sequence_id: str
    token_ids: list[int]
    num_prompt_tokens: int
    sampling: SamplingParams
    block_size: int
    block_ids: list[int] = field(default_factory=list)
    num_computed_tokens: int = 0
    num_cached_tokens: int = 0
    finish_reason: FinishReason | None = None
    text: AnswerText | None = None
    scores: PromptScores | None = None
    matcher: Matcher | None = None  # if its output has to match a grammar
    drafting: DraftingState = field(default_factory=DraftingState)
    _hashes: list[BlockHash] = field(default_factory=list)
    _num_published: int = 0

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def num_uncomputed_tokens(self) -> int:
        return len(self.token_ids) - self.num_computed_tokens

    @property
    def block_hashes(self) -> list[BlockHash]:
        """Hashes of the full blocks of all tokens, computed as they fill."""
        self._hashes = hash_blocks(self.token_ids, self.block_size, self._hashes)
        return self._hashes

    def append(self, token_id: int) -> None:
        """Adds a sampled token and decides whether it ends the sequence."""
        self.token_ids.append(token_id)
        may_stop = self.num_output_tokens >= self.sampling.min_tokens
        is_cut = self.text is not None and self.text.push(token_id, may_stop=may_stop)
        if is_cut or (may_stop and token_id in self.sampling.stop_token_ids):
            self.finish_reason = FinishReason.STOP
        elif self.num_output_tokens >= self.sampling.max_tokens:
            self.finish_reason = FinishReason.LENGTH
        if self.finish_reason is not None and self.text is not None:
            self.text.end()

    def next_chunk(self, num_tokens: int, num_draft_tokens: int = 0) -> Chunk:
        """The next `num_tokens` uncomputed tokens, to be run; with the last of all the next token is wanted."""
        start, end = self.num_computed_tokens, self.num_computed_tokens + num_tokens
        wants_token = end == self.num_tokens
        return Chunk(
            self.token_ids[start:end],
            start,
            self.block_ids,
            self.sampling if wants_token else None,
            self.token_ids,
            self.num_prompt_tokens,
            num_draft_tokens,
            self.drafting,
            scores=self.scores,
            matcher=self.matcher,
        )

    def num_blocks_for(self, num_tokens: int) -> int:
        """Further blocks needed to hold KV of the first `num_tokens` tokens."""
        return max(0, -(-num_tokens // self.block_size) - len(self.block_ids))

    def take_prefix(self, pool: BlockPool) -> None:
        """Starts from what the prefix cache holds. The last token is left: its logits are wanted.

        A prompt that is to be scored starts from nothing: KV has no logits.
        """
        assert not self.block_ids
        if self.scores is not None and not self.scores.is_complete:
            return
        num_full = (self.num_tokens - 1) // self.block_size
        self.block_ids = pool.match_prefix(self.block_hashes[:num_full])
        self.num_cached_tokens = self.num_computed_tokens = len(self.block_ids) * self.block_size
        self._num_published = len(self.block_ids)

    def adopt(self, block_ids: list[int], num_computed_tokens: int) -> None:
        """Takes over blocks that hold KV of the first tokens, with one reference each; full ones are published."""
        assert not self.block_ids
        self.block_ids = block_ids
        self.num_computed_tokens = num_computed_tokens
        self._num_published = num_computed_tokens // self.block_size

    def grow(self, pool: BlockPool, num_tokens: int) -> None:
        """Holds blocks for the first `num_tokens` tokens. Raises NoFreeBlocks, and then nothing has changed."""
        self.block_ids.extend(pool.allocate(self.num_blocks_for(num_tokens)))

    def trim(self, pool: BlockPool) -> int:
        """Lets go of blocks beyond its tokens, held for drafts that did not stand. Returns how many. Not in a step."""
        num_needed = -(-self.num_tokens // self.block_size)
        surplus = self.block_ids[num_needed:]
        del self.block_ids[num_needed:]
        pool.release(surplus)
        return len(surplus)

    def publish(self, pool: BlockPool) -> None:
        """Makes the blocks that are full and computed findable, unless the drafter's part of them is missing."""
        if not self.drafting.blocks_are_whole:
            return
        num_full = self.num_computed_tokens // self.block_size
        if num_full > self._num_published:
            hashes = self.block_hashes
            for index in range(self._num_published, num_full):
                pool.publish(self.block_ids[index], hashes[index])
            self._num_published = num_full

    def drop_blocks(self, pool: BlockPool) -> None:
        """Lets go of the KV; tokens stay, so the sequence can be computed again and go on exactly."""
        pool.release(self.block_ids)
        self.block_ids = []
        self.num_computed_tokens = self.num_cached_tokens = self._num_published = 0
        self.drafting = DraftingState(None, self.drafting.failed, self.drafting.blocks_are_whole)
