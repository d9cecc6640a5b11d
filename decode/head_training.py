"""The training loop of draft heads, EAGLE and Medusa alike: batches, schedule, checkpoints, held-out acceptance."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import chain
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from decode.eagle_training import Batch
from decode.head_data import HeadData
from decode.muon import Muon

Losses = Callable[[Batch], tuple[list[Tensor], list[Tensor]]]
"""Of one batch, by position in the draft: losses, and the share accepted up to there."""

_MOST_TOLD = 4  # differences
_REMEDY = "train as it was begun, or delete it"


@dataclass(frozen=True, slots=True)
class TrainingOptions:
    num_steps: int
    tokens_per_batch: int = 2048
    learning_rate: float = 4e-3  # at its highest; Muon takes more than AdamW
    warmup_steps: int = 50
    later_weight: float = 0.85  # of each further position's loss, relative to the one before
    checkpoint_every: int = 50
    max_tokens: int = 512  # of an example; the rest is left out
    seed: int = 0


def precision() -> torch.dtype:
    """What products are computed in: bfloat16, unless this CPU has none and torch's take fifty times as long."""
    return torch.bfloat16 if torch.ops.mkldnn._is_mkldnn_bf16_supported() else torch.float32


class CheckpointMismatch(ValueError):
    """A checkpoint is of another training: the message names what differs."""


@dataclass(frozen=True, slots=True)
class Progress:
    step: int
    loss: float
    acceptance: tuple[float, ...]


def batches(data: HeadData, indexes: Sequence[int], options: TrainingOptions, start: int) -> Iterator[Batch]:
    """For ever, epoch after epoch, each in an order of its own; from batch `start` on."""
    count, epoch = 0, 0
    while True:
        order = list(indexes)
        random.Random(options.seed * 7919 + epoch).shuffle(order)
        for group in _groups(data, order, options):
            if count >= start:
                yield collate(data, group, options.max_tokens)
            count += 1
        epoch += 1


def _groups(data: HeadData, order: Sequence[int], options: TrainingOptions) -> Iterator[list[int]]:
    """Examples of like length together, so that little is padded; then the groups in random order."""
    window = [sorted(order[first : first + 256], key=data.length) for first in range(0, len(order), 256)]
    groups: list[list[int]] = []
    for part in window:
        group: list[int] = []
        for index in part:
            longest = min(data.length(index), options.max_tokens)
            if group and longest * (len(group) + 1) > options.tokens_per_batch:
                groups.append(group)
                group = []
            group.append(index)
        groups.append(group)
    random.Random(options.seed + len(groups)).shuffle(groups)
    yield from groups


def collate(data: HeadData, indexes: Sequence[int], max_tokens: int) -> Batch:
    examples = [data[index] for index in indexes]
    learns = []
    for example in examples:
        mask = torch.zeros(len(example.token_ids), dtype=torch.bool)
        mask[example.first_answer - 1 : -1] = True  # the last token's next one is unknown
        learns.append(mask[:max_tokens])
    return Batch(
        token_ids=pad_sequence([e.token_ids[:max_tokens] for e in examples], batch_first=True),
        features=pad_sequence([e.features[:max_tokens] for e in examples], batch_first=True).to(precision()),
        hidden=pad_sequence([e.hidden[:max_tokens] for e in examples], batch_first=True).to(precision()),
        learns=pad_sequence(learns, batch_first=True),
    )


def train(
    module: nn.Module,
    losses: Losses,
    data: HeadData,
    indexes: Sequence[int],
    options: TrainingOptions,
    checkpoint: Path,
    report: Callable[[Progress], None],
    inputs: Mapping[str, str | int] | None = None,
) -> None:
    """Trains float32 parameters, and goes on from `checkpoint` if there is one. `precision` is that of the products.

    `inputs` say by what name and value the rest is known that decides what is learnt: the target, its taps, the draft
    vocabulary, the passes.

    Raises:
        CheckpointMismatch: the checkpoint is of other options, data, sizes or inputs, or cannot be read.
    """
    optimizers = _optimizers(module, options)
    training = _training(module, optimizers, data, indexes, options, inputs or {})
    step = _restore(module, optimizers, checkpoint, training)
    for batch in batches(data, indexes, options, start=step):
        if step >= options.num_steps:
            break
        for group in chain.from_iterable(optimizer.param_groups for optimizer in optimizers):
            group["lr"] = options.learning_rate * _schedule(step, options)
        with torch.autocast("cpu", torch.bfloat16, enabled=precision() is torch.bfloat16):
            by_position, accepted = losses(batch)
            weights = [options.later_weight**position for position in range(len(by_position))]
            loss = torch.stack([w * each for w, each in zip(weights, by_position, strict=True)]).sum() / sum(weights)
        module.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(module.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
        step += 1
        report(Progress(step, loss.item(), tuple(a.item() for a in accepted)))
        if step % options.checkpoint_every == 0 or step == options.num_steps:
            _save(module, optimizers, checkpoint, training, step)


@torch.no_grad()
def held_out(losses: Losses, data: HeadData, indexes: Sequence[int], options: TrainingOptions) -> Progress:
    """Loss and acceptance over examples that were never trained on, each batch weighted alike."""
    found = []
    for group in _groups(data, indexes, options):
        with torch.autocast("cpu", torch.bfloat16, enabled=precision() is torch.bfloat16):
            by_position, accepted = losses(collate(data, group, options.max_tokens))
        found.append(torch.stack([torch.stack(by_position).float(), torch.stack(accepted).float()]))
    loss, acceptance = torch.stack(found).mean(0)
    return Progress(0, loss.mean().item(), tuple(acceptance.tolist()))


def _schedule(step: int, options: TrainingOptions) -> float:
    if step < options.warmup_steps:
        return (step + 1) / options.warmup_steps
    done = (step - options.warmup_steps) / max(1, options.num_steps - options.warmup_steps)
    return 0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * min(1.0, done)))


def _optimizers(module: nn.Module, options: TrainingOptions) -> list[torch.optim.Optimizer]:
    """Muon for matrices, AdamW for the rest, at the same rate."""
    matrices = [each for each in module.parameters() if each.ndim == 2]
    vectors = [each for each in module.parameters() if each.ndim != 2]
    muon = Muon(matrices, options.learning_rate, dtype=precision())
    return [muon, torch.optim.AdamW(vectors, options.learning_rate, betas=(0.9, 0.95), weight_decay=0.0)]


def _training(
    module: nn.Module,
    optimizers: Sequence[torch.optim.Optimizer],
    data: HeadData,
    indexes: Sequence[int],
    options: TrainingOptions,
    inputs: Mapping[str, str | int],
) -> dict[str, str]:
    """All that has to be the same for a checkpoint to be gone on from, by name. The number of steps may change."""
    shapes = {f"shape of {name}": list(tensor.shape) for name, tensor in module.state_dict().items()}
    chosen = {name: value for name, value in asdict(options).items() if name not in ("checkpoint_every", "num_steps")}
    examples = {"number of examples": len(indexes), "digest of the examples": data.digest(indexes)}
    names = ", ".join(type(optimizer).__name__ for optimizer in optimizers)
    everything = {**inputs, **chosen, **examples, "optimizers": names, **shapes}
    return {name: str(value) for name, value in everything.items()}


def _save(
    module: nn.Module,
    optimizers: Sequence[torch.optim.Optimizer],
    path: Path,
    training: Mapping[str, str],
    step: int,
) -> None:
    partial = path.with_suffix(".part")
    states = {"module": module.state_dict(), "optimizers": [optimizer.state_dict() for optimizer in optimizers]}
    torch.save({**states, "training": dict(training), "step": step}, partial)
    partial.replace(path)


def _restore(
    module: nn.Module, optimizers: Sequence[torch.optim.Optimizer], path: Path, training: Mapping[str, str]
) -> int:
    """The number of steps done."""
    if not path.exists():
        return 0
    try:
        state = torch.load(path, weights_only=True)
        found, step = dict(state["training"]), int(state["step"])
    except Exception as error:  # torch, pickle and zipfile have one each
        raise CheckpointMismatch(f"{path} is not a checkpoint of this program: {error!r}; {_REMEDY}") from error
    names = [name for name in {**training, **found} if training.get(name) != found.get(name)]
    if names:
        told = [
            f"{name} is {found.get(name, 'unknown')} there and {training.get(name, 'unknown')} here" for name in names
        ]
        more = f", and {len(told) - _MOST_TOLD} more" if len(told) > _MOST_TOLD else ""
        raise CheckpointMismatch(f"{path} is of another training: {', '.join(told[:_MOST_TOLD])}{more}; {_REMEDY}")
    module.load_state_dict(state["module"])
    for optimizer, each in zip(optimizers, state["optimizers"], strict=True):
        optimizer.load_state_dict(each)
    return step
