"""What a drafter hands over: tokens that may follow a sequence, as a chain or a tree, and how they came about."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor


class DraftShape(enum.StrEnum):
    CHAIN = "chain"
    TREE = "tree"


@dataclass(frozen=True, slots=True)
class Draft:
    """Tokens that may follow a sequence's last one: each behind the one before it or, in a tree, behind its parent.

    A chain drawn at random comes with the laws it was drawn from: `probabilities` [K, D], float32, of the token ids
    `vocabulary` [D], ascending int64 (None: of all). It was drawn with DRAFT noise of the position where it begins;
    to be coupled, with the noise of plain sampling. Without probabilities the draft is deterministic: an n-gram's, a
    greedy one, a tree. How much is drafted must not depend on what the target says in the same step.

    Raises:
        ValueError: a parent that does not come before its child, or a tree with probabilities.
    """

    token_ids: Sequence[int] = ()
    probabilities: Tensor | None = None
    vocabulary: Tensor | None = None
    parents: Sequence[int] | None = None  # index of a draft, -1 for the sequence's last token; None: a chain

    def __post_init__(self) -> None:
        if self.parents is None:
            return
        if self.probabilities is not None:
            raise ValueError("a tree has no probabilities: its drafts must be deterministic")
        if not all(-1 <= parent < node for node, parent in enumerate(self.parents)):
            raise ValueError("a parent must come before its children")

    @property
    def num_rows(self) -> int:
        """Rows of logits that verification needs: behind the sequence's last token, then behind each draft."""
        return 1 + len(self.token_ids)

    def paths(self) -> list[tuple[int, ...]]:
        """By row, the drafted tokens before it."""
        parents = range(-1, len(self.token_ids) - 1) if self.parents is None else self.parents
        paths: list[tuple[int, ...]] = [()]
        for token_id, parent in zip(self.token_ids, parents, strict=True):
            paths.append((*paths[parent + 1], token_id))
        return paths
