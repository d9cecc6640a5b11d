"""Which drafter a worker takes, and what it refuses at its start: each time in one sentence that says why."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save, save_file
from torch import Tensor

import decode.draft_head
import model.torch_runner
from decode.draft import Draft
from decode.draft_head import CARD, WEIGHTS
from decode.draft_planner import AdaptiveDrafts, FixedDrafts, NoDrafts
from decode.lookup_first import LookupFirst
from decode.speculative_runner import SpeculativeRunner
from deploy.drafting import DrafterPlan, choose_drafter, draft_planner
from deploy.runners import load_runner, warm_up
from model.checkpoint import model_digest
from model.config import ModelConfig
from model.kv_cache import CacheDoesNotFit
from model.runner import Chunk
from model.sampling_params import SamplingParams
from protos.channel import MAX_MESSAGE_BYTES
from protos.decode_pb2 import HandoverRecord
from tests.cluster.draft_heads import NUM_MEDUSA_HEADS, write_head
from tests.deploy.test_runners import config

ROOT = Path(__file__).resolve().parents[2]
Write = Callable[[Path, Path], None]
"""Into the first folder, for the model in the second."""


def copy_of(model: Path, to: Path, **changes: Any) -> Path:
    """A model whose config differs in these."""
    shutil.copytree(model, to, dirs_exist_ok=True)
    path = to / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    return to


def other_word(folder: Path, model: Path) -> None:
    tokenizer = copy_of(model, folder) / "tokenizer.json"
    tokenizer.write_text(tokenizer.read_text().replace('"<pad>"', '"<nil>"'))


def head_with_shapes_of_another(folder: Path, model: Path) -> None:
    other = copy_of(model, folder / "other", hidden_size=32)
    write_head(folder, "medusa", other, digest=model_digest(model))


def change_card(folder: Path, **changes: Any) -> None:
    card = json.loads((folder / CARD).read_text())
    (folder / CARD).write_text(json.dumps(card | changes))


def change_weights(folder: Path, **changes: Callable[[Tensor], Tensor]) -> None:
    """`changes` by name, with _ for the points."""
    weights = load_file(folder / WEIGHTS)
    names = {name.replace(".", "_"): name for name in weights}
    changed = {names.get(key, key): change(weights[names[key]]) for key, change in changes.items()}
    save_file({**weights, **changed}, folder / WEIGHTS)


UNUSABLE: list[tuple[str, str, Write | None, str]] = [
    (
        "head of another model",
        "eagle",
        lambda folder, model: void(write_head(folder, "eagle", model, digest="0123")),
        r"the draft head in \S+ is for tiny \(0123\); this model's digest is \w{32}",
    ),
    (
        "eagle head without tensors",
        "eagle",
        lambda folder, model: void(write_head(folder, "eagle", model, without=("norm.weight", "fc.weight"))),
        r"head\.safetensors lacks fc\.weight, norm\.weight",
    ),
    (
        "medusa head without a bias",
        "medusa",
        lambda folder, model: void(write_head(folder, "medusa", model, without=("heads.1.bias",))),
        r"lacks heads\.1\.bias",
    ),
    (
        "head of another size",
        "medusa",
        head_with_shapes_of_another,
        r"heads\.0\.weight of \S+ has shape \[32, 32\]; this target needs \[64, 64\]",
    ),
    (
        "head of whole numbers",
        "medusa",
        lambda folder, model: change_weights(
            write_head(folder, "medusa", model), heads_0_weight=lambda weight: weight.to(torch.int8)
        ),
        r"the tensors of \S+ are of torch\.float32, torch\.int8; all must be of the same, one of torch\.bfloat16,",
    ),
    (
        "head of two dtypes",
        "eagle",
        lambda folder, model: change_weights(
            write_head(folder, "eagle", model), midlayer_mlp_gate_proj_weight=lambda weight: weight.bfloat16()
        ),
        r"the tensors of \S+ are of torch\.bfloat16, torch\.float32; all must be of the same",
    ),
    (
        "head of a dtype that nothing computes with",
        "medusa",
        lambda folder, model: change_weights(
            write_head(folder, "medusa", model),
            **dict.fromkeys(
                (f"heads_{i}_{what}" for i in range(NUM_MEDUSA_HEADS) for what in ("weight", "bias")), Tensor.double
            ),
        ),
        r"the tensors of \S+ are of torch\.float64; all must be of the same",
    ),
    (
        "matrix that is none",
        "eagle",
        lambda folder, model: change_weights(
            write_head(folder, "eagle", model), midlayer_mlp_gate_proj_weight=lambda weight: weight[0, 0]
        ),
        r"midlayer\.mlp\.gate_proj\.weight of \S+ has shape \[\]; this target needs",
    ),
    (
        "token ids beyond what their differences can tell",
        "eagle",
        lambda folder, model: change_weights(
            write_head(folder, "eagle", model), d2t=lambda _: torch.tensor([0, 2**62, 2**63 - 3, -(2**62) - 3, 1])
        ),
        r"d2t of \S+ does not name ascending token ids",
    ),
    (
        "token ids that are no whole numbers",
        "medusa",
        lambda folder, model: change_weights(write_head(folder, "medusa", model), d2t=lambda ids: ids + 0.5),
        r"d2t of \S+ does not name ascending token ids",
    ),
    (
        "taps that are no numbers of layers",
        "eagle",
        lambda folder, model: change_card(write_head(folder, "eagle", model), taps=[0.0, True]),
        r"taps in \S+ are \[0\.0, True\]",
    ),
    (
        "head of another kind",
        "eagle",
        lambda folder, model: void(write_head(folder, "medusa", model)),
        "is of kind 'medusa', not 'eagle'",
    ),
    (
        "no folder",
        "eagle",
        lambda folder, model: folder.rmdir(),
        r"--drafter eagle: there is no folder \S+drafts",
    ),
    ("no head", "eagle", None, rf"\S+ has no {re.escape(CARD)}, so it is not a draft head"),
    (
        "a card that is none",
        "medusa",
        lambda folder, model: void((write_head(folder, "medusa", model) / CARD).write_text("[1]")),
        "is not the card of a draft head",
    ),
    (
        "weights that are none",
        "medusa",
        lambda folder, model: void((write_head(folder, "medusa", model) / WEIGHTS).write_text("nonsense")),
        r"head\.safetensors cannot be read",
    ),
    ("no draft model", "model", lambda folder, model: folder.rmdir(), r"--draft-model: '\S+' is neither a folder here"),
    (
        "other KV heads",
        "model",
        lambda folder, model: void(copy_of(model, folder, num_key_value_heads=4)),
        "the draft model's num_kv_heads is 4; to share the target's cache it must be 2",
    ),
    (
        "another hidden size",
        "model",
        lambda folder, model: void(copy_of(model, folder, hidden_size=128)),
        "the draft model's head_dim is 32; to share the target's cache it must be 16",
    ),
    (
        "a shorter context",
        "model",
        lambda folder, model: void(copy_of(model, folder, max_position_embeddings=512)),
        "the draft model's context is 512 tokens; sequences here have up to 1024",
    ),
    (
        "another number of logits",
        "model",
        lambda folder, model: void(copy_of(model, folder, vocab_size=640)),
        r"the draft model has logits of 640 tokens; .* it must be \d+",
    ),
    (
        "eagle head with a layer that is not there",
        "eagle",
        lambda folder, model: change_card(write_head(folder, "eagle", model), taps=[0, 3]),
        r"taps in \S+ are \[0, 3\]; layers of this model are 0 to 2",
    ),
    (
        "eagle head that reads nothing",
        "eagle",
        lambda folder, model: change_card(write_head(folder, "eagle", model), taps=[]),
        r"taps in \S+ are \[\]",
    ),
    (
        "another vocabulary",
        "model",
        other_word,
        r"the vocabularies differ at token id 0: \('<nil>', True\) in \S+, \('<pad>', True\) in",
    ),
]


TREE = {"draft_shape": "tree"}


def void(_: object) -> None:
    """Only that it was done matters."""


@pytest.mark.parametrize(
    ("kind", "write", "complaint"), [case[1:] for case in UNUSABLE], ids=[case[0] for case in UNUSABLE]
)
def test_what_does_not_fit_the_model_is_refused(
    tiny_model: Path, tmp_path: Path, kind: str, write: Write | None, complaint: str
) -> None:
    drafts = tmp_path / "drafts"
    drafts.mkdir()
    if write is not None:
        write(drafts, tiny_model)
    with pytest.raises(ValueError, match=complaint):
        load_runner(config(tiny_model, num_blocks=100, drafter=kind, draft_model=drafts), tiny_model)


@pytest.mark.parametrize(
    ("settings", "complaint"),
    [
        ({"drafter": "model"}, "--drafter model needs --draft-model: a folder"),
        (
            {"drafter": "eagle"},
            "no eagle head for .* is at hand; .* train one: python -m decode.train_head --kind eagle",
        ),
        (
            {"drafter": "ngram", "draft_model": "x"},
            "--draft-model goes with --drafter eagle, medusa or model, not ngram",
        ),
        ({"drafter": "none", "draft_model": "x"}, "--draft-model goes with .*, not none"),
        ({"draft_model": "x"}, "--draft-model goes with .*, not auto"),
        ({"drafter": "ngram", "runner": "timed"}, "--drafter ngram needs --runner torch"),
        *(
            ({**TREE, "drafter": kind}, f"--draft-shape tree goes with --drafter eagle, not {kind}, which cannot")
            for kind in ("ngram", "medusa", "model", "none")
        ),
        (TREE, "--draft-shape tree goes with --drafter eagle, not ngram, which cannot"),
        ({**TREE, "runner": "timed"}, "--draft-shape tree needs --runner torch"),
    ],
)
def test_settings_that_contradict_each_other(tiny_model: Path, settings: dict[str, str], complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        load_runner(config(tiny_model, num_blocks=100, **settings), tiny_model)


def test_worker_ends_with_one_sentence(tiny_model: Path, tmp_path: Path) -> None:
    head = write_head(tmp_path, "eagle", tiny_model, digest="0123")
    arguments = ["--model", str(tiny_model), "--num-blocks", "100", "--drafter", "eagle", "--draft-model", str(head)]
    command = [sys.executable, "-m", "deploy.cli", "worker", *arguments]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert run.returncode == 1
    assert "Traceback" not in run.stderr
    complaint = f"Error: --drafter eagle: the draft head in {head} is for tiny (0123); "
    assert run.stderr.splitlines()[-1].startswith(complaint)


@pytest.mark.parametrize(("kind", "num_layers"), [("eagle", 4), ("medusa", 3), ("model", 6), ("ngram", 3), ("none", 3)])
def test_cache_and_layout_have_what_the_drafter_needs(
    tiny_model: Path, tmp_path: Path, kind: str, num_layers: int
) -> None:
    settings: dict[str, Any] = {"num_blocks": 100, "drafter": kind}
    if kind in ("eagle", "medusa"):
        settings["draft_model"] = write_head(tmp_path, kind, tiny_model)
    elif kind == "model":
        settings["draft_model"] = tiny_model
    runner = load_runner(config(tiny_model, **settings), tiny_model)
    assert isinstance(runner, SpeculativeRunner) is (kind != "none")
    assert runner.drafter == kind
    assert runner.layout.num_layers == num_layers
    assert runner.layout.drafter.partition(":")[0] == (kind if settings.get("draft_model") else "")
    warm_up(runner, 100)


@pytest.mark.parametrize("kind", ["eagle", "medusa", "model"])
def test_weights_of_the_drafter_count_as_memory(
    tiny_model: Path, tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Just enough for the target, the drafter and the cache is enough, and a byte less is not."""
    if kind == "model":
        folder = copy_of(tiny_model, tmp_path)
        num_bytes = tensor_bytes(folder.glob("*.safetensors"))
    else:
        folder = write_head(tmp_path, kind, tiny_model)
        num_rows = len(load_file(folder / WEIGHTS)["d2t"])
        num_bytes = tensor_bytes([folder / WEIGHTS], without="d2t") + num_rows * 64 * 4  # rows in float32
    settings = config(tiny_model, num_blocks=100, drafter=kind, draft_model=folder)
    layout = load_runner(settings, tiny_model).layout
    needed = tensor_bytes(tiny_model.glob("*.safetensors")) + num_bytes + 100 * layout.block_bytes
    monkeypatch.setattr(model.torch_runner, "available_bytes", lambda device: needed)
    load_runner(settings, tiny_model)
    monkeypatch.setattr(model.torch_runner, "available_bytes", lambda device: needed - 1)
    with pytest.raises(CacheDoesNotFit, match="are available beside the weights"):
        load_runner(settings, tiny_model)


def tensor_bytes(files: Iterable[Path], without: str = "") -> int:
    return sum(tensor.nbytes for file in files for name, tensor in load_file(file).items() if name != without)


def test_states_that_no_message_has_room_for_are_refused(tiny_model: Path, tmp_path: Path) -> None:
    """Those of the largest block size that is taken fit, with a generation of ten bytes for each block."""
    head = write_head(tmp_path, "eagle", tiny_model)

    def plan(block_size: int) -> DrafterPlan | None:
        return choose_drafter(config(tiny_model, drafter="eagle", draft_model=head, block_size=block_size), tiny_model)

    with pytest.raises(ValueError, match="--block-size must be at most") as refused:
        plan(40_000)
    largest = int(str(refused.value).split()[-1])
    assert plan(largest) is not None
    with pytest.raises(ValueError, match=f"at most {largest}$"):
        plan(largest + 1)
    features = torch.zeros(largest, 2 * ModelConfig.from_folder(tiny_model).hidden_size)
    record = HandoverRecord(drafting=save({"state": features}), generations=[-1])
    room = MAX_MESSAGE_BYTES - record.ByteSize()
    assert 0 < room < 1 << 17  # for the names in it; little is given away


def test_head_is_another_if_it_reads_or_drafts_others(tiny_model: Path, tmp_path: Path) -> None:
    """Two workers exchange draft KV if it has the same name, so weights are not all that counts."""

    def name(folder: Path) -> str:
        plan = choose_drafter(config(tiny_model, drafter="eagle", draft_model=folder), tiny_model)
        assert plan is not None
        return plan.name

    first, again, taps, vocabulary = (
        write_head(tmp_path / name, "eagle", tiny_model) for name in ("first", "again", "taps", "vocabulary")
    )
    change_card(again, about={"steps": 3})
    change_card(taps, taps=[1, 0])
    weights = load_file(vocabulary / WEIGHTS)
    weights["d2t"] += 1  # the odd tokens instead of the even ones
    save_file(weights, vocabulary / WEIGHTS)
    assert name(first) == name(again)
    assert len({name(first), name(taps), name(vocabulary)}) == 3


@pytest.mark.parametrize(
    ("settings", "parents"), [({"draft_shape": "chain"}, None), (TREE, [-1, -1, -1]), ({}, [-1, -1, -1])]
)
def test_shape_of_drafts(tiny_model: Path, tmp_path: Path, settings: dict[str, Any], parents: list[int] | None) -> None:
    """A random head is unsure: all of a small tree are guesses for the next place."""
    head = write_head(tmp_path, "eagle", tiny_model)
    runner = load_runner(config(tiny_model, num_blocks=100, drafter="eagle", draft_model=head, **settings), tiny_model)
    assert isinstance(runner, SpeculativeRunner)
    greedy = SamplingParams(max_tokens=5, temperature=0.0)
    (draft,) = runner._drafter.propose([Chunk([5], 0, range(2), greedy, [5], 1, 3)])
    assert (len(draft.token_ids), draft.parents) == (3, parents)


def test_first_draft_is_not_the_first_one_of_its_worker(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Drafting is warmed up as well, where the cache has room."""
    head = write_head(tmp_path, "medusa", tiny_model)
    runner = load_runner(config(tiny_model, num_blocks=100, drafter="medusa", draft_model=head), tiny_model)
    assert isinstance(runner, SpeculativeRunner)
    drafter = runner._drafter
    asked: list[int] = []

    def propose(chunks: Sequence[Chunk]) -> list[Draft]:
        drafts = drafter.propose(chunks)
        asked.extend(len(draft.token_ids) for draft in drafts)
        return drafts

    seams = {"num_layers": drafter.num_layers, "taps": drafter.taps, "observe": drafter.observe, "propose": propose}
    monkeypatch.setattr(runner, "_drafter", SimpleNamespace(**seams))
    warm_up(runner, 100)
    assert asked == [2]
    warm_up(runner, 100 * 16)  # all there is
    assert len(asked) == 1


def test_auto_takes_the_head_that_comes_with_the_model(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decode.draft_head, "SHIPPED", tmp_path)
    by_look_up = choose_drafter(config(tiny_model), tiny_model)
    write_head(tmp_path / "another", "eagle", tiny_model, digest="0123")
    write_head(tmp_path / "a-medusa", "medusa", tiny_model)
    still_by_look_up = choose_drafter(config(tiny_model), tiny_model)
    write_head(tmp_path / "this", "eagle", tiny_model)
    by_head = choose_drafter(config(tiny_model), tiny_model)
    plans = [by_look_up, still_by_look_up, by_head]
    assert [plan and plan.kind for plan in plans] == ["ngram", "ngram", "eagle+ngram"]
    with pytest.raises(ValueError, match=r"--draft-model goes with .*, not auto"):
        choose_drafter(config(tiny_model, draft_model=tmp_path / "this"), tiny_model)


@pytest.mark.parametrize("kind", ["eagle", "medusa"])
def test_look_up_may_go_before_another_drafter(tiny_model: Path, tmp_path: Path, kind: str) -> None:
    head = write_head(tmp_path, kind, tiny_model)
    runners = [
        load_runner(config(tiny_model, num_blocks=100, drafter=drafter, draft_model=head), tiny_model)
        for drafter in (kind, f"{kind}+ngram")
    ]
    assert [isinstance(runner._drafter, LookupFirst) for runner in runners] == [False, True]  # type: ignore[attr-defined]
    alone, behind_lookup = (runner.layout for runner in runners)
    assert alone == behind_lookup  # they exchange KV
    warm_up(runners[1], 100)


@pytest.mark.parametrize(
    ("settings", "planner"),
    [
        ({}, AdaptiveDrafts),
        ({"draft_length": "fixed"}, FixedDrafts),
        ({"max_draft_tokens": 0}, NoDrafts),
        ({"drafter": "none"}, NoDrafts),
    ],
)
def test_how_much_is_drafted(tiny_model: Path, settings: dict[str, Any], planner: type[object]) -> None:
    chosen = config(tiny_model, num_blocks=100, **settings)
    runner = load_runner(chosen, tiny_model)
    assert type(draft_planner(chosen, runner, ModelConfig.from_folder(tiny_model), 1024)) is planner
