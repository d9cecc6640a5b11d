"""The drafter against the module that heads are trained as: the same drafts, whatever steps led there."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch.nn import functional as F

from decode.draft import Draft
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


def reference_draft(
    module: EagleModule, target: TorchRunner, history: list[int], vocabulary: torch.Tensor, count: int
) -> list[int]:
    """Everything anew for each token: features of the whole text, then the layer over all slots."""
    with torch.inference_mode():
        chunk = Chunk(history, 0, range(target.layout.num_blocks(len(history))))
        features = target.forward([chunk], taps=(0, 1)).features
        assert features is not None
        text, hidden = list(history), module.start(features[None])
        for _ in range(count):
            embedded = F.embedding(torch.tensor([text]), target.model.embedding).float()
            output = module.midlayer(embedded, hidden, [])
            logits = module.norm(output[0, -1]) @ target.model.head_weight[vocabulary].float().T
            text.append(int(vocabulary[logits.argmax()]))
            hidden = torch.cat((hidden, output[:, -1:]), dim=1)
        return text[len(history) :]


@pytest.mark.parametrize("num_step_tokens", [40, 7], ids=["whole prompts", "chunks that end within blocks"])
def test_drafts_are_those_of_the_trained_module(tmp_path: Path, num_step_tokens: int) -> None:
    build("llama", tmp_path, seed=1)
    target = load(tmp_path, num_draft_layers=1)
    head = random_head("eagle", target)
    drafter = Recording(target, head, Method.BLOCK)
    drafter.proposals = []
    runner = SpeculativeRunner(target, drafter, Method.BLOCK)
    answer_all(runner, [GREEDY] * 5, Always(3), num_step_tokens=num_step_tokens)
    module = EagleModule(target.config, 2, 40)
    missing = module.load_state_dict(dict(head.weights), strict=True)
    assert not missing.missing_keys
    assert head.vocabulary is not None
    other = TorchRunner.load(tmp_path, num_blocks=64, block_size=BLOCK_SIZE, max_context_tokens=64)
    checked = 0
    for history, draft in drafter.proposals:
        expected = reference_draft(module, other, history, head.vocabulary, len(draft.token_ids))
        assert list(draft.token_ids) == expected, history
        checked += 1
    assert checked > 20
    assert len({draft.token_ids for _, draft in drafter.proposals}) > 10  # not always the same guess
