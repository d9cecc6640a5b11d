"""A second layer behind the seam: shaped like the one that DeepSeek-V3 predicts several tokens with (arXiv 2412.19437).

It is written here out of a model's parts, and compared with transformers' decoder layer on transformers' hidden states.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import LlamaConfig, LlamaModel, PreTrainedModel

from decode.draft import Draft, DraftShape
from decode.draft_layer import LayerDrafter
from decode.speculative_runner import SpeculativeRunner
from decode.verification import Method
from model.moe import Expert
from model.runner import Chunk
from model.step_input import StepInput
from model.torch_runner import TorchRunner
from tests.decode.test_eagle import check_chain, check_tree
from tests.decode.test_speculative_runner import GREEDY, REQUESTS, Always, answer_all, load, tokens
from tests.model.tiny_models import VOCAB_SIZE, build

Weights = dict[str, Tensor]


def random_weights(target: TorchRunner) -> tuple[Weights, LlamaModel]:
    """By DeepSeek's names, and a model of one layer that has them, all but the projection and the norms before it."""
    config = target.config
    torch.manual_seed(3)
    layer = LlamaModel(
        LlamaConfig(
            vocab_size=1,
            hidden_size=config.hidden_size,
            intermediate_size=44,
            num_hidden_layers=1,
            num_attention_heads=config.num_heads,
            num_key_value_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            rms_norm_eps=config.norm_eps,
            rope_parameters={"rope_type": "default", "rope_theta": config.rope.theta},
        )
    ).eval()
    for parameter in layer.parameters():
        parameter.data.add_(torch.randn_like(parameter) * 0.25)
    size = config.hidden_size
    weights = {name.removeprefix("layers.0."): tensor for name, tensor in layer.state_dict().items()}
    weights |= {name: torch.rand(size) + 0.5 for name in ("enorm.weight", "hnorm.weight")}
    return weights | {"eh_proj.weight": torch.randn(size, 2 * size) * 0.3}, layer


class MtpLayer:
    """Implements `DraftLayer`."""

    name = "mtp:test"
    vocabulary = None

    def __init__(self, target: TorchRunner, weights: Weights) -> None:
        config, backend = target.config, target.backend
        self.taps = (config.num_layers,)
        self._number = config.num_layers
        self._embedding = target.model.embedding
        self._norms = {
            name: backend.norm(weights[f"{name}.weight"], config.norm_eps)
            for name in ("enorm", "hnorm", "input_layernorm", "post_attention_layernorm", "norm")
        }
        self._join = backend.linear([weights["eh_proj.weight"]], [None])
        names = [f"self_attn.{name}_proj.weight" for name in ("q", "k", "v", "o")]
        self._qkv = backend.linear([weights[name] for name in names[:3]], [None] * 3)
        self._output = backend.linear([weights[names[3]]], [None])
        self._mlp = backend.feed_forward(
            Expert(*(weights[f"mlp.{name}_proj.weight"] for name in ("gate", "up", "down")))
        )
        self._head = backend.linear([target.model.head_weight], [None])
        self._attention = backend.attention(config, target.cache, [None] * (self._number + 1))

    def fuse(self, features: Tensor) -> Tensor:
        return features

    def store(self, step: StepInput, hidden: Tensor) -> None:
        self._queries(self._joined(step, hidden), step)

    def run(self, step: StepInput, hidden: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
        joined = self._joined(step, hidden)
        attended = self._attention.attend(self._number, self._queries(joined, step), step)
        output = joined[rows]
        self._output(attended[rows], add_to=output)
        self._mlp(self._norms["post_attention_layernorm"](output), add_to=output)
        return self._head(self._norms["norm"](output)), output

    def _joined(self, step: StepInput, hidden: Tensor) -> Tensor:
        embedded = F.embedding(step.token_ids, self._embedding)
        return self._join(torch.cat((self._norms["enorm"](embedded), self._norms["hnorm"](hidden)), dim=-1))

    def _queries(self, joined: Tensor, step: StepInput) -> Tensor:
        return self._attention.store(self._number, self._qkv(self._norms["input_layernorm"](joined)), step)


class Reference:
    """Everything anew for each token, by transformers."""

    def __init__(self, target: PreTrainedModel, layer: LlamaModel, weights: Weights) -> None:
        self._target, self._layer, self._weights = target, layer, weights
        self._outputs: dict[object, Tensor] = {}
        for module in (target.model.layers[-1], layer.layers[0]):
            module.register_forward_hook(self._keep)

    def _keep(self, module: object, given: object, output: Tensor | tuple[Tensor, ...]) -> None:
        self._outputs[module] = output if isinstance(output, Tensor) else output[0]

    @torch.inference_mode()
    def law(self, history: list[int], path: Sequence[int]) -> Tensor:
        self._target(torch.tensor([history]))
        features = self._outputs[self._target.model.layers[-1]].view(len(history), -1)
        text, hidden = list(history), torch.cat((torch.zeros_like(features[:1]), features[:-1]))
        for token in (*path, None):
            embedded = self._target.model.embed_tokens(torch.tensor(text))
            joined = torch.cat((self._normed("enorm", embedded), self._normed("hnorm", hidden)), dim=-1)
            joined = joined @ self._weights["eh_proj.weight"].T
            normed = self._layer(inputs_embeds=joined[None]).last_hidden_state[0, -1]
            if token is not None:
                text.append(token)
                output = self._outputs[self._layer.layers[0]].view(len(text) - 1, -1)
                hidden = torch.cat((hidden, output[-1:]))
        logits: Tensor = self._target.lm_head(normed)
        return logits.log_softmax(dim=-1)

    def _normed(self, name: str, x: Tensor) -> Tensor:
        return F.rms_norm(x, x.shape[-1:], self._weights[f"{name}.weight"], self._layer.config.rms_norm_eps)


class Recording(LayerDrafter):
    proposals: list[tuple[list[int], Draft]]

    def propose(self, chunks: Sequence[Chunk]) -> list[Draft]:
        histories = [list(chunk.history) for chunk in chunks]
        drafts = super().propose(chunks)
        self.proposals += zip(histories, drafts, strict=True)
        return drafts


@pytest.mark.parametrize("num_step_tokens", [40, 7], ids=["whole prompts", "chunks that end within blocks"])
@pytest.mark.parametrize(("shape", "num_drafts"), [(DraftShape.CHAIN, 3), (DraftShape.TREE, 8)])
def test_a_layer_of_another_kind_drafts_what_it_computes(
    tmp_path: Path, shape: DraftShape, num_drafts: int, num_step_tokens: int
) -> None:
    model = build("llama", tmp_path, seed=1)
    target = load(tmp_path, num_draft_layers=1)
    weights, layer = random_weights(target)
    drafter = Recording(target, MtpLayer(target, weights), Method.BLOCK, shape)
    drafter.proposals = []
    runner = SpeculativeRunner(target, drafter, Method.BLOCK)
    answer_all(runner, [GREEDY] * 5, Always(num_drafts), num_step_tokens=num_step_tokens)
    law, check = Reference(model, layer, weights).law, check_chain if shape is DraftShape.CHAIN else check_tree
    for history, draft in drafter.proposals:
        check(history, draft, law, torch.arange(VOCAB_SIZE))
    assert len({tuple(draft.token_ids) for _, draft in drafter.proposals}) > 10


@pytest.mark.parametrize("family", ["llama", "mixtral"])
@pytest.mark.parametrize(("shape", "num_drafts"), [(DraftShape.CHAIN, 4), (DraftShape.TREE, 4), (DraftShape.TREE, 13)])
def test_and_the_tokens_are_those_without_it(tmp_path: Path, family: str, shape: DraftShape, num_drafts: int) -> None:
    build(family, tmp_path, seed=1)
    method = Method.COUPLED
    expected = tokens(answer_all(load(tmp_path), REQUESTS))
    target = load(tmp_path, num_draft_layers=1)
    drafter = LayerDrafter(target, MtpLayer(target, random_weights(target)[0]), method, shape)
    assert tokens(answer_all(SpeculativeRunner(target, drafter, method), REQUESTS, Always(num_drafts))) == expected
