"""Trains a draft head for a model, on what that model itself answers: `python -m decode.train_head --kind eagle`.

Prompts of the model's own, if asked for, are written first, in one go. Then three stages, each of which goes on where
it was interrupted: answers to the prompts, the target's hidden states along them, training. The head and its card are
written to --output; what is left in --work can be thrown away.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from rich.console import Console
from safetensors.torch import save_file
from torch import Tensor, nn

from decode.draft_head import CARD, WEIGHTS, DraftHead, HeadCard, HeadUnusable
from decode.eagle_training import EagleModule, eagle_losses
from decode.generations import Generation, NoPrompts
from decode.head_data import HeadData
from decode.head_training import CheckpointMismatch, Losses, Progress, TrainingOptions, held_out, precision, train
from decode.medusa_training import MedusaModule, medusa_losses
from decode.training_answers import AnswerOptions, collect_answers
from decode.training_progress import HelpWithDefaults, Teller, Ticker, percent
from model.cache_folder import default_cache
from model.checkpoint import model_digest
from model.config import ModelConfig
from model.model_source import ModelUnavailable, resolve_model
from model.tokenizer import Tokenizer
from model.torch_runner import TorchRunner

NUM_BLOCKS = 6144
HELD_OUT_EVERY = 20  # generations: each so-manieth is never trained on


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    kind: str
    model: str
    answers: AnswerOptions
    output: Path
    begin_with: Path | None  # a head whose weights are gone on from
    draft_vocab_size: int
    intermediate_size: int
    num_heads: int
    passes: int
    training: TrainingOptions


def main(arguments: Sequence[str] | None = None) -> None:
    job, num_threads = _job(arguments)
    torch.set_flush_denormal(True)  # shares of a softmax over thousands of tokens are, and cost fifty times as much
    if num_threads is not None:
        torch.set_num_threads(num_threads)
    console = Console(stderr=True, highlight=False)
    try:
        folder = resolve_model(job.model, default_cache())
        _run(job, folder, console)
    except (ModelUnavailable, NoPrompts, HeadUnusable, CheckpointMismatch) as error:
        sys.exit(f"Error: {error}")
    except KeyboardInterrupt:
        sys.exit("Interrupted: the same command goes on from what was saved last.")


def _run(job: Job, folder: Path, console: Console) -> None:
    config = ModelConfig.from_folder(folder)
    claim_work(job.answers.work, job.model, model_digest(folder))
    taps = (2, config.num_layers // 2, config.num_layers - 3)
    module = _module(job, config, len(taps))
    before = begin_with(job.begin_with, job.kind, taps, config, module) if job.begin_with else None
    runner = TorchRunner.load(folder, num_blocks=NUM_BLOCKS)
    work = job.answers.work
    stage = partial(Ticker, console)
    generations = collect_answers(job.answers, runner, Tokenizer.load(folder), lambda what: stage(what).tell)
    data = HeadData(work, generations, config.hidden_size, len(taps))
    clock = stage("hidden states")
    data.compute(runner, taps, lambda done: clock.tell(done, len(generations)))
    vocabulary = draft_vocabulary(generations, config.vocab_size, job.draft_vocab_size)
    losses = _losses(job, module, runner, vocabulary)
    indexes = range(len(generations))
    held = [index for index in indexes if index % HELD_OUT_EVERY == 0]
    learning = [index for index in indexes if index % HELD_OUT_EVERY]
    teller = Teller(console, job.training.num_steps, lambda: held_out(losses, data, held, job.training))
    inputs: dict[str, str | int] = {
        "kind": job.kind,
        "target": model_digest(folder),
        "taps": str(taps),
        "draft vocabulary": hashlib.sha256(vocabulary.numpy().tobytes()).hexdigest(),
        "passes": job.passes,
    }
    if before is not None:
        inputs["begun with"] = before.name
    checkpoint = work / f"{job.kind}.pt"
    train(module, losses, data, learning, job.training, checkpoint, teller.tell, inputs)
    final = held_out(losses, data, held, job.training)
    _write(job, folder, module, vocabulary, taps, final, generations, before)
    console.print(f"{job.output}: held-out acceptance by position {percent(final.acceptance)}")


def claim_work(work: Path, name: str, digest: str) -> None:
    """Answers and hidden states are one target's: a folder that has another's is refused.

    Raises:
        CheckpointMismatch: it has.
    """
    work.mkdir(parents=True, exist_ok=True)
    path = work / "target.json"
    if not path.exists():
        partial_path = path.with_suffix(".part")
        partial_path.write_text(json.dumps({"name": name, "digest": digest}), encoding="utf-8")
        partial_path.replace(path)
    found = json.loads(path.read_text(encoding="utf-8"))
    if found["digest"] != digest:
        raise CheckpointMismatch(
            f"{work} holds what {found['name']} ({found['digest']}) has answered; the target is {name} ({digest}): "
            "name another --work"
        )


def draft_vocabulary(generations: Sequence[Generation], vocab_size: int, size: int) -> Tensor:
    """The most frequent tokens of the answers, filled up with those that the tokenizer learnt first: ascending ids."""
    counts = Counter(token for g in generations for token in g.token_ids[g.num_prompt_tokens :])
    chosen = [token for token, _ in counts.most_common(size)]
    known = set(chosen)
    chosen += [token for token in range(vocab_size) if token not in known][: size - len(chosen)]
    return torch.tensor(sorted(chosen))


def _module(job: Job, config: ModelConfig, num_taps: int) -> nn.Module:
    torch.manual_seed(job.training.seed)
    if job.kind == "medusa":
        return MedusaModule(config.hidden_size, job.num_heads)
    return EagleModule(config, num_taps, job.intermediate_size)


def _losses(job: Job, module: nn.Module, runner: TorchRunner, vocabulary: Tensor) -> Losses:
    embedding = runner.model.embedding.to(precision())
    head = runner.model.head_weight[vocabulary].to(precision())
    in_draft = torch.full((runner.config.vocab_size,), -1)
    in_draft[vocabulary] = torch.arange(len(vocabulary))
    if isinstance(module, MedusaModule):
        return lambda batch: medusa_losses(module, batch, head, in_draft)
    assert isinstance(module, EagleModule)
    return lambda batch: eagle_losses(module, batch, embedding, head, in_draft, job.passes)


def begin_with(source: Path, kind: str, taps: tuple[int, ...], config: ModelConfig, module: nn.Module) -> DraftHead:
    """Gives the module the weights of another head: of this target, or of one that it was tuned from.

    Raises:
        HeadUnusable: it is no such head, has tensors that do not learn here, or is of other sizes than asked for.
    """
    card = HeadCard.read(source)
    head = DraftHead.load(source, kind, config, model_digest=None)
    if kind == "eagle" and card.taps != taps:
        raise HeadUnusable(f"the head in {source} taps layers {list(card.taps)}; {list(taps)} are tapped here")
    ignored = sorted(set(head.weights) - set(module.state_dict()))
    if ignored:
        raise HeadUnusable(f"the head in {source} has {', '.join(ignored)}, which would be lost")
    for name, tensor in module.state_dict().items():
        found = head.weights.get(name)
        if found is None or found.shape != tensor.shape:
            has = "is not there" if found is None else f"has shape {list(found.shape)}"
            raise HeadUnusable(f"{name} of {source} {has}; {list(tensor.shape)} was asked for")
    module.load_state_dict({name: head.weights[name].float() for name in module.state_dict()})
    return head


def _write(
    job: Job,
    folder: Path,
    module: nn.Module,
    vocabulary: Tensor,
    taps: tuple[int, ...],
    final: Progress,
    generations: Sequence[Generation],
    before: DraftHead | None,
) -> None:
    """The weights in bfloat16, and the card. The acceptance on prompt sets is added by `decode.measure_head`."""
    job.output.mkdir(parents=True, exist_ok=True)
    weights = {name: tensor.detach().bfloat16().contiguous() for name, tensor in module.state_dict().items()}
    offsets = (vocabulary - torch.arange(len(vocabulary))).to(torch.int32)
    save_file({**weights, "d2t": offsets}, job.output / WEIGHTS)
    counts = {"the model's own": job.answers.num_own_prompts, "the model's own, on code": job.answers.num_code_prompts}
    own = [name for name, count in counts.items() if count]
    about = {
        "data": {
            "prompts": [*(path.name for path in job.answers.files), *own],
            "answers": len(generations),
            "answer_tokens": sum(len(g.token_ids) - g.num_prompt_tokens for g in generations),
        },
        "steps": job.training.num_steps,
        "tokens_per_step": job.training.tokens_per_batch,
        "held_out": {"loss": round(final.loss, 4), "acceptance": [round(share, 4) for share in final.acceptance]},
    }
    if before is not None and before.card.about is not None:
        about["begun_with"] = {name: value for name, value in before.card.about.items() if name != "acceptance"}
    card = {
        "kind": job.kind,
        "targets": {job.model: model_digest(folder)},
        "taps": list(taps) if job.kind == "eagle" else [],
        "about": about,
    }
    (job.output / CARD).write_text(json.dumps(card, indent=2) + "\n", encoding="utf-8")


def _job(arguments: Sequence[str] | None) -> tuple[Job, int | None]:
    parser = argparse.ArgumentParser(
        prog="python -m decode.train_head",
        description=__doc__,
        formatter_class=HelpWithDefaults,
    )
    parser.add_argument("--kind", choices=("eagle", "medusa"), required=True, help="what to train")
    parser.add_argument("--model", default="demo-dense", help="the target: as for `pdserve up`")
    parser.add_argument("--prompts", type=Path, required=True, help="folder of *.jsonl with prompts to learn from")
    parser.add_argument("--work", type=Path, required=True, help="folder for answers, hidden states, checkpoints")
    parser.add_argument("--output", type=Path, required=True, help="folder the head is written to")
    parser.add_argument("--answers", type=int, default=2000, help="to the prompts of each file; first ones greedy")
    parser.add_argument(
        "--own-prompts", type=int, default=0, help="prompts that the model writes itself, answered once"
    )
    parser.add_argument("--own-code-prompts", type=int, default=0, help="the same, about code")
    parser.add_argument("--max-tokens", type=int, default=256, help="of an answer")
    parser.add_argument("--begin-with", type=Path, help="a head whose weights training begins with; default: random")
    parser.add_argument("--steps", type=int, default=1500, help="training steps")
    parser.add_argument("--tokens-per-step", type=int, default=2048, help="with padding")
    parser.add_argument("--learning-rate", type=float, default=4e-3, help="at its highest")
    parser.add_argument("--draft-vocabulary", type=int, default=8192, help="tokens the head can draft")
    parser.add_argument("--intermediate-size", type=int, default=1152, help="of the EAGLE layer's feed-forward net")
    parser.add_argument("--heads", type=int, default=4, help="Medusa heads")
    parser.add_argument("--passes", type=int, default=3, help="positions an EAGLE head is trained to draft")
    parser.add_argument("--threads", type=int, help="CPU threads; default: torch's own choice")
    given = parser.parse_args(arguments)
    for name, value in vars(given).items():
        least = 0 if name in ("own_prompts", "own_code_prompts") else 1
        if isinstance(value, int) and value < least:
            parser.error(f"--{name.replace('_', '-')} is {value}; it must be at least {least}")
    options = TrainingOptions(given.steps, given.tokens_per_step, given.learning_rate)
    job = Job(
        kind=given.kind,
        model=given.model,
        answers=AnswerOptions(
            prompts=given.prompts,
            work=given.work,
            answers_per_file=given.answers,
            num_own_prompts=given.own_prompts,
            num_code_prompts=given.own_code_prompts,
            max_tokens=given.max_tokens,
        ),
        output=given.output,
        begin_with=given.begin_with,
        draft_vocab_size=given.draft_vocabulary,
        intermediate_size=given.intermediate_size,
        num_heads=given.heads,
        passes=given.passes,
        training=options,
    )
    return job, given.threads


if __name__ == "__main__":
    main()
