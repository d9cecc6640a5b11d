"""Drafting a tree: what is likeliest behind what is likely, for all sequences of a batch side by side.

As in EAGLE-2 (arXiv 2406.16858) the confidence in a node is the product of the draft's chances along its path, and the
best nodes are the draft. Unlike there, who gets children in a round is a matter of confidence, not of level. How a tree
grows depends on the draft alone, and its nodes are compared with what plain sampling draws: so it is exact.

Letters: R rows, D draft vocabulary, K hidden size.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from decode.draft import Draft
from decode.draft_sampling import DraftSampling
from model.runner import Chunk
from model.sampling import Row

Run = Callable[[Sequence[Chunk], Sequence[Tensor], Sequence[int]], tuple[Tensor, Tensor]]
"""Slots to run over, the hidden input of each [n, K], and of how many last ones -> logits [R, D], outputs [R, K]."""

MOST_CHILDREN = 10  # of a node, as in EAGLE-2
_ABOUT_AS_GOOD = math.log(0.5)  # finds nearly the best tree there is, in no more rounds than a chain takes
LEAST_GAIN = 0.1  # tokens that another round may bring, at most: fewer are not worth it


@dataclass(frozen=True, slots=True, eq=False)
class Node:
    path: tuple[int, ...]  # tokens behind the sequence's last one, its own included
    parent: Node | None
    confidence: float  # logarithm


_ROOT = Node((), None, 0.0)


class Tree:
    """At most `num_draft_tokens` nodes. `running` are those whose children are found next: the root, to begin with."""

    def __init__(self, chunk: Chunk) -> None:
        self.chunk = chunk
        self.running = [_ROOT]
        self._best: list[Node] = []
        self._places = {_ROOT: -1}  # by node that has run: its slot, counted from the first behind the root
        self._outputs: dict[Node, Tensor] = {}  # [K] each

    @property
    def rows(self) -> list[Row]:
        return [Row.behind(self.chunk, node.path) for node in self.running]

    @property
    def slots(self) -> Chunk:
        """Those of the running nodes, behind the nodes that have run; their blocks are held already."""
        first = len(self.chunk.history) + len(self._places) - 1 - len(self.running)
        parents = [self._places[node.parent] for node in self._places if node.parent is not None]
        return Chunk([node.path[-1] for node in self.running], first, self.chunk.block_ids, parents=parents)

    @property
    def hidden(self) -> Tensor:
        """The hidden inputs [n, K] of the running nodes: what the layer put out for their parents."""
        return torch.stack([self._outputs[node.parent] for node in self.running if node.parent is not None])

    def add(self, children: Sequence[Sequence[tuple[int, float]] | None], outputs: Tensor) -> None:
        """The children of the running nodes, each with the logarithm of its chance, and the nodes' outputs [n, K].

        Then chooses who runs next: who is about as good as the best. Of N nodes N - 1 have children at most.
        """
        for node, found, output in zip(self.running, children, outputs, strict=True):
            if found is None:
                self.chunk.drafting.failed = True
                self.running = []
                return
            self._outputs[node] = output
            self._best += [
                Node((*node.path, token), node, node.confidence + min(0.0, chance)) for token, chance in found
            ]
        num_tokens = self.chunk.num_draft_tokens
        self._best.sort(key=lambda node: -node.confidence)  # stable: parents stay before their children
        del self._best[num_tokens:]
        least = self._best[-1].confidence if len(self._best) == num_tokens else -math.inf
        fresh = [node for node in self._best if node not in self._places and node.confidence > least]
        good = [node for node in fresh if node.confidence >= fresh[0].confidence + _ABOUT_AS_GOOD]
        self.running = good[: num_tokens - len(self._places)]
        if sum(math.exp(node.confidence) for node in self.running) < LEAST_GAIN:
            self.running = []
        for node in self.running:
            self._places[node] = len(self._places) - 1

    def draft(self) -> Draft:
        """The best first, which is parents before their children."""
        if self.chunk.drafting.failed:
            return Draft()
        places = {node: place for place, node in enumerate(self._best)}
        parents = [places.get(node.parent, -1) for node in self._best if node.parent is not None]
        return Draft([node.path[-1] for node in self._best], parents=parents)


def grow_trees(
    chunks: Sequence[Chunk], slots: Sequence[Chunk], hidden: Sequence[Tensor], run: Run, sampling: DraftSampling
) -> list[Draft]:
    """A draft of at most `num_draft_tokens` nodes for each, none where logits are not finite: it has failed then.

    `slots` and `hidden` are what `run` starts from.
    """
    trees = [Tree(chunk) for chunk in chunks]
    growing = trees
    while growing:
        counts = [len(tree.running) for tree in growing]
        logits, outputs = run(slots, hidden, counts)
        most = min(MOST_CHILDREN, max(tree.chunk.num_draft_tokens for tree in growing))
        found = iter(sampling.likeliest(logits, [row for tree in growing for row in tree.rows], most))
        for tree, of_tree in zip(growing, outputs.split(counts), strict=True):
            tree.add([next(found) for _ in tree.running], of_tree)
        growing = [tree for tree in growing if tree.running]
        slots, hidden = [tree.slots for tree in growing], [tree.hidden for tree in growing]
    return [tree.draft() for tree in trees]
