"""What a request needs of its workers, and what it finds there."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from router.candidate import Candidate, Role, WorkerId
from router.prefix_index import NO_MATCHES, PrefixMatches


@dataclass(frozen=True, slots=True)
class Demand:
    """Blocks and tokens for the prompt and one token, and in all. One token needs no decode.

    With several answers `num_own_blocks` are those of each that follows the first: it shares the prompt's full ones.

    `prefix`: who holds the beginning of the prompt. `session`: the workers that served the last request of its session.
    """

    num_blocks: int
    num_blocks_in_all: int
    wants_decode: bool
    num_tokens: int = 0
    num_tokens_in_all: int = 0
    prefix: PrefixMatches = NO_MATCHES
    block_size: int = 1
    token_bytes: int = 0  # of KV
    session: Collection[WorkerId] = ()
    num_answers: int = 1  # that are placed together
    num_own_blocks: int = 0

    @property
    def num_prompt_tokens(self) -> int:
        return max(0, self.num_tokens - 1)

    @property
    def num_blocks_together(self) -> int:
        """Of all answers, on the worker that decodes them."""
        return self.num_blocks + (self.num_answers - 1) * self.num_own_blocks

    def num_cached(self, worker: Candidate) -> int:
        """Tokens of the prompt whose KV the worker holds."""
        return self.prefix.of(worker.id) * self.block_size

    def fits(self, worker: Candidate) -> bool:
        """Whether the worker's cache, were it empty, could hold what comes to it."""
        return worker.num_blocks >= (self.num_blocks_in_all if self._is_kept(worker) else self.num_blocks)

    def is_allowed(self, worker: Candidate) -> bool:
        """Whether the worker takes sequences as long as what comes to it. It need not check that itself."""
        most = worker.max_context_tokens
        return most is None or most >= (self.num_tokens_in_all if self._is_kept(worker) else self.num_tokens)

    def _is_kept(self, worker: Candidate) -> bool:
        return self.wants_decode and worker.role is not Role.PREFILL
