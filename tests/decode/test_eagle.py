"""The drafter against the module that heads are trained as: the same drafts, whatever steps led there."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from decode.draft import Draft, DraftShape
from decode.draft_head import DraftHead
from decode.eagle import EagleDrafter
from decode.eagle_training import EagleModule
from decode.speculative_runner import SpeculativeRunner
from decode.verification import Method
from model.runner import Chunk
from model.sampling_params import SamplingParams
from model.torch_runner import TorchRunner
from tests.decode.test_speculative_runner import BLOCK_SIZE, Always, answer_all, load, random_head
from tests.model.tiny_models import build

GREEDY = SamplingParams(max_tokens=24, temperature=0.0)


class Recording(EagleDrafter):
    proposals: list[tuple[list[int], Draft]]

    def propose(self, chunks: Sequence[Chunk]) -> list[Draft]:
        histories = [list(chunk.history) for chunk in chunks]
        drafts = super().propose(chunks)
        self.proposals += zip(histories, drafts, strict=True)
        return drafts


def sharp(head: DraftHead) -> DraftHead:
    """The same, but surer of itself: so trees are deep as well as wide."""
    return replace(head, weights={**head.weights, "norm.weight": 12 * head.weights["norm.weight"]})


class Reference:
    """The module as it learns: everything anew for each token, features of the whole text, the layer over all slots."""

    def __init__(self, folder: Path, head: DraftHead) -> None:
        self._target = TorchRunner.load(folder, num_blocks=64, block_size=BLOCK_SIZE, max_context_tokens=64)
        self._module = EagleModule(self._target.config, 2, 40)
        missing = self._module.load_state_dict(dict(head.weights), strict=True)
        assert not missing.missing_keys
        assert head.vocabulary is not None
        self.vocabulary = head.vocabulary

    def law(self, history: list[int], path: Sequence[int]) -> Tensor:
        """Logarithms [D] of the chances behind these drafted tokens."""
        with torch.inference_mode():
            chunk = Chunk(history, 0, range(self._target.layout.num_blocks(len(history))))
            features = self._target.forward([chunk], taps=(0, 1)).features
            assert features is not None
            text, hidden = list(history), self._module.start(features[None])
            for token in (*path, None):
                embedded = F.embedding(torch.tensor([text]), self._target.model.embedding).float()
                output = self._module.midlayer(embedded, hidden, [])
                if token is not None:
                    text.append(token)
                    hidden = torch.cat((hidden, output[:, -1:]), dim=1)
            head = self._target.model.head_weight[self.vocabulary].float()
            logits: Tensor = self._module.norm(output[0, -1]) @ head.T
            return logits.log_softmax(dim=-1)


def recorded(
    folder: Path, shape: DraftShape, num_drafts: int, num_step_tokens: int
) -> tuple[list[tuple[list[int], Draft]], Reference]:
    """What was drafted behind which text, and who knows what should have been."""
    build("llama", folder, seed=1)
    target = load(folder, num_draft_layers=1)
    head = sharp(random_head("eagle", target))
    drafter = Recording(target, head, Method.BLOCK, shape)
    drafter.proposals = []
    runner = SpeculativeRunner(target, drafter, Method.BLOCK)
    answer_all(runner, [GREEDY] * 5, Always(num_drafts), num_step_tokens=num_step_tokens)
    assert len(drafter.proposals) > 20
    assert len({tuple(draft.token_ids) for _, draft in drafter.proposals}) > 10  # not always the same guess
    return drafter.proposals, Reference(folder, head)


step_sizes = pytest.mark.parametrize("num_step_tokens", [40, 7], ids=["whole prompts", "chunks that end within blocks"])


Law = Callable[[list[int], Sequence[int]], Tensor]
"""A text and drafted tokens -> the logarithms [D] of the chances behind these."""


def check_chain(history: list[int], draft: Draft, law: Law, vocabulary: Tensor) -> None:
    """Each token is the likeliest one."""
    for path in draft.paths()[1:]:
        assert path[-1] == vocabulary[law(history, path[:-1]).argmax()], history


def check_tree(history: list[int], draft: Draft, law: Law, vocabulary: Tensor) -> None:
    """Of the children of nodes that have some, those drafted are the most confident of all, and they come in order."""
    paths = draft.paths()
    chances: dict[tuple[int, ...], float] = {(): 0.0}
    for parent in sorted({path[:-1] for path in paths[1:]}, key=len):
        for token, chance in zip(vocabulary.tolist(), law(history, parent).tolist(), strict=True):
            chances[(*parent, token)] = chances[parent] + chance
    drafted = [chances.pop(path) for path in paths][1:]
    assert drafted == pytest.approx(sorted(drafted, reverse=True), abs=1e-4), history
    assert min(drafted) > max(chances.values()) - 1e-4, history


@step_sizes
def test_drafts_are_those_of_the_trained_module(tmp_path: Path, num_step_tokens: int) -> None:
    proposals, reference = recorded(tmp_path, DraftShape.CHAIN, 3, num_step_tokens)
    for history, draft in proposals:
        check_chain(history, draft, reference.law, reference.vocabulary)


@step_sizes
def test_trees_are_those_of_the_trained_module(tmp_path: Path, num_step_tokens: int) -> None:
    proposals, reference = recorded(tmp_path, DraftShape.TREE, 9, num_step_tokens)
    for history, draft in proposals:
        check_tree(history, draft, reference.law, reference.vocabulary)
    assert sum(max(map(len, draft.paths())) > 2 for _, draft in proposals) > 10
