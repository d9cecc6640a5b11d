"""Draft trees on the device: the tokens of the CPU without any. Not run on a GPU yet: see conftest."""

from __future__ import annotations

from pathlib import Path

import pytest

from decode.draft import DraftShape
from decode.drafter import Drafter
from decode.eagle import EagleDrafter
from decode.speculative_runner import SpeculativeRunner
from decode.verification import Method
from model.torch_runner import TorchRunner
from tests.decode.test_speculative_runner import (
    BLOCK_SIZE,
    NUM_BLOCKS,
    PROMPTS,
    Always,
    answer_all,
    random_head,
    tokens,
)
from tests.decode.test_tree_decoding import GREEDY_REQUESTS, Grove
from tests.model.tiny_models import build

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("kind", ["grove", "eagle"])
@pytest.mark.parametrize("family", ["llama", "mixtral"])
def test_greedy_tokens_are_those_without_drafts(family: str, kind: str, tmp_path: Path) -> None:
    build(family, tmp_path, seed=1)
    plain = TorchRunner.load(tmp_path, num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE, max_context_tokens=64)
    expected = tokens(answer_all(plain, GREEDY_REQUESTS))
    target = TorchRunner.load(
        tmp_path,
        num_blocks=NUM_BLOCKS,
        block_size=BLOCK_SIZE,
        num_draft_layers=int(kind == "eagle"),
        max_context_tokens=64,
        device="cuda",
    )
    drafter: Drafter = Grove({tuple(prompt): answer for prompt, answer in zip(PROMPTS, expected, strict=True)})
    if kind == "eagle":
        drafter = EagleDrafter(target, random_head("eagle", target), Method.BLOCK, DraftShape.TREE)
    found = answer_all(SpeculativeRunner(target, drafter, Method.BLOCK), GREEDY_REQUESTS, Always(9))
    assert tokens(found) == expected
    assert kind == "eagle" or sum(decoding.num_accepted_tokens for decoding in found) > 10
