"""How heads are trained: the loss against torch's own, passes against drafting step by step, and resuming."""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from decode import measure_head
from decode.draft_head import CARD, HeadUnusable
from decode.eagle_training import Batch, EagleModule, eagle_losses, shifted
from decode.generations import Generation, NoPrompts, read_generations, read_prompts
from decode.head_data import HeadData
from decode.head_loss import head_loss, target_law
from decode.head_training import CheckpointMismatch, Progress, TrainingOptions, collate, held_out, precision, train
from decode.medusa_training import MedusaModule, medusa_losses
from decode.own_prompts import PROMPT_TOKENS, start_of_user_turn, write_prompts
from decode.train_head import begin_with, claim_work, draft_vocabulary
from model.config import ModelConfig
from model.runner import Chunk
from model.tokenizer import Tokenizer
from model.torch_runner import TorchRunner
from tests.cluster.draft_heads import INNER_SIZE, NUM_MEDUSA_HEADS, TAPS, random_weights, write_head
from tests.cluster.tiny_model import build_tiny_moe
from tests.model.tiny_models import VOCAB_SIZE, build

pytestmark = pytest.mark.usefixtures("one_thread")

NUM_TAPS = 2


@pytest.fixture(scope="module")
def runner(tmp_path_factory: pytest.TempPathFactory) -> TorchRunner:
    folder = tmp_path_factory.mktemp("llama")
    build("llama", folder, seed=3)
    return TorchRunner.load(folder, num_blocks=64)


def generations(count: int = 6) -> list[Generation]:
    random = torch.Generator().manual_seed(5)
    return [
        Generation(index, 0, tuple(torch.randint(3, VOCAB_SIZE, (14 + index,), generator=random).tolist()), 5)
        for index in range(count)
    ]


@pytest.fixture
def data(tmp_path: Path, runner: TorchRunner) -> HeadData:
    data = HeadData(tmp_path, generations(), runner.config.hidden_size, NUM_TAPS)
    data.compute(runner, (0, 1), lambda done: None)
    return data


def in_draft(vocabulary: Tensor) -> Tensor:
    places = torch.full((VOCAB_SIZE,), -1)
    places[vocabulary] = torch.arange(len(vocabulary))
    return places


def test_loss_and_gradient_are_torchs() -> None:
    torch.manual_seed(0)
    head, hidden, wanted = torch.randn(12, 8), torch.randn(700, 8, requires_grad=True), torch.randn(700, 8)
    law = target_law(wanted, head)  # of 12 tokens all are among the likeliest
    loss, likeliest = head_loss(hidden, head, law)
    (gradient,) = torch.autograd.grad(loss * 3, hidden)
    expected = F.cross_entropy(hidden @ head.T, (wanted @ head.T).softmax(-1))
    (expected_gradient,) = torch.autograd.grad(expected * 3, hidden)
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(gradient, expected_gradient)
    assert torch.equal(likeliest, (hidden @ head.T).argmax(-1))


def test_target_law_holds_the_likeliest_tokens() -> None:
    torch.manual_seed(0)
    head, hidden = torch.randn(50, 8), torch.randn(3, 8)
    law = target_law(hidden, head)
    logits = hidden @ head.T
    assert torch.equal(law.token_ids, logits.topk(16).indices)
    torch.testing.assert_close(law.shares, logits.topk(16).values.softmax(-1))


def test_pass_j_is_step_j_of_a_draft(runner: TorchRunner) -> None:
    torch.manual_seed(1)
    config = runner.config
    module = EagleModule(config, NUM_TAPS, 40)
    embedded = torch.randn(1, 9, config.hidden_size)
    features = torch.randn(1, 9, NUM_TAPS * config.hidden_size)
    with torch.no_grad():
        outputs: list[Tensor] = []
        earlier: list[tuple[Tensor, Tensor]] = []
        hidden = module.start(features)
        for _ in range(3):
            outputs.append(module.midlayer(embedded, hidden, earlier))
            hidden = shifted(outputs[-1])
        first = module.start(features)
        for begin in range(6):  # a draft that begins at this slot: the features after it are unknown
            chain = first[:, : begin + 1]
            for step in range(3):
                found = module.midlayer(embedded[:, : chain.shape[1]], chain, [])
                torch.testing.assert_close(outputs[step][0, begin + step], found[0, -1], rtol=1e-4, atol=1e-5)
                chain = torch.cat((chain, found[:, -1:]), dim=1)


def test_features_are_those_of_the_target(data: HeadData, runner: TorchRunner) -> None:
    for index, generation in enumerate(generations()):
        chunk = Chunk(generation.token_ids, 0, range(2))
        output = runner.forward([chunk], num_rows=[len(generation.token_ids)], taps=(0, 1))
        assert output.features is not None
        example = data[index]
        assert example.first_answer == 5
        torch.testing.assert_close(example.features.float(), output.features, rtol=1e-2, atol=1e-2)
        torch.testing.assert_close(example.hidden.float(), output.hidden, rtol=1e-2, atol=1e-2)


def test_features_of_other_generations_are_computed_anew(data: HeadData, runner: TorchRunner, tmp_path: Path) -> None:
    """Rows that belong to other tokens would be learnt without a word."""

    def compute(wanted: list[Generation]) -> tuple[HeadData, list[int]]:
        of, told = HeadData(tmp_path, wanted, runner.config.hidden_size, NUM_TAPS), list[int]()
        of.compute(runner, (0, 1), told.append)
        return of, told

    assert compute(generations())[1] == []
    assert compute(generations(8))[1] == [8]
    wanted = generations(7)[1:]
    again, told = compute(wanted)
    assert told == [6]
    output = runner.forward([Chunk(wanted[0].token_ids, 0, range(2))], taps=(0, 1))
    assert output.features is not None
    torch.testing.assert_close(again[0].features.float(), output.features, rtol=1e-2, atol=1e-2)


def test_only_the_targets_own_tokens_are_learnt(data: HeadData) -> None:
    batch = collate(data, [0, 3], max_tokens=100)
    assert batch.token_ids.shape == (2, 17)
    assert batch.learns[0].nonzero().flatten().tolist() == list(range(4, 13))  # slot 4 predicts the first answer token
    assert batch.learns[1].nonzero().flatten().tolist() == list(range(4, 16))


def test_acceptance_counts_drafts_whose_tokens_before_were_right_too(data: HeadData, runner: TorchRunner) -> None:
    """Against drafting slot by slot, greedily, over the text as it is."""
    torch.manual_seed(2)
    config = runner.config
    module = EagleModule(config, NUM_TAPS, 40)
    vocabulary = torch.arange(0, VOCAB_SIZE, 2)
    head, places = runner.model.head_weight[vocabulary].float(), in_draft(vocabulary)
    embedding = runner.model.embedding.float()
    batch = collate(data, [1, 2], max_tokens=100)
    batch = Batch(batch.token_ids, batch.features.float(), batch.hidden.float(), batch.learns)
    with torch.no_grad():
        _, accepted = eagle_losses(module, batch, embedding, head, places, passes=2)
        counts = [[0, 0], [0, 0]]
        for row in range(2):
            for slot in batch.learns[row].nonzero().flatten().tolist():
                chain = module.start(batch.features[row : row + 1])[:, : slot + 1]
                stands = True
                for step in range(2):
                    place = slot + step
                    if place >= batch.learns.shape[1] or not batch.learns[row, place]:
                        break
                    embedded = F.embedding(batch.token_ids[row : row + 1, : place + 1], embedding)
                    found = module.midlayer(embedded, chain, [])
                    guess = (module.norm(found[0, -1]) @ head.T).argmax()
                    wanted = (batch.hidden[row, place] @ head.T).argmax()
                    stands = stands and bool(guess == wanted) and int(places[batch.token_ids[row, place + 1]]) >= 0
                    counts[step][0] += stands
                    counts[step][1] += 1
                    chain = torch.cat((chain, found[:, -1:]), dim=1)
    assert accepted[0].item() == pytest.approx(counts[0][0] / counts[0][1])
    num_second = int((batch.learns & (torch.arange(batch.learns.shape[1]) >= 1)).sum())
    assert accepted[1].item() == pytest.approx(counts[1][0] / num_second)


def test_untrained_medusa_heads_repeat_the_targets_own_guess(data: HeadData, runner: TorchRunner) -> None:
    module = MedusaModule(runner.config.hidden_size, 2)
    batch = collate(data, [0], max_tokens=100)
    batch = Batch(batch.token_ids, batch.features.float(), batch.hidden.float(), batch.learns)
    head, places = runner.model.head_weight.float(), torch.arange(VOCAB_SIZE)
    losses, accepted = medusa_losses(module, batch, head, places)
    guesses = (batch.hidden[0] @ head.T).argmax(-1)
    slots = [slot for slot in range(4, 13) if slot + 1 < 13]
    share = sum(bool(guesses[slot] == guesses[slot + 1]) for slot in slots) / len(slots)
    assert accepted[0].item() == pytest.approx(share)
    assert losses[0].item() > 0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_training_learns_in_either_precision(
    dtype: torch.dtype, data: HeadData, runner: TorchRunner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("decode.head_training.precision", lambda: dtype)
    head, places = runner.model.head_weight.to(dtype), torch.arange(VOCAB_SIZE)
    torch.manual_seed(4)
    medusa, reported = MedusaModule(runner.config.hidden_size, 2), list[float]()
    options = TrainingOptions(30, tokens_per_batch=40, learning_rate=2e-2, warmup_steps=2)
    train(
        medusa,
        lambda batch: medusa_losses(medusa, batch, head, places),
        data,
        range(len(data)),
        options,
        tmp_path / "medusa.pt",
        lambda progress: reported.append(progress.loss),
    )
    assert sum(reported[-5:]) < 0.98 * sum(reported[:5])
    assert all(parameter.dtype == torch.float32 for parameter in medusa.parameters())


@pytest.mark.parametrize("kind", ["eagle", "medusa"])
def test_training_learns_and_goes_on_where_it_was_interrupted(
    kind: str, data: HeadData, runner: TorchRunner, tmp_path: Path
) -> None:
    head, places = runner.model.head_weight.to(precision()), torch.arange(VOCAB_SIZE)
    embedding = runner.model.embedding.to(precision())

    def fresh() -> tuple[torch.nn.Module, object]:
        torch.manual_seed(4)
        if kind == "medusa":
            medusa = MedusaModule(runner.config.hidden_size, 2)
            return medusa, lambda batch: medusa_losses(medusa, batch, head, places)
        eagle = EagleModule(runner.config, NUM_TAPS, 40)
        return eagle, lambda batch: eagle_losses(eagle, batch, embedding, head, places, 2)

    def run(name: str, num_steps: int, stop_at: int | None = None) -> dict[str, Tensor]:
        module, losses = fresh()
        options = TrainingOptions(40, tokens_per_batch=40, learning_rate=2e-2, warmup_steps=2, checkpoint_every=10)

        def report(progress: Progress) -> None:
            if progress.step == stop_at:
                raise KeyboardInterrupt

        indexes = list(range(len(data)))
        before = held_out(losses, data, indexes, options)  # type: ignore[arg-type]
        try:
            train(module, losses, data, indexes, options, tmp_path / name, report)  # type: ignore[arg-type]
        except KeyboardInterrupt:
            return {}
        assert held_out(losses, data, indexes, options).loss < 0.98 * before.loss  # type: ignore[arg-type]
        return module.state_dict()

    whole = run("whole", 40)
    run("parts", 40, stop_at=25)
    resumed = run("parts", 40)
    for name, tensor in whole.items():
        torch.testing.assert_close(resumed[name], tensor)


def begun(data: HeadData, checkpoint: Path, *, num_heads: int = 2, **changes: Any) -> list[int]:
    """Medusa heads that learn for four steps, of which a checkpoint is kept after two. The steps that were done."""
    inputs = {"target": "abc", "taps": "0 1"} | changes.pop("inputs", {})
    options = TrainingOptions(**{"num_steps": 4, "tokens_per_batch": 40, "checkpoint_every": 2} | changes)
    random, size = torch.Generator().manual_seed(3), data[0].hidden.shape[1]
    head, places = torch.randn(VOCAB_SIZE, size, generator=random).to(precision()), torch.arange(VOCAB_SIZE)
    medusa, steps = MedusaModule(size, num_heads), list[int]()

    def report(progress: Progress) -> None:
        steps.append(progress.step)
        if progress.step == 3:
            raise KeyboardInterrupt

    with suppress(KeyboardInterrupt):
        train(
            medusa,
            lambda batch: medusa_losses(medusa, batch, head, places),
            data,
            range(len(data)),
            options,
            checkpoint,
            report,
            inputs,
        )
    return steps


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"learning_rate": 0.5}, "learning_rate is 0.004 there and 0.5 here; train as it was begun, or delete it"),
        ({"seed": 1, "later_weight": 0.5}, "later_weight is 0.85 there and 0.5 here, seed is 0 there and 1 here;"),
        ({"num_heads": 1}, r"shape of heads\.1\.weight is \[36, 36\] there and unknown here"),
        ({"num_heads": 5}, r"unknown there and \[36, 36\] here, .*, and 2 more;"),
        ({"inputs": {"target": "def"}}, "target is abc there and def here;"),
        ({"inputs": {"passes": 3}}, "passes is unknown there and 3 here;"),
    ],
)
def test_checkpoint_of_another_training_is_refused(
    data: HeadData, tmp_path: Path, changes: dict[str, Any], complaint: str
) -> None:
    checkpoint = tmp_path / "medusa.pt"
    assert begun(data, checkpoint) == [1, 2, 3]
    before = checkpoint.read_bytes()
    with pytest.raises(CheckpointMismatch, match=complaint):
        begun(data, checkpoint, **changes)
    assert checkpoint.read_bytes() == before
    assert begun(data, checkpoint, checkpoint_every=1) == [3]  # when it is kept makes no difference


def test_checkpoint_over_other_answers_is_refused(data: HeadData, runner: TorchRunner, tmp_path: Path) -> None:
    """Also if only what is prompt and what is answer differs."""
    checkpoint, size = tmp_path / "medusa.pt", runner.config.hidden_size
    begun(data, checkpoint)
    prompts = HeadData(tmp_path, [replace(g, num_prompt_tokens=6) for g in generations()], size, NUM_TAPS)
    with pytest.raises(CheckpointMismatch, match=r"digest of the examples is \w{16} there and \w{16} here; "):
        begun(prompts, checkpoint)
    fewer = HeadData(tmp_path, generations(5), size, NUM_TAPS)
    with pytest.raises(CheckpointMismatch, match="number of examples is 6 there and 5 here, digest"):
        begun(fewer, checkpoint)


@pytest.mark.parametrize("spoil", ["nonsense", "another file of torch's"])
def test_what_is_no_checkpoint_is_refused(spoil: str, data: HeadData, tmp_path: Path) -> None:
    checkpoint = tmp_path / "medusa.pt"
    if spoil == "nonsense":
        checkpoint.write_text("nonsense")
    else:
        torch.save({"module": {}, "step": 2}, checkpoint)
    with pytest.raises(CheckpointMismatch, match="is not a checkpoint of this program"):
        begun(data, checkpoint)


def test_a_chat_model_writes_prompts_of_its_own(tmp_path: Path) -> None:
    """Each is what it samples behind the beginning of a user's turn, up to the end of the turn that it writes."""
    folder = build_tiny_moe(tmp_path)
    tokenizer, runner = Tokenizer.load(folder), TorchRunner.load(folder, num_blocks=800)
    assert tokenizer.decode(start_of_user_turn(tokenizer)) == "<|user|>"
    path, told = tmp_path / "new" / "own.jsonl", list[int]()
    write_prompts(runner, tokenizer, path, count=40, progress=told.append)
    assert told == list(range(1, 41))
    prompts = read_prompts(path)
    assert 0 < len(prompts) < 40  # some do not end
    assert all(len(prompt) >= PROMPT_TOKENS.start and "</s>" not in prompt for prompt in prompts)
    content = path.read_bytes()
    write_prompts(runner, tokenizer, path, count=40, progress=told.append)  # they are there already
    assert path.read_bytes() == content and len(told) == 40
    with pytest.raises(NoPrompts, match="none of 0 beginnings"):
        write_prompts(runner, tokenizer, tmp_path / "none.jsonl", count=0, progress=told.append)
    assert not (tmp_path / "none.jsonl").exists()


def test_own_prompts_go_on_from_given_beginnings(tmp_path: Path) -> None:
    folder = build_tiny_moe(tmp_path)
    tokenizer, runner = Tokenizer.load(folder), TorchRunner.load(folder, num_blocks=800)
    path, beginnings = tmp_path / "own.jsonl", ("w7 w8", "w9")
    write_prompts(runner, tokenizer, path, count=30, beginnings=beginnings, progress=lambda done: None)
    prompts = read_prompts(path)
    assert all(prompt.startswith(beginnings) for prompt in prompts)
    assert {prompt[:2] for prompt in prompts} == {"w7", "w9"}


@pytest.mark.parametrize("kind", ["eagle", "medusa"])
def test_training_begins_with_the_weights_of_another_head(kind: str, tmp_path: Path) -> None:
    build("llama", tmp_path / "tiny", seed=3)
    config = ModelConfig.from_folder(tmp_path / "tiny")
    head = write_head(tmp_path / "head", kind, tmp_path / "tiny", digest="of the model that this one was tuned from")
    module = fresh_module(kind, config, INNER_SIZE)
    assert begin_with(head, kind, TAPS, config, module).name.startswith(kind)
    for name, tensor in random_weights(kind, config).items():
        torch.testing.assert_close(module.state_dict()[name], tensor)


@pytest.mark.parametrize(
    ("inner_size", "taps", "complaint"),
    [
        (
            INNER_SIZE + 8,
            TAPS,
            r"midlayer\.mlp\.gate_proj\.weight of .* has shape \[40, 36\]; \[48, 36\] was asked for",
        ),
        (INNER_SIZE, (0, 3), r"taps layers \[0, 1\]; \[0, 3\] are tapped here"),
    ],
)
def test_head_of_other_sizes_is_no_beginning(
    inner_size: int, taps: tuple[int, ...], complaint: str, tmp_path: Path
) -> None:
    build("llama", tmp_path / "tiny", seed=3)
    config = ModelConfig.from_folder(tmp_path / "tiny")
    head = write_head(tmp_path / "head", "eagle", tmp_path / "tiny")
    with pytest.raises(HeadUnusable, match=complaint):
        begin_with(head, "eagle", taps, config, fresh_module("eagle", config, inner_size))


def fresh_module(kind: str, config: ModelConfig, inner_size: int) -> torch.nn.Module:
    if kind == "medusa":
        return MedusaModule(config.hidden_size, NUM_MEDUSA_HEADS)
    return EagleModule(config, len(TAPS), inner_size)


def test_draft_vocabulary_takes_what_the_target_says_most() -> None:
    said = [Generation(0, 0, (1, 2, 9, 9, 9, 5, 5, 7), 2)]
    assert draft_vocabulary(said, vocab_size=20, size=2).tolist() == [5, 9]
    assert draft_vocabulary(said, vocab_size=20, size=5).tolist() == [0, 1, 5, 7, 9]


def test_prompts_of_every_known_form(tmp_path: Path) -> None:
    rows = [
        {"turns": ["a", "not this"]},
        {"question": "b"},
        {"prompt": "c"},
        {"instruction": "d", "instances": [{"input": "x"}, {"input": ""}]},
        {"question": "b"},
    ]
    path = tmp_path / "set.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    assert sorted(read_prompts(path)) == ["a", "b", "c", "d", "d\n\nx"]
    path.write_text('{"prompt": "one\u2028prompt"}\n\n', encoding="utf-8")
    assert read_prompts(path) == ["one\u2028prompt"]
    path.write_text("\n".join(map(json.dumps, rows)))
    assert read_prompts(path) == read_prompts(path)
    path.write_text('{"other": 1}')
    with pytest.raises(NoPrompts, match="has no rows with turns, prompt, question or instruction"):
        read_prompts(path)


def test_a_head_that_does_not_fit_is_not_said_to_be_for_the_model(tmp_path: Path) -> None:
    """Or a worker with that model would take it, and not start."""
    model, prompts = tmp_path / "model", tmp_path / "prompts"
    model.mkdir()
    build("llama", model, seed=3)
    head = write_head(tmp_path / "head", "medusa", model, digest="0123", without=("heads.1.bias",))
    before = (head / CARD).read_text()
    prompts.mkdir()
    with pytest.raises(SystemExit, match=r"^Error: .* holds no \*\.jsonl"):
        measure_head.main(["--head", str(head), "--model", str(model), "--prompts", str(prompts)])
    (prompts / "some.jsonl").write_text('{"prompt": "a"}\n')
    with pytest.raises(SystemExit, match=r"^Error: .* lacks heads\.1\.bias"):
        measure_head.main(["--head", str(head), "--model", str(model), "--prompts", str(prompts)])
    with pytest.raises(SystemExit, match=r"^Error: there is no folder "):
        measure_head.main(["--head", str(head / "x"), "--model", str(model), "--prompts", str(prompts)])
    assert (head / CARD).read_text() == before


def test_work_of_another_model_is_refused(tmp_path: Path) -> None:
    """Its answers and hidden states would teach a head the wrong thing."""
    claim_work(tmp_path / "work", "one", "0123")
    claim_work(tmp_path / "work", "one", "0123")
    with pytest.raises(CheckpointMismatch, match=r"what one \(0123\) has answered; the target is two \(4567\)"):
        claim_work(tmp_path / "work", "two", "4567")


def test_a_line_that_was_cut_off_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "answers.jsonl"
    row = {"prompt_index": 1, "round_index": 0, "token_ids": [1, 2, 3], "num_prompt_tokens": 2}
    path.write_text(json.dumps(row) + "\n" + json.dumps(row)[:20])
    assert read_generations(path) == [Generation(1, 0, (1, 2, 3), 2)]
    assert read_generations(tmp_path / "none") == []
